"""scripts/both_sides.py: what it makes of two runs of a suite."""

from __future__ import annotations

import os
from pathlib import Path

import both_sides
import pytest

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


def test_what_ends_differently_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, text in (
        ("test_suite.py", SUITE),
        ("made_up_plugin.py", 'import os\nos.environ["SIDE"] = "ours"\n'),
        ("pytest.ini", "[pytest]\n"),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setitem(both_sides.SIDES, "ours", ["-p", "made_up_plugin"])
    monkeypatch.chdir(tmp_path)
    assert both_sides.main(["-q", "-p", "no:cacheprovider", "test_suite.py"]) == 1
    said = capfd.readouterr().out.splitlines()[-5:]
    assert said == [
        "native: {'failed': 2, 'passed': 3}",
        "ours: {'failed': 2, 'passed': 2, 'skipped': 1}",
        "test_suite::test_native_only: passed on native, skipped on ours",
        "test_suite::test_ours_only: failed on native, passed on ours",
        "test_suite::test_torn_down: passed on native, failed on ours",
    ]
