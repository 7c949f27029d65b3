"""Processes of this package that measure something apart, and answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def ask(
    module: Sequence[str], environment: Mapping[str, str], seconds: float | None = None
) -> Any | str:
    """What a module of this package, run with arguments, prints as its last line, which is JSON; or
    a text that says what went wrong.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", *module],
            env=_environment_for(environment),
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {seconds} s"
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return failure(done.returncode, done.stderr)
    return json.loads(lines[-1])


def _environment_for(environment: Mapping[str, str]) -> dict[str, str]:
    """With the package that this process runs, not one that lies in the current folder."""
    paths = [str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def failure(code: int, errors: str) -> str:
    """What a process that ended without an answer said last."""
    words = [line.strip() for line in errors.splitlines() if line.strip()]
    return f"the process ended with code {code}: {words[-1] if words else ''}"
