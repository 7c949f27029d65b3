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
    # The package that this process runs, not one that happens to lie in the current folder.
    paths = [str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")]
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", *module],
            env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {seconds} s"
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        words = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return f"the process ended with code {done.returncode}: {words[-1] if words else ''}"
    return json.loads(lines[-1])
