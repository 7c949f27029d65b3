"""Several streams in one capture: who gets what was freed, and what goes wrong stays small."""

# What fails in a capture fails where the capture ends.
# ruff: noqa: PT012

from __future__ import annotations

import pytest

import cudagraph_pool as cgp

from .shared import Driver
from .work import adapter, capture_chain, chain, fresh, torch

pytestmark = pytest.mark.usefixtures("enabled")

BLOCK = 8 << 20
LATE = 2_000_000  # cycles, about a millisecond


@pytest.fixture
def streams() -> list[torch.cuda.Stream]:
    """Four that differ: torch hands out the same 32 in turn."""
    block(0).add_(1).clone()  # loads the kernels, which a capture may not
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    return [torch.cuda.Stream() for _ in range(4)]


def block(value: int) -> torch.Tensor:
    return torch.full((BLOCK,), value, dtype=torch.uint8, device="cuda")


def reserved(pool: cgp.GraphPool) -> int:
    return int(pool.stats()["reserved_bytes"])


@pytest.mark.whole_gpu  # a capture asks for what is done once it begins, and does not wait
def test_a_stream_that_never_joins(streams: list[torch.cuda.Stream]) -> None:
    main, side, *_ = streams
    pool = cgp.GraphPool()
    chain(fresh(64, seed=0))
    before = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError), torch.cuda.graph(graph, pool=pool.id, stream=main):
        kept = block(1)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            kept.add_(1)
            kept.record_stream(side)
            freed = block(2)
        del freed
    # torch.cuda.graph leaves its stream current when a capture fails.
    torch.cuda.set_stream(before)
    del kept, graph
    torch.cuda.empty_cache()
    torch.cuda.synchronize()  # for the events that the pool recorded when it found the capture over
    assert pool.stats()["live_blocks"] == 0
    grown = reserved(pool)

    # All of it is there for the next one, on any stream. That one shows that the first has failed.
    again = torch.cuda.CUDAGraph()
    with torch.cuda.graph(again, pool=pool.id, stream=streams[2]):
        both = torch.full((2 * BLOCK,), 3, dtype=torch.uint8, device="cuda")
    assert adapter.use_count(torch.cuda.current_device(), pool.id) == 2, "the pool and `again`"
    assert reserved(pool) == max(grown, 2 * BLOCK)
    again.replay()
    torch.cuda.synchronize()
    assert bool((both == 3).all())
    captured = capture_chain(777, pool.id)
    x = fresh(777, seed=42)
    assert torch.equal(captured.replay(x), chain(x))


def test_a_child_graph(streams: list[torch.cuda.Stream]) -> None:
    """A graph within a graph is one node of it, which orders as any other."""
    main, side, *_ = streams
    x, inner_y = fresh(2048, seed=0), fresh(2048, seed=1)
    seen = torch.zeros(BLOCK, dtype=torch.uint8, device="cuda")
    inner_pool, pool = cgp.GraphPool(), cgp.GraphPool()
    inner, outer = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.CUDAGraph()
    inner_y.copy_(chain(x))
    torch.cuda.synchronize()
    with torch.cuda.graph(inner, pool=inner_pool.id, stream=main):
        torch.cuda._sleep(LATE)
        inner_y.copy_(chain(x))
    with torch.cuda.graph(outer, pool=pool.id, stream=main):
        used = block(1)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            Driver().add_child(inner)
            seen.copy_(used)
            used.record_stream(side)
        del used
        early = block(2)  # not behind the reader
        assert reserved(pool) == 2 * BLOCK
        side.wait_stream(main)
        with torch.cuda.stream(side):
            Driver().add_child(inner)
        main.wait_stream(side)
        late = block(3)  # behind it, through the child
        assert reserved(pool) == 2 * BLOCK
    for seed in range(3):
        x.copy_(fresh(2048, seed=seed))
        seen.zero_()
        outer.replay()
        torch.cuda.synchronize()
        assert torch.equal(inner_y, chain(x))
        assert [bool((t == v).all()) for t, v in ((seen, 1), (early, 2), (late, 3))] == [True] * 3


@pytest.mark.skipif(
    not hasattr(torch.cuda.CUDAGraph, "begin_capture_to_if_node"),
    reason=f"torch {torch.__version__} cannot capture conditional nodes",
)
def test_a_conditional_body() -> None:
    """What a body allocates lies in the pool, and what it leaves to the graph is right."""
    pool = cgp.GraphPool()
    x = fresh(512, seed=0)
    y, z = torch.zeros_like(x), torch.zeros_like(x)
    taken = torch.ones((), dtype=torch.bool, device="cuda")
    chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        before = x * 2
        graph.begin_capture_to_if_node(taken)
        y.copy_(chain(before))
        graph.end_capture_to_conditional_node()
        z.copy_(chain(before + 1))
    for seed, truth in enumerate((True, False, True)):
        x.copy_(fresh(512, seed=seed))
        y.fill_(-1)
        taken.fill_(truth)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, chain(x * 2) if truth else torch.full_like(y, -1))
        assert torch.equal(z, chain(x * 2 + 1))
