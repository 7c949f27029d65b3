"""enable() around every kind of allocator that torch has, not only its native one as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .parity.compiled import compile_allocator

PROGRAM = """
import gc
import sys
import torch
import cudagraph_pool as cgp
from cudagraph_pool import _torch

side, library = sys.argv[1], sys.argv[2]
if library:
    torch.cuda.memory.change_current_allocator(
        torch.cuda.memory.CUDAPluggableAllocator(library, "counting_malloc", "counting_free")
    )
x = torch.ones(1 << 20, device="cuda")
out = torch.zeros(2 << 20, device="cuda")
torch.cat([x * 2, x])
torch.cuda.synchronize()
if side == "ours":
    cgp.enable()


def capture(pool, rows):
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool)
        wide = torch.cat([x * rows, x])
        out.copy_(wide * 2)
        del wide
        graph.capture_end()
    return graph


for _ in range(3):
    pool = torch.cuda.graph_pool_handle()
    graphs = {rows: capture(pool, rows) for rows in (3, 7, 5, 11)}
    for rows in (7, 11, 3, 5, 7):
        graphs[rows].replay()
        torch.cuda.synchronize()
        assert (out[: 1 << 20] == 2 * rows).all() and (out[1 << 20 :] == 2).all(), rows
    if side == "ours":
        assert pool in _torch.pool_ids(0)
        assert torch.cuda.memory_stats()["reserved_bytes.all.current"] >= 8 << 20
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
    graphs.clear()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert _torch.pool_ids(0) == []
if side == "ours":
    assert _torch.capture_counts()["ours"] == 12, _torch.capture_counts()
    cgp.disable()
assert x.sum().item() == 1 << 20
"""


def execute(side: str, settings: dict[str, str], library: str = "") -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, side, library],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "met an error" not in done.stderr, done.stderr


@pytest.mark.parametrize("side", ["native", "ours"])
@pytest.mark.parametrize(
    "setting",
    [
        "backend:cudaMallocAsync",
        "expandable_segments:True",
        "max_split_size_mb:64,garbage_collection_threshold:0.6",
        "graph_capture_record_stream_reuse:True",
    ],
)
def test_around_torchs_own(setting: str, side: str) -> None:
    execute(side, {"PYTORCH_CUDA_ALLOC_CONF": setting})


# Neither knows of captures, in which stock so calls cudaMalloc(): these ours alone can.


def test_without_a_cache() -> None:
    execute("ours", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def test_around_a_pluggable_allocator(tmp_path: Path) -> None:
    """Without a cache: what any user may write, and what RMM's is."""
    execute("ours", {}, str(compile_allocator(tmp_path)))
