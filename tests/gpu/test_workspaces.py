"""cuBLAS's workspace: who shares it, that guard() sees it, and pools that have one of their own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cudagraph_pool as cgp

from .work import adapter, fresh, torch

used_by = pytest.importorskip("cudagraph_pool._guard.workspaces").used_by
MINOR = int(torch.__version__.split(".")[1])
pytestmark = [
    pytest.mark.usefixtures("enabled"),
    pytest.mark.skipif(MINOR >= 15, reason="torch takes a workspace for each product"),
]

# So deep that cuBLAS splits the sums, and adds up the parts in its workspace.
ROWS, DEPTH = 128, 1 << 15
COUNT = 30
SHARED = r"which shares cuBLAS's workspace of stream {:#x}, at 0x\w+, was replayed on stream {:#x}"


def centered(rows: int, seed: int, width: int) -> torch.Tensor:
    """So that sums of one graph are nothing like those of another."""
    return (fresh(rows, seed, width) - 0.5).bfloat16()


class Products:
    """A graph of products into memory that is no pool's."""

    def __init__(self, seed: int, graph: torch.cuda.CUDAGraph | None = None) -> None:
        self.graph = torch.cuda.CUDAGraph(keep_graph=True) if graph is None else graph
        self.x = centered(ROWS, seed, DEPTH)
        self.w = centered(DEPTH, seed + 100, ROWS)
        self.outputs = [torch.empty_like(self.x @ self.w) for _ in range(COUNT)]
        self.expected = (self.x @ self.w).float()
        torch.cuda.synchronize()

    def capture(self, pool: cgp.GraphPool, **options: Any) -> Products:
        with cgp.graph(self.graph, pool, **options):
            for output in self.outputs:
                torch.mm(self.x, self.w, out=output)
        return self

    def spoil(self) -> None:
        for output in self.outputs:
            output.fill_(float("nan"))

    def wrong(self) -> int:
        return sum(not is_close(output, self.expected) for output in self.outputs)


def is_close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    error = (result.float() - expected).abs().max() / expected.abs().max()
    return bool(error < 0.02)  # also not if it is NaN


def two_streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(), torch.cuda.Stream()


def capture_stream(pool: cgp.GraphPool) -> int:
    return int(cgp.graph._capture_stream(pool.device).cuda_stream)


def wrong_at_once(*both: Products) -> Iterator[int]:
    """How many results are wrong of graphs that are replayed at once, time after time."""
    streams = two_streams()
    while True:
        for products in both:
            products.spoil()
        torch.cuda.synchronize()
        for products, stream in zip(both, streams, strict=True):
            with torch.cuda.stream(stream):
                products.graph.replay()
        torch.cuda.synchronize()
        yield sum(products.wrong() for products in both)


def test_graphs_of_two_pools_that_share_it_give_wrong_products() -> None:
    """What the guard and the option are for. The pools are ours, but stock's do the same."""
    pools = cgp.GraphPool(), cgp.GraphPool()
    one, other = (Products(seed).capture(pool) for seed, pool in enumerate(pools))
    for products in (one, other):  # each alone is right
        products.spoil()
        products.graph.replay()
        torch.cuda.synchronize()
        assert products.wrong() == 0
    found = wrong_at_once(one, other)
    assert any(next(found) for _ in range(20))


def test_guard_names_graphs_of_two_pools_that_share_it() -> None:
    pools = cgp.GraphPool(), cgp.GraphPool()
    one, other = (Products(seed).capture(pool) for seed, pool in enumerate(pools))
    used = used_by(one.graph.raw_cuda_graph())
    assert set(used.values()) == {capture_stream(pools[0])}
    assert used == used_by(other.graph.raw_cuda_graph())
    streams = two_streams()
    with cgp.guard():
        with torch.cuda.stream(streams[0]):
            one.graph.replay()
        with torch.cuda.stream(streams[1]):
            named = SHARED.format(capture_stream(pools[0]), streams[0].cuda_stream)
            with pytest.raises(RuntimeError, match=named) as raised:
                other.graph.replay()
            assert repr(one.graph) in str(raised.value)
            assert str(raised.value).startswith(repr(other.graph))
            streams[1].wait_stream(streams[0])
            other.graph.replay()
    torch.cuda.synchronize()
    assert one.wrong() == other.wrong() == 0


@pytest.mark.parametrize("shared_exec", [False, True])
def test_pools_with_workspaces_of_their_own(shared_exec: bool) -> None:
    pools = cgp.GraphPool(), cgp.GraphPool()
    one, other = (
        Products(seed).capture(pool, own_workspace=True, shared_exec=shared_exec)
        for seed, pool in enumerate(pools)
    )
    for pool, products in zip(pools, (one, other), strict=True):
        used = used_by(products.graph.raw_cuda_graph())
        assert set(used.values()) == {pool._own_stream.cuda_stream}
        homes = {adapter.pool_of(pool.device.index, address) for address in used}
        assert homes == {pool.id}, "the first product was captured"
    found = wrong_at_once(one, other)
    with cgp.guard():
        assert [next(found) for _ in range(20)] == [0] * 20


def product(seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    w = centered(DEPTH, seed, ROWS)
    return lambda x: x @ w


def test_a_runner_that_goes_leaves_others_the_workspace() -> None:
    """From torch 2.12 to 2.14 a graph that goes takes it out of torch's map (pytorch#193402)."""
    x, weights = centered(ROWS, 0, DEPTH), [centered(DEPTH, seed, ROWS) for seed in range(3)]

    def runner(w: torch.Tensor) -> cgp.GraphRunner:
        return cgp.GraphRunner(lambda x: x @ w, sizes=[ROWS], progress=False)

    first, second = runner(weights[0]), runner(weights[1])
    first(x)
    second(x)
    known = [space for space in adapter.blas_workspaces() if space[2] != 0]
    first.reset()
    del first
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    eager = [torch.zeros(32 << 20, dtype=torch.uint8, device="cuda") for _ in range(8)]
    assert is_close(second(x), (x @ weights[1]).float())
    assert not any(tensor.any() for tensor in eager)
    third = runner(weights[2])
    assert is_close(third(x), (x @ weights[2]).float())
    found = [space for space in adapter.blas_workspaces() if space[2] != 0]  # captures' own
    assert found == known, "a capture finds what graphs hold"
