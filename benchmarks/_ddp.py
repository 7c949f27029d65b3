"""Training on two GPUs under each allocator, one after the other: starts the ranks."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _team import environment_of, ratio

WORKER = Path(__file__).resolve().parent / "_ddp_worker.py"
RANKS = 2


def measure_ddp(allocators: Sequence[str], timeout: float) -> list[dict[str, Any]]:
    """One object for each allocator, stock's first; sizes are the larger rank's."""
    ranks = {name: _run(name, timeout) for name in allocators}
    return [_row(name, ranks[name], ranks["stock"]) for name in allocators]


Ranks = list[dict[str, Any]] | str  # what each wrote, or what went wrong


def _run(allocator: str, timeout: float) -> Ranks:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"rank{rank}.json" for rank in range(RANKS)]
        said = [file.with_suffix(".txt") for file in files]
        ranks = []
        for rank in range(RANKS):
            arguments = ["--allocator", allocator, "--output", str(files[rank])]
            with said[rank].open("w") as output:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, str(WORKER), *arguments],
                        env=_environment(allocator, rank, port),
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        codes = _wait(ranks, timeout)
        if any(codes):
            return f"exit codes {codes}: {_last_words(said, codes)}"
        return [json.loads(file.read_text()) for file in files]


def _environment(allocator: str, rank: int, port: int) -> dict[str, str]:
    """As torchrun makes it."""
    return {
        **environment_of(allocator),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        # What torch asks of those who capture DDP: its watchdog must not raise into a capture.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


def _wait(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """Their exit codes. When one has failed the other would wait for it for ever: it is killed."""
    end = time.monotonic() + seconds
    while None in (codes := [rank.poll() for rank in ranks]):
        if any(codes) or time.monotonic() > end:
            break
        time.sleep(0.1)
    for rank in ranks:
        rank.kill()
    return [rank.wait() for rank in ranks]


def _last_words(said: Sequence[Path], codes: Sequence[int]) -> str:
    """Of the rank that failed by itself, if there is one."""
    failed = next((number for number, code in enumerate(codes) if code > 0), 0)
    lines = [line.strip() for line in said[failed].read_text().splitlines() if line.strip()]
    return " | ".join(lines[-3:]) or "it printed nothing"


def _row(allocator: str, ranks: Ranks, stock: Ranks) -> dict[str, Any]:
    row: dict[str, Any] = {"model": "ddp", "allocator": allocator, "error": None}
    if isinstance(ranks, str):
        return {**row, "error": ranks}
    known = None if isinstance(stock, str) else stock
    minimum = max(rank["minimum_bytes"] for rank in known) if known else None
    reserved = max(rank["reserved_bytes"] for rank in ranks)
    return {
        **row,
        "minimum_bytes": minimum,
        "reserved_bytes": reserved,
        "ratio": ratio(reserved, minimum),
        "capture_seconds": max(rank["capture_seconds"] for rank in ranks),
        "replay_seconds": max(rank["replay_seconds"] for rank in ranks),
        "equal_to_stock": [r["digest"] for r in ranks] == [r["digest"] for r in known]
        if known
        else None,
        "ranks": ranks,
    }
