"""The examples, each in a process of its own: they are documentation that must not rot."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))

if importlib.util.find_spec("torch") is None:
    pytest.skip("the examples need torch", allow_module_level=True)


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def run(example: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", str(example)], capture_output=True, text=True, timeout=300
    )


@pytest.mark.skipif(not has_gpu(), reason="captures CUDA graphs")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_runs(example: Path) -> None:
    done = run(example)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.skipif(has_gpu(), reason="what is said where there is no GPU")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_says_what_is_missing(example: Path) -> None:
    """One sentence and exit code 1: nothing was shown, so it must not look like success."""
    done = run(example)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "no CUDA device" in done.stderr
    assert "Traceback" not in done.stderr
