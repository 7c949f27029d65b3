"""Captures of all kinds: right results, and memory that does not grow with the number of graphs."""

from __future__ import annotations

import random

import pytest

import cudagraph_pool as cgp

from .work import PAGE, WIDTH, capture_all, capture_chain, chain, fresh, torch

pytestmark = pytest.mark.usefixtures("enabled")

SIZES = [1, 3, 16, 17, 100, 333, 512, 700, 1024, 1500, 2048, 3000, 4096, 5000, 6000, 8192]


@pytest.mark.parametrize("sizes", [SIZES, SIZES[::-1], random.Random(7).sample(SIZES, len(SIZES))])
def test_sizes_in_any_order_cost_what_the_largest_needs(sizes: list[int]) -> None:
    alone = cgp.GraphPool()
    largest = capture_chain(SIZES[-1], alone.id)
    needed = alone.stats()["peak_allocated_bytes"]
    del largest
    alone.close()

    pool = cgp.GraphPool()
    graphs = capture_all(sizes, pool.id)
    stats = pool.stats()
    assert stats["live_blocks"] == 0
    assert stats["reserved_bytes"] <= -(-needed // PAGE) * PAGE * 1.02 + PAGE

    for seed, rows in enumerate(random.Random(3).choices(SIZES, k=60)):
        x = fresh(rows, seed=100 + seed)
        assert torch.equal(graphs[rows].replay(x), chain(x))


def test_the_first_replay_draws_its_own_random_numbers() -> None:
    """However late a busy GPU comes to what PyTorch runs on the capture's stream beforehand."""

    class BeginsLate(torch.cuda.CUDAGraph):  # type: ignore[misc]
        def capture_begin(self, *args: object, **kwargs: object) -> None:
            torch.cuda._sleep(200_000_000)  # about a tenth of a second
            super().capture_begin(*args, **kwargs)

    pool = cgp.GraphPool()
    torch.rand(WIDTH, device="cuda")
    drawn = []
    for graph in (torch.cuda.CUDAGraph(), BeginsLate()):
        torch.cuda.manual_seed(1)
        with cgp.graph(graph, pool=pool):
            torch.cuda._sleep(400_000_000)
            numbers = torch.rand(WIDTH, device="cuda")
        if not isinstance(graph, BeginsLate):
            torch.cuda.synchronize()
        torch.cuda.manual_seed(2)
        graph.replay()
        drawn.append(numbers)
    assert torch.equal(*drawn)
