"""Graphs that share executables where the device has no memory for more of them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest

import cudagraph_pool as cgp

from .shared import capture
from .work import capture_chain, torch

pytestmark = [pytest.mark.usefixtures("enabled"), pytest.mark.whole_gpu]

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
