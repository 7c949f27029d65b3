"""Several streams in one capture: who gets what was freed, and what goes wrong stays small."""

# What fails in a capture fails where the capture ends.
# ruff: noqa: PT012

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest
from stream_oracle import Piece, taken_too_early
from stream_scenarios import MIB, SCENARIOS, Scenario

import cudagraph_pool as cgp

from .work import PAGE, WIDTH, adapter, capture_chain, chain, fresh, torch

if TYPE_CHECKING:
    from _stream_work import StreamPrograms
else:
    StreamPrograms = pytest.importorskip("_stream_work", reason="needs torch").StreamPrograms

pytestmark = pytest.mark.usefixtures("enabled")

BLOCK = 8 * MIB
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


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_who_gets_freed_memory(scenario: Scenario) -> None:
    program = scenario.program()
    work = StreamPrograms(torch.device("cuda", torch.cuda.current_device()), [program])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work.step(0)  # loads the kernels
    torch.cuda.synchronize()
    pool = cgp.GraphPool()
    pieces: dict[int, list[Piece]] = {}

    def allocate(elements: int) -> torch.Tensor:
        tensor = work.empty(elements)
        blocks = {found["address"]: found for found in pool.snapshot()["blocks"]}
        pieces[len(pieces)] = blocks[tensor.data_ptr()]["pieces"]
        return tensor

    work.allocate = allocate
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id, stream=stream):
        work.step(0)
    assert reserved(pool) == scenario.reserved_mib * MIB
    assert taken_too_early(program, pieces) == []
    for _ in range(3):
        work.clear(0)
        graph.replay()
        torch.cuda.synchronize()
        for found, right in zip(work.outputs(0), work.expected(0), strict=True):
            assert torch.equal(found, right)


def test_a_later_capture_takes_what_no_stream_was_proven_to(
    streams: list[torch.cuda.Stream],
) -> None:
    """All streams have joined when a capture ends."""
    main, side, *_ = streams
    pool = cgp.GraphPool()
    x, y = fresh(64, seed=0), fresh(64, seed=1)
    y.copy_(chain(x))
    torch.cuda.synchronize()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first, pool=pool.id, stream=main):
        side.wait_stream(main)
        with torch.cuda.stream(side):
            block(1)
        block(2)
        y.copy_(chain(x))
        main.wait_stream(side)
    before = reserved(pool)
    assert before >= 2 * BLOCK
    with torch.cuda.graph(second, pool=pool.id, stream=main):
        both = torch.full((2 * BLOCK,), 3, dtype=torch.uint8, device="cuda")
    assert reserved(pool) == before
    y.fill_(-1)
    first.replay()
    second.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, chain(x))
    assert bool((both == 3).all())


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


@pytest.mark.whole_gpu  # a capture asks for what is done once it begins, and does not wait
def test_a_stream_that_does_not_capture(streams: list[torch.cuda.Stream]) -> None:
    """Nobody takes what it uses before the capture has ended and its work is done."""
    main, side, outside, _ = streams
    pool = cgp.GraphPool()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    seen = torch.zeros(BLOCK, dtype=torch.uint8, device="cuda")
    with torch.cuda.graph(first, pool=pool.id, stream=main):
        used = block(1)
        used.record_stream(outside)
        del used
        side.wait_stream(main)
        with torch.cuda.stream(side):
            beside = block(2)
            seen.copy_(beside)
        main.wait_stream(side)
        assert reserved(pool) == 2 * BLOCK
        again = block(3)
        assert reserved(pool) == 3 * BLOCK
        del beside
        block(4)  # what `beside` had is proven
        assert reserved(pool) == 3 * BLOCK
    outside.synchronize()
    with torch.cuda.graph(second, pool=pool.id, stream=main):
        both = torch.full((2 * BLOCK,), 5, dtype=torch.uint8, device="cuda")
    assert reserved(pool) == 3 * BLOCK
    first.replay()
    torch.cuda.synchronize()
    assert bool((seen == 2).all())
    assert bool((again == 3).all())
    second.replay()
    torch.cuda.synchronize()
    assert bool((both == 5).all())
    assert bool((again == 3).all())


def test_an_eager_tensor_that_is_recorded(streams: list[torch.cuda.Stream]) -> None:
    """Of the base's memory, used by streams of a capture: it stays with the base."""
    main, side, *_ = streams
    pool = cgp.GraphPool()
    y = fresh(64, seed=1)
    outside = fresh(64, seed=0)
    y.copy_(outside * 2).add_(outside.sin())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id, stream=main):
        side.wait_stream(main)
        with torch.cuda.stream(side):
            outside.record_stream(side)
            made = outside * 2
            made.record_stream(main)
        main.wait_stream(side)
        y.copy_(made)
        del made
        y.add_(outside.sin())
    y.fill_(-1)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, outside * 2 + outside.sin())


def add_child(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Makes the graph a node of what the stream captures: a launch is refused there."""
    cuda = ctypes.CDLL("libcuda.so.1")
    on = ctypes.c_void_p(stream.cuda_stream)
    status, capture = ctypes.c_int(), ctypes.c_ulonglong()
    into, node = ctypes.c_void_p(), ctypes.c_void_p()
    frontier, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
    by = ctypes.byref
    child = ctypes.c_void_p(graph.raw_cuda_graph())
    codes = [
        cuda.cuStreamGetCaptureInfo_v2(
            on, by(status), by(capture), by(into), by(frontier), by(count)
        ),
        cuda.cuGraphAddChildGraphNode(by(node), into, frontier, count, child),
        cuda.cuStreamUpdateCaptureDependencies(on, by(node), ctypes.c_size_t(1), 1),  # instead
    ]
    assert codes == [0, 0, 0]


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
            add_child(inner, side)
            seen.copy_(used)
            used.record_stream(side)
        del used
        early = block(2)  # not behind the reader
        assert reserved(pool) == 2 * BLOCK
        side.wait_stream(main)
        with torch.cuda.stream(side):
            add_child(inner, side)
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


class TwoBranches(torch.nn.Module):  # type: ignore[misc]
    """One of them on a side stream, in forward and so in backward."""

    def __init__(self, side: torch.cuda.Stream) -> None:
        super().__init__()
        self._side = side
        self.straight = torch.nn.Linear(WIDTH, WIDTH)
        self.inner = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.outer = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            beside = self.outer(torch.nn.functional.gelu(self.inner(x)))
            x.record_stream(self._side)
        straight = self.straight(x).sin()
        main.wait_stream(self._side)
        beside.record_stream(main)
        return straight + beside


def test_make_graphed_callables_of_two_streams(streams: list[torch.cuda.Stream]) -> None:
    torch.manual_seed(0)
    model, twin = (TwoBranches(side).cuda() for side in streams[:2])
    twin.load_state_dict(model.state_dict())
    pool = cgp.GraphPool()
    sample = fresh(512, seed=0).requires_grad_()
    graphed = torch.cuda.make_graphed_callables(model, (sample,), pool=pool.id)
    assert pool.stats()["allocations"] > 0
    for seed in range(4):
        x = fresh(512, seed=seed).requires_grad_()
        y = fresh(512, seed=seed).requires_grad_()
        graphed(x).square().sum().backward()
        twin(y).square().sum().backward()
        torch.cuda.synchronize()
        assert torch.equal(x.grad, y.grad)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        model.zero_grad(set_to_none=True)
        twin.zero_grad(set_to_none=True)


def test_layers_on_two_streams_cost_what_one_needs(streams: list[torch.cuda.Stream]) -> None:
    """As people write it: temporaries that cross from stream to stream, recorded each time. What
    is held for twenty layers at once without proofs is that of one with them.
    """
    main, side, *_ = streams
    rows = 4096
    x, y = fresh(rows, seed=0), fresh(rows, seed=1)
    torch.cuda.synchronize()

    def layers(x: torch.Tensor, count: int) -> torch.Tensor:
        main = torch.cuda.current_stream()
        for _ in range(count):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                beside = torch.cat([x, x.cos()], dim=1)
                x.record_stream(side)
            straight = torch.cat([x.sin(), x], dim=1)
            main.wait_stream(side)
            beside.record_stream(main)
            x = (straight * beside).reshape(rows, 2, WIDTH).sum(dim=1)
            del straight, beside
        return x

    def captured(count: int) -> tuple[torch.cuda.CUDAGraph, cgp.GraphPool]:
        graph, pool = torch.cuda.CUDAGraph(), cgp.GraphPool()
        with torch.cuda.graph(graph, pool=pool.id, stream=main):
            y.copy_(layers(x, count))
        return graph, pool

    with torch.cuda.stream(main):
        layers(x, 1)  # loads the kernels
    _, short = captured(2)
    graph, pool = captured(20)
    assert reserved(pool) <= reserved(short) + 4 * PAGE
    for seed in range(3):
        x.copy_(fresh(rows, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        with torch.cuda.stream(main):
            right = layers(x, 20)
        torch.cuda.synchronize()
        assert torch.equal(y, right)
