"""What benchmarks of engines have in common: a process for each run, and what may not be."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from _team import WorkerError

Row = dict[str, Any]

# CUDAGRAPH_POOL of a run; nothing else makes the difference.
REQUESTS = {"stock": "0", "ours": "1", "shared": "shared_exec=1"}


def run_apart(
    arguments: Sequence[str], environment: Mapping[str, str], seconds: float | None = None
) -> tuple[Row, str]:
    """Runs Python with these arguments; returns what it prints as its last line, which is JSON, and
    its standard error.

    Raises:
        WorkerError: It failed or took longer. All of its standard error is on this process's.
    """
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as late:
        sys.stderr.write((late.stderr or b"").decode(errors="replace"))
        raise WorkerError(f"no answer in {seconds:.0f} s; killed") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        sys.stderr.write(done.stderr)
        words = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise WorkerError(f"ended with code {done.returncode}: {words[-1] if words else ''}")
    return json.loads(lines[-1]), done.stderr


def digest(tokens: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def most(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of all GPUs the one that took most, or where fewest captures were ours."""
    return {
        key: (min if key == "captures_of_ours" else max)(rank[key] for rank in ranks)
        for key in ranks[0]
    }


def judge(rows: Sequence[Row], group: Callable[[Row], str]) -> list[str]:
    """What is not as it should be; runs of one group compute the same."""
    problems = [
        f"{group(row)}: {row['captures_of_ours']} of {row['captures']} captures in pools of ours"
        for row in rows
        if row["allocator"] != "stock" and row["captures_of_ours"] != row["captures"]
    ]
    for name in dict.fromkeys(map(group, rows)):
        if len({row["digest"] for row in rows if group(row) == name}) > 1:
            problems.append(f"{name}: other tokens than stock's")
    return problems
