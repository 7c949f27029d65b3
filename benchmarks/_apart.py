"""Processes that measure to their end, one by one, and answer in their last line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from cudagraph_pool.tools.footprint import WorkerError, run_python

_MEASURE = "--measure"  # a script that is called with that only measures


def run_apart(
    arguments: Sequence[str], environment: Mapping[str, str], seconds: float | None = None
) -> dict[str, Any]:
    """Runs Python with these arguments; returns its answer. Raises WorkerError if it fails or takes
    longer, and all of its standard error is on this process's.
    """
    try:
        return dict(run_python(arguments, environment, seconds))
    except WorkerError as error:
        sys.stderr.write(error.stderr)
        raise


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
