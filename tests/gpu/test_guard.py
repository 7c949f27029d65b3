"""What guard() finds on a GPU."""

from __future__ import annotations

import pytest

import cudagraph_pool as cgp

from .work import torch

pytestmark = pytest.mark.usefixtures("enabled")


def test_guard_finds_replays_that_nothing_orders() -> None:
    pool = cgp.GraphPool()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    x = torch.zeros(1024, device="cuda")
    for graph in graphs:
        with cgp.graph(graph, pool):
            x + 1
    side = torch.cuda.Stream()
    native = torch.cuda.CUDAGraph.replay
    with cgp.guard():
        graphs[0].replay()
        graphs[1].replay()
        with torch.cuda.stream(side):
            with pytest.raises(RuntimeError, match="nothing orders the two"):
                graphs[0].replay()
            side.wait_stream(torch.cuda.default_stream())
            graphs[0].replay()
        with pytest.raises(RuntimeError, match="nothing orders the two"):
            graphs[1].replay()
        torch.cuda.synchronize()
        graphs[1].replay()
    assert torch.cuda.CUDAGraph.replay is native
