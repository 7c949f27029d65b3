"""Processes that measure something apart, and answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .environment import VARIABLE


class WorkerError(Exception):
    """A process failed or did not answer in time."""

    def __init__(self, message: str, stderr: str = "") -> None:
        super().__init__(message)
        self.stderr = stderr  # all that it printed there


def run_python(
    arguments: Sequence[str], environment: Mapping[str, str], seconds: float | None = None
) -> Any:
    """Runs Python with these arguments; returns what it prints as its last line, which is JSON.
    Raises WorkerError.
    """
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as late:
        said = (late.stderr or b"").decode(errors="replace")
        raise WorkerError(f"no answer in {seconds} s", said) from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        words = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        last = words[-1] if words else ""
        raise WorkerError(f"the process ended with code {done.returncode}: {last}", done.stderr)
    return json.loads(lines[-1])


def ask(
    module: Sequence[str], environment: Mapping[str, str], seconds: float | None = None
) -> Any | str:
    """What a module of this package, run with arguments, answers; or a text that says what went
    wrong. It enables the pool itself, or measures without: the environment does not.
    """
    # The package that this process runs, not one that lies in the current folder.
    paths = [str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]
    environment = {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment.pop(VARIABLE, None)
    try:
        return run_python(["-P", "-m", *module], environment, seconds)
    except WorkerError as error:
        return str(error)
