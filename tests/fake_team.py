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


def faked(benchmark: ModuleType, worker: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """What runs a benchmark, and returns its exit code and its report. Its first argument is the
    trouble that the text of the worker makes.
    """
    path, output = folder / "_worker.py", folder / "results.json"
    path.write_text(worker)
    monkeypatch.setattr(_team, "WORKER", path)
    monkeypatch.setattr(_command, "device", lambda: {"gpu": "a GPU", "torch": "2.11"})

    def run(trouble: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setenv("TROUBLE", trouble)
        code = benchmark.main(["--output", str(output), *arguments])
        return code, json.loads(output.read_text())

    return run
