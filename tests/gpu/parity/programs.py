"""Programs that a test runs in a process of its own, and what they have in common."""

from __future__ import annotations

# The side is the first argument. On native nothing is enabled, and there never is a pool of ours.
PRELUDE = """
import sys
import torch
import cudagraph_pool as cgp
from cudagraph_pool import _torch

side = sys.argv[1]


def enable():
    if side == "ours":
        cgp.enable()


def ours(device=0):
    return _torch.pool_ids(device)


def work(x):
    return ((x * 2) + 1).sqrt()


def capture(x, pool=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        y = work(x)
    return graph, y


def check(graph, x, y):
    x.copy_(torch.rand(x.shape))
    y.fill_(-1)
    graph.replay()
    assert torch.equal(y, work(x))


def capture_and_check(taken):
    x = torch.ones(1 << 18, device="cuda")
    graph, y = capture(x)
    check(graph, x, y)
    assert (tuple(graph.pool()) in ours(x.device.index)) == taken, ours(x.device.index)
    return graph, x, y
"""
