"""The programs of README and docs run as they stand, each page from its first line to its last."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import PROGRAMS, blocks


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_program_runs(path: Path, tmp_path: Path) -> None:
    program = tmp_path / f"{path.stem}.py"  # a file: torch.compile looks for the source
    program.write_text("".join(blocks(path)))
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
