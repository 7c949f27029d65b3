"""scripts/both_sides.py: what it makes of two runs of a suite."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "both_sides.py"

# Its sides are told apart by what the second is run with.
SUITE = """
import os, pytest

def test_alike():
    pass

def test_failing_on_both():
    assert False

def test_ours_only():
    assert os.environ.get("SIDE") == "ours"

def test_native_only():
    if os.environ.get("SIDE") == "ours":
        pytest.skip("not here")

@pytest.fixture
def broken():
    yield
    assert os.environ.get("SIDE") != "ours"

def test_torn_down(broken):
    pass
"""
PLUGIN = """
import os
os.environ["SIDE"] = "ours"
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("both_sides", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "made_up_plugin.py").write_text(PLUGIN)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setitem(module.SIDES, "ours", ["-p", "made_up_plugin"])
    monkeypatch.chdir(tmp_path)
    return module


def test_what_ends_differently_is_named(
    script: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    assert script.main(["-q", "-p", "no:cacheprovider", "test_suite.py"]) == 1
    said = capfd.readouterr().out.splitlines()[-5:]
    assert said == [
        "native: {'failed': 2, 'passed': 3}",
        "ours: {'failed': 2, 'passed': 2, 'skipped': 1}",
        "test_suite::test_native_only: passed on native, skipped on ours",
        "test_suite::test_ours_only: failed on native, passed on ours",
        "test_suite::test_torn_down: passed on native, failed on ours",
    ]
