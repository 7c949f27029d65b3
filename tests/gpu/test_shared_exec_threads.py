"""Graphs that share executables, replayed by several threads at once."""

from __future__ import annotations

import random
from functools import partial

import pytest

import cudagraph_pool as cgp

from .shared import Trail
from .work import chain, fresh, in_threads, torch

pytestmark = pytest.mark.usefixtures("enabled")


def replay_in_threads(trails: list[Trail]) -> None:
    def work(trail: Trail, seed: int) -> None:
        choice = random.Random(seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(300):
                trail.replay(choice.randrange(4))

    in_threads(*(partial(work, trail, seed) for seed, trail in enumerate(trails)))
    for trail in trails:
        trail.check()


def test_threads_replay_graphs_of_their_own_pools() -> None:
    pools = [cgp.GraphPool(max_execs=limit) for limit in (1, 2, None, 1)]
    replay_in_threads([Trail(pool, marks=4, spin=2_000) for pool in pools])


def test_threads_replay_graphs_of_one_pool() -> None:
    pool = cgp.GraphPool(max_execs=2)
    replay_in_threads([Trail(pool, marks=4, spin=2_000) for _ in range(4)])


def test_replays_while_another_thread_captures() -> None:
    """A switch is nothing that breaks a capture, not even one of the strictest mode."""
    pool, other = cgp.GraphPool(max_execs=1), cgp.GraphPool(shared_exec=True)
    trail = Trail(pool, marks=4)
    x, y = fresh(64, seed=0), fresh(64, seed=1)
    chain(x)
    torch.cuda.synchronize()

    def switch() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(40):
                trail.replay(step % 4)

    graph = torch.cuda.CUDAGraph()
    with cgp.graph(graph, pool=other, capture_error_mode="global"):
        y.copy_(chain(x))
        in_threads(switch)
    trail.check()
    x.copy_(fresh(64, seed=2))
    graph.replay()
    assert torch.equal(y, chain(x))
