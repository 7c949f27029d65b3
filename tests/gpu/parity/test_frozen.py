"""A process that is frozen and thawed (CUDA's checkpoints, cuda-checkpoint, vLLM's snapshots)."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from .conftest import Side

# Graphs smallest first, so that pages of a pool of ours stand behind several addresses. Each line
# on stdin lets it replay all and compare with eager.
PROGRAM = """
import sys
import torch
import cudagraph_pool as cgp
OURS = sys.argv[1] == "ours"
if OURS:
    cgp.enable()
pool = cgp.GraphPool() if OURS else None
id = pool.id if OURS else torch.cuda.graph_pool_handle()

def chain(x):
    wide = torch.cat([x, x * 2, x + 1, x - 1], dim=1)
    return ((wide * wide + 1).sqrt().reshape(len(x), 4, -1).sum(dim=1) / 2 + x).softmax(dim=1)

def fresh(rows, seed):
    return torch.rand(rows, 256, generator=torch.Generator().manual_seed(seed)).cuda()

captured = {}
for rows in (16, 300, 700, 1500, 4000, 9000):
    x, graph = fresh(rows, 0), torch.cuda.CUDAGraph()
    chain(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, pool=id):
        y = chain(x)
    captured[rows] = graph, x, y
if OURS:
    pages = [page for mapped in pool.snapshot()["ranges"] for page in mapped["pages"]]
    assert len(pages) > len(set(pages)), "no page is mapped twice"
print("captured", flush=True)
for seed, _ in enumerate(sys.stdin):
    for rows in (700, 9000, 16, 4000, 1500, 300):
        graph, x, y = captured[rows]
        x.copy_(fresh(rows, seed))
        y.fill_(-1)
        graph.replay()
        assert torch.equal(y, chain(x)), (seed, rows)
    print("right", flush=True)
"""

LOCK, CHECKPOINT, RESTORE, UNLOCK = (
    f"cuCheckpointProcess{step}" for step in ("Lock", "Checkpoint", "Restore", "Unlock")
)


def test_graphs_go_on_in_a_process_that_was_frozen(side: Side) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    if not hasattr(driver, LOCK):
        pytest.skip("needs a driver that can freeze processes: 570 or newer")
    with subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, side],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "captured\n", process.stderr.read()
            for steps in ((), (LOCK, CHECKPOINT, RESTORE, UNLOCK)):
                for step in steps:
                    error = getattr(driver, step)(process.pid, None)
                    assert error == 0, f"{step}: CUDA error {error}"
                print("go on", file=process.stdin, flush=True)
                assert process.stdout.readline() == "right\n", process.stderr.read()
        finally:
            process.kill()
