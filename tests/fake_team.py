"""Benchmarks run with processes that stand in for their workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import _command
import _team
import pytest

Run = Callable[..., tuple[int, dict[str, Any]]]

# Stands in for _worker.py: answers every command, or gets into TROUBLE, which is KIND@ONE.COMMAND.
_WORKER = """
import json, os, sys, time
one = sys.argv[1]
trouble, _, where = os.environ.get("TROUBLE", "").partition("@")
for line in sys.stdin:
    request = json.loads(line)
    command = request["command"]
    here = where == f"{{one}}.{{command}}"
    if here and trouble == "die":
        print("last words", file=sys.stderr, flush=True)
        os._exit(9)
    if here and trouble == "hang":
        time.sleep(60)
    if here and trouble == "fail":
        print(json.dumps({{"error": "RuntimeError: broken"}}), flush=True)
        sys.exit(1)
    print(json.dumps({{"result": {answers}[command]}}), flush=True)
"""


def faked(
    benchmark: ModuleType, answers: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """What runs a benchmark, and returns its exit code and its report. Its first argument is the
    trouble that a worker gets into.

    Args:
        answers: Python of a dictionary from commands to results. It may use ``one``, which says
            what the worker measures, ``request``, ``trouble``, and ``here``: whether that is now.
    """
    path, output = folder / "_worker.py", folder / "results.json"
    path.write_text(_WORKER.format(answers=answers.strip()))
    monkeypatch.setattr(_team, "WORKER", path)
    monkeypatch.setattr(_command, "device", lambda: {"gpu": "a GPU", "torch": "2.11"})

    def run(trouble: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setenv("TROUBLE", trouble)
        code = benchmark.main(["--output", str(output), *arguments])
        return code, json.loads(output.read_text())

    return run
