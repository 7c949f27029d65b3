"""scripts/dev.py: what it builds again, and how it ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import dev
import pytest


def test_what_has_not_changed_is_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    (tmp_path / "csrc").mkdir()
    for name in ("csrc/CMakeLists.txt", "CMakeLists.txt", "pyproject.toml", "setup.py"):
        (tmp_path / name).touch()
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    commands: list[tuple[str, ...]] = []
    versions = [""]
    monkeypatch.setattr(dev, "run", lambda *command, is_quiet: commands.append(command))
    monkeypatch.setattr(dev, "has_gpu", lambda: False)
    monkeypatch.setattr(dev, "torch_of", lambda python: versions[-1])
    monkeypatch.setattr(dev, "succeeds", lambda *command, given="": True)
    for _ in range(2):
        dev.install(python)
    assert [command[2:] for command in commands] == [("pip", "install", "--editable", ".")]
    os.utime(tmp_path / "csrc/CMakeLists.txt", (2e9, 2e9))
    dev.install(python)
    assert len(commands) == 2
    versions.append("2.12.0")
    dev.install(python)
    assert len(commands) == 3


def test_what_is_quiet_says_something_if_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    dev.run(sys.executable, "-c", "print('downloading')", is_quiet=True)
    assert "downloading" not in capsys.readouterr().out.splitlines()
    with pytest.raises(SystemExit) as exit_info:
        dev.run(
            sys.executable, "-c", "print('no such package'); raise SystemExit(3)", is_quiet=True
        )
    assert exit_info.value.code == 3
    *_, said, last = filter(None, capsys.readouterr().out.splitlines())
    assert said == "no such package"
    assert "FAILED" in last


def test_what_was_skipped_is_said_with_what_it_needs(tmp_path: Path) -> None:
    skipped = "<testcase><skipped message='{}'/></testcase>"
    messages = ["needs torch, of any kind", 'could not import "torch"', "needs a GPU", "else"]
    report = tmp_path / "tests.xml"
    report.write_text(f"<testsuite>{''.join(map(skipped.format, messages))}</testsuite>")
    assert dev.skipped_tests(report) == "4 tests (2 need torch, 1 need GPU, 1 need something else)"
