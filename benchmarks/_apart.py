"""Processes that measure to their end, one by one, and answer in their last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

_MEASURE = "--measure"  # a script that is called with that only measures


class WorkerError(Exception):
    """A process failed."""


def run_apart(
    arguments: Sequence[str], environment: Mapping[str, str], seconds: float | None = None
) -> dict[str, Any]:
    """Runs Python with these arguments; returns what it prints as its last line, which is JSON.
    Raises WorkerError if it fails or takes longer, with its standard error on this process's.
    """
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        sys.stderr.write((late.stderr or b"").decode(errors="replace"))
        raise WorkerError(f"no answer in {seconds} s") from None
    lines, said = done.stdout.splitlines(), done.stderr.decode(errors="replace")
    if done.returncode or not lines:
        sys.stderr.write(said)
        last = said.strip().rpartition("\n")[2]
        raise WorkerError(f"the process ended with code {done.returncode}: {last}")
    return dict(json.loads(lines[-1]))


def measure_apart(
    script: str, *arguments: Any, seconds: float | None = None, **variables: str
) -> dict[str, Any]:
    """What the ``measure`` of a script that ends with :func:`run_script` returns for these
    arguments.

    Args:
        seconds: That it may take.
        variables: Of the environment, besides this process's.
    """
    command = [script, _MEASURE, json.dumps(arguments)]
    return run_apart(command, {**os.environ, **variables}, seconds)


def run_script(main: Callable[[], int], measure: Callable[..., Any]) -> int:
    """Runs a script, or of it what :func:`measure_apart` asks for. Returns the exit code."""
    if sys.argv[1:2] != [_MEASURE]:
        return main()
    answers = answers_alone()
    print(json.dumps(measure(*json.loads(sys.argv[2]))), file=answers, flush=True)
    return 0


def answers_alone() -> TextIO:
    """The standard output. Libraries may print: what they print goes to standard error from now
    on, and does not stand between the answers.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers
