"""Graphs that share executables: to their owner they are as any other, also in full memory."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterator

import pytest

import cudagraph_pool as cgp

from .shared import Trail, capture
from .work import capture_chain, chain, fresh, torch

pytestmark = pytest.mark.usefixtures("enabled")


def test_reset_and_deletion_leave_the_others_alone() -> None:
    pool = cgp.GraphPool(max_execs=1)
    trail = Trail(pool, marks=4, spin=100_000)
    for index in (0, 1, 2, 3):
        trail.replay(index)
    trail.graphs[3].reset()  # held, and still running
    trail.replay(1)
    trail.graphs[1] = torch.cuda.CUDAGraph()  # deletes what is held
    gc.collect()
    trail.replay(2)
    trail.replay(0)
    trail.check()
    assert pool.stats()["execs"] == 1
    del trail.graphs[0:]
    assert pool.stats()["execs"] == 0


def test_graphs_of_code_that_knows_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from cudagraph_pool import _shared_exec

    # Within the budget each would get an executable of its own.
    monkeypatch.setattr(_shared_exec, "_EXEC_BUDGET", 0)
    monkeypatch.setattr(_shared_exec, "caches", {})
    device = torch.cuda.current_device()
    pool = torch.cuda.graph_pool_handle()
    cgp.enable(shared_exec=True)
    sharing = {rows: capture_chain(rows, pool) for rows in (1024, 700, 512, 333, 64, 3)}
    kept = torch.cuda.CUDAGraph(keep_graph=True)
    x = torch.zeros(8, device="cuda")
    with torch.cuda.graph(kept, pool=pool):
        x.add_(1)
    cgp.enable()
    alone = capture_chain(1024, pool)
    for seed, rows in enumerate([64, 1024, 3, 3, 700, 64, 512, 333, 1024]):
        fed = fresh(rows, seed)
        assert torch.equal(sharing[rows].replay(fed), chain(fed))
    assert torch.equal(alone.replay(fed), chain(fed))
    kept.replay()
    assert x.eq(1).all()
    stats = _shared_exec.caches[device].stats()
    assert 1 <= stats["execs"] < len(sharing)
    assert stats["exec_updates"] > 0
    assert [hasattr(graph, "_shared_graph") for graph in (sharing[3].graph, kept, alone.graph)] == [
        True,
        False,
        False,
    ]


MOST_EXECS = 4096  # more than there are graphs: memory is what limits them


@contextlib.contextmanager
def full_memory() -> Iterator[None]:
    # As long as any graph lives torch keeps a tensor that captures need.
    any_graph = capture_chain(1, None)
    ballast: list[torch.Tensor] = []
    for size in (1 << 30, 1 << 26, 1 << 21):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                ballast.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    try:
        yield
    finally:
        ballast.clear()
        torch.cuda.synchronize()
        any_graph.graph.reset()
        torch.cuda.empty_cache()


class Counters:
    """Graphs that each count in a number of their own; of one kind if of as many nodes."""

    def __init__(self, pool: cgp.GraphPool, most: int) -> None:
        self.pool = pool
        self.counts = torch.zeros(most, dtype=torch.int64, device="cuda")
        self.expected: list[int] = []
        self.nodes: list[int] = []
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.counts[0].add_(1)
        self.counts.zero_()
        torch.cuda.synchronize()

    def capture(self, nodes: int) -> None:
        count = self.counts[len(self.graphs)]

        def work() -> None:
            for _ in range(nodes):
                count.add_(1)

        self.graphs.append(capture(work, self.pool))
        self.nodes.append(nodes)
        self.expected.append(0)

    def replay(self, index: int) -> None:
        self.graphs[index].replay()
        self.expected[index] += self.nodes[index]

    def check(self) -> None:
        torch.cuda.synchronize()
        assert self.counts[: len(self.expected)].tolist() == self.expected


@pytest.mark.whole_gpu
def test_kinds_take_turns_where_not_all_have_an_executable() -> None:
    pool = cgp.GraphPool(max_execs=MOST_EXECS)
    # Some 700 MiB with one for each. The first ones are the largest: there is room for any of them.
    sizes = range(1000, 600, -1)
    counters = Counters(pool, len(sizes))
    draw = random.Random(6)
    with full_memory():
        for nodes in sizes:
            counters.capture(nodes)
        for index in range(len(sizes)):
            counters.replay(index)
        for _ in range(len(sizes)):
            counters.replay(draw.randrange(len(sizes)))
        for _ in range(20):
            counters.replay(7)
        counters.check()
        in_full_memory = pool.stats()["execs"]
        assert 1 <= in_full_memory < len(sizes) // 2
    # Where there is memory again they get it, some launches later.
    for _ in range(3):
        for index in range(len(sizes)):
            counters.replay(index)
    counters.check()
    assert pool.stats()["execs"] == len(sizes)
