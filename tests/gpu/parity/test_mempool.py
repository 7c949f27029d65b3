"""torch.cuda.MemPool, which stays with PyTorch's own allocator, and cgp.use_pool, which is to a
GraphPool what torch.cuda.use_mem_pool is to a MemPool.

What both can do runs on a MemPool as [native] and on a GraphPool as [ours]; what a MemPool does
runs with the package disabled and enabled.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cudagraph_pool as cgp

from ..conftest import Run
from ..work import PAGE, adapter, capture_chain, chain, fresh, torch
from .compiled import Counts, compile_allocator
from .conftest import Side

MIB = 1 << 20


def ids() -> list[tuple[int, int]]:
    return adapter.pool_ids(torch.cuda.current_device())


def new_bytes(mib: int, value: int = 1) -> torch.Tensor:
    return torch.full((mib * MIB,), value, dtype=torch.uint8, device="cuda")


def segments(id: tuple[int, int]) -> list[dict[str, Any]]:
    shown = torch.cuda.memory_snapshot(include_traces=False)
    return [s for s in shown if tuple(s["segment_pool_id"]) == tuple(id)]


def inside(tensor: torch.Tensor, id: tuple[int, int]) -> bool:
    """Whether the tensor lies in live memory of the pool; works for the base's pools alone."""
    return any(
        s["address"] <= tensor.data_ptr() < s["address"] + s["total_size"] for s in segments(id)
    )


def settle() -> None:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()


# torch.cuda.MemPool, with the package disabled and enabled.


def test_a_mem_pool_routes_what_is_allocated_inside() -> None:
    pool = torch.cuda.MemPool()
    assert pool.use_count() == 1
    before = new_bytes(3)
    with torch.cuda.use_mem_pool(pool):
        assert pool.use_count() == 2
        in_pool = new_bytes(5, 7)
    after = new_bytes(3)
    assert pool.use_count() == 1
    assert inside(in_pool, pool.id)
    assert not inside(before, pool.id)
    assert not inside(after, pool.id)
    assert int(in_pool.sum(dtype=torch.int64)) == 7 * 5 * MIB
    assert ids() == []  # it is the base's


def test_snapshot_of_a_mem_pool_shows_it_alone() -> None:
    pool, other = torch.cuda.MemPool(), torch.cuda.MemPool()
    captured = capture_chain(512, None)  # whose memory must not show up
    with torch.cuda.use_mem_pool(pool):
        large, small = new_bytes(12), torch.ones(16, device="cuda")
    with torch.cuda.use_mem_pool(other):
        elsewhere = new_bytes(4)
    for include_traces in (True, False):
        shown = pool.snapshot(include_traces=include_traces)
        assert {tuple(s["segment_pool_id"]) for s in shown} == {tuple(pool.id)}
        assert {s["segment_type"] for s in shown} == {"large", "small"}
        assert sum(s["allocated_size"] for s in shown) == 12 * MIB + 512
        blocks = {}
        for segment in shown:
            address = segment["address"]
            for block in segment["blocks"]:
                blocks[address] = block
                address += block["size"]
            assert address == segment["address"] + segment["total_size"]
        for tensor in (large, small):
            assert blocks[tensor.data_ptr()]["state"] == "active_allocated"
        assert elsewhere.data_ptr() not in blocks
    x = fresh(512, seed=1)
    assert torch.equal(captured.replay(x), chain(x))


def test_mem_pools_nest() -> None:
    outer, inner = torch.cuda.MemPool(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(outer):
        first = new_bytes(3, 1)
        with torch.cuda.use_mem_pool(inner):
            second = new_bytes(3, 2)
        third = new_bytes(3, 3)
    for tensor, home, other in (
        (first, outer, inner),
        (second, inner, outer),
        (third, outer, inner),
    ):
        assert inside(tensor, home.id)
        assert not inside(tensor, other.id)
    assert [int(t[-1]) for t in (first, second, third)] == [1, 2, 3]


def test_a_mem_pool_is_its_threads_own() -> None:
    pool = torch.cuda.MemPool()
    elsewhere = []

    def allocate() -> None:
        elsewhere.append(new_bytes(3))

    with torch.cuda.use_mem_pool(pool):
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
        here = new_bytes(3)
    assert inside(here, pool.id)
    assert not inside(elsewhere[0], pool.id)


def test_an_exception_leaves_the_mem_pool() -> None:
    pool = torch.cuda.MemPool()
    with pytest.raises(KeyError, match="mine"), torch.cuda.use_mem_pool(pool):
        raise KeyError("mine")
    assert pool.use_count() == 1
    assert not inside(new_bytes(3), pool.id)


def test_no_split() -> None:
    split, whole = torch.cuda.MemPool(), torch.cuda.MemPool(no_split=True)
    tensors = []
    for _ in range(3):
        for pool in (split, whole):
            with torch.cuda.use_mem_pool(pool):
                tensors.append(new_bytes(4))
    # A segment for blocks of this size holds 20 MiB: all three, or, unsplit, one.
    assert len(split.snapshot()) == 1
    assert len(whole.snapshot()) == 3
    assert all(len(segment["blocks"]) == 1 for segment in whole.snapshot())


def test_deleted_while_blocks_live() -> None:
    settle()
    before = torch.cuda.memory_reserved()
    pool = torch.cuda.MemPool()
    pool_id = pool.id
    with torch.cuda.use_mem_pool(pool):
        dead, alive = new_bytes(12), new_bytes(12, 5)
    del dead, pool
    gc.collect()
    new_bytes(12, 9)  # would overwrite it, were its memory given away
    assert inside(alive, pool_id)
    assert int(alive.sum(dtype=torch.int64)) == 5 * 12 * MIB
    del alive
    settle()
    assert segments(pool_id) == []
    assert torch.cuda.memory_reserved() == before


def test_a_hundred_mem_pools_leave_nothing() -> None:
    settle()
    before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    for step in range(100):
        pool = torch.cuda.MemPool(use_on_oom=step % 2 == 0, no_split=step % 3 == 0)
        with torch.cuda.use_mem_pool(pool):
            new_bytes(3)
        del pool
    settle()
    assert (torch.cuda.memory_reserved(), torch.cuda.memory_allocated()) == before


def test_a_capture_inside_a_mem_pool(side: Side) -> None:
    """The capture has its own pool; what is allocated beside it goes to the MemPool."""
    pool = torch.cuda.MemPool()
    x = fresh(512, seed=0)
    chain(x)
    counts = adapter.capture_counts()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.use_mem_pool(pool):
        eager = new_bytes(3)
        with torch.cuda.graph(graph):
            y = chain(x)
        later = new_bytes(3)
    assert inside(eager, pool.id)
    assert inside(later, pool.id)
    assert not inside(y, pool.id)
    if side == "ours":
        assert len(ids()) == 1
        assert adapter.capture_counts()["ours"] == counts["ours"] + 1
    x.copy_(fresh(512, seed=1))
    graph.replay()
    assert torch.equal(y, chain(x))


def test_a_mem_pool_inside_a_capture(side: Side) -> None:
    """Newest route first: the thread's, so the tensor is the MemPool's although it is captured."""
    pool = torch.cuda.MemPool()
    x = fresh(512, seed=0)
    chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x)
        with torch.cuda.use_mem_pool(pool):
            z = y + 1
        w = z * 2
    assert inside(z, pool.id)
    assert not inside(y, pool.id)
    assert not inside(w, pool.id)
    if side == "ours":
        assert len(ids()) == 1
    x.copy_(fresh(512, seed=1))
    graph.replay()
    assert torch.equal(w, (chain(x) + 1) * 2)


def test_a_capture_into_a_mem_pool() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.ones(3 * MIB, device="cuda")
    counts = adapter.capture_counts()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        y = x + 1
    assert inside(y, pool.id)
    assert adapter.capture_counts()["ours"] == counts["ours"]  # the pool is the base's
    x.fill_(4)
    graph.replay()
    assert torch.equal(y, torch.full_like(y, 5))
    del graph
    gc.collect()
    assert pool.use_count() == 1


def test_a_mem_pool_from_before_the_switch(side: Side) -> None:
    """Enabling and disabling while one is open changes nothing for it."""
    cgp.disable()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        first = new_bytes(3, 1)
        if side == "ours":
            cgp.enable()
        second = new_bytes(3, 2)
    with torch.cuda.use_mem_pool(pool):
        third = new_bytes(3, 3)
        if side == "ours":
            cgp.disable()
        fourth = new_bytes(3, 4)
    for value, tensor in enumerate((first, second, third, fourth), 1):
        assert inside(tensor, pool.id)
        assert int(tensor[-1]) == value
    assert ids() == []


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_allocator(tmp_path_factory.mktemp("allocator"))


def custom_pool(library: Path) -> Any:
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        str(library), "counting_malloc", "counting_free"
    )
    return torch.cuda.MemPool(allocator.allocator())


def test_a_custom_allocator_serves_its_mem_pool_alone(library: Path) -> None:
    counts = Counts(library)
    pool = custom_pool(library)
    assert pool.allocator is not None
    before = counts.allocations
    captured = capture_chain(512, None)
    outside = new_bytes(5)
    assert counts.allocations == before
    with torch.cuda.use_mem_pool(pool):
        x = new_bytes(12, 3)
    assert counts.allocations == before + 1
    assert (counts.live_blocks, counts.live_bytes) == (1, 12 * MIB)
    assert inside(x, pool.id)
    del x
    with torch.cuda.use_mem_pool(pool):
        again = new_bytes(12, 4)
    assert counts.allocations == before + 1  # cached, as any other pool's memory
    assert int(again.sum(dtype=torch.int64)) == 4 * 12 * MIB
    inputs = fresh(512, seed=1)
    assert torch.equal(captured.replay(inputs), chain(inputs))
    del again, pool
    settle()
    assert (counts.live_blocks, counts.live_bytes) == (0, 0)
    assert int(outside[-1]) == 1


def test_a_custom_allocators_pool_deleted_while_blocks_live(library: Path) -> None:
    counts = Counts(library)
    pool = custom_pool(library)
    with torch.cuda.use_mem_pool(pool):
        dead, alive = new_bytes(12), new_bytes(14, 5)
    assert counts.live_blocks == 2
    del dead, pool
    settle()
    assert (counts.live_blocks, counts.live_bytes) == (1, 14 * MIB)
    assert int(alive.sum(dtype=torch.int64)) == 5 * 14 * MIB
    del alive
    settle()
    assert counts.live_blocks == 0


def test_captures_beside_and_into_a_custom_allocators_pool(library: Path) -> None:
    """Into it the memory is the custom allocator's; in a capture inside it, the capture's own."""
    counts = Counts(library)
    pool = custom_pool(library)
    x = fresh(512, seed=0)
    chain(x)
    into, beside = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(into, pool=pool.id):
        y = chain(x)
    assert counts.live_blocks > 0
    assert inside(y, pool.id)
    with torch.cuda.use_mem_pool(pool), torch.cuda.graph(beside):
        z = chain(x) + 1
    assert not inside(z, pool.id)
    x.copy_(fresh(512, seed=1))
    for graph, output, expected in ((into, y, chain(x)), (beside, z, chain(x) + 1)):
        graph.replay()
        assert torch.equal(output, expected)
    del into, beside, graph, output, y, z, pool
    settle()
    assert counts.live_blocks == 0


USE_ON_OOM = """
import sys
import torch
if sys.argv[1] == "ours":
    import cudagraph_pool as cgp
    cgp.enable()
MIB = 1 << 20
def new(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")
def fails(mib):
    try:
        new(mib)
    except torch.OutOfMemoryError:
        return True
    return False
torch.cuda.synchronize()
lent, kept = torch.cuda.MemPool(use_on_oom=True), torch.cuda.MemPool()
allowed = torch.cuda.memory_reserved() + 96 * MIB
torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
with torch.cuda.use_mem_pool(kept):
    a = new(40)
with torch.cuda.use_mem_pool(lent):
    b = new(40)
assert fails(40)  # its blocks live
address = b.data_ptr()
del a, b
c = new(40)
assert c.data_ptr() == address  # taken from the pool that lends
assert fails(40)  # the other one does not
del c
with torch.cuda.use_mem_pool(lent):
    d = new(30)
assert d.data_ptr() == address  # and it is back
del d
del lent
torch.cuda.empty_cache()
assert not fails(40)  # given back with the pool, and the list of lenders is right
assert fails(200)
"""


def test_use_on_oom(side: Side, run: Run) -> None:
    run(USE_ON_OOM, side)


# cgp.use_pool, beside torch.cuda.use_mem_pool.


class Region:
    """A pool that eager work allocates in: a MemPool on native, a GraphPool on ours."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.pool: Any = torch.cuda.MemPool() if side == "native" else cgp.GraphPool()

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        if self.side == "native":
            with torch.cuda.use_mem_pool(self.pool):
                yield
        else:
            with cgp.use_pool(self.pool):
                yield

    def holds(self, tensor: torch.Tensor) -> bool:
        if self.side == "native":
            return inside(tensor, self.pool.id)
        return tensor.data_ptr() in {block["address"] for block in self.pool.snapshot()["blocks"]}

    def reserved(self) -> int:
        if self.side == "native":
            return sum(s["total_size"] for s in segments(self.pool.id))
        return int(self.pool.stats()["reserved_bytes"])


@pytest.fixture
def region(side: Side) -> Iterator[Region]:
    region = Region(side)
    yield region
    region.__dict__.clear()  # pytest keeps the object until `side` has looked for pools left


def test_eager_work_in_a_pool(region: Region) -> None:
    before = fresh(64, seed=0)
    with region.use():
        x = fresh(512, seed=1)
        y = chain(x)
    after = fresh(64, seed=0)
    assert region.holds(x)
    assert region.holds(y)
    assert not region.holds(before)
    assert not region.holds(after)
    assert torch.equal(y, chain(x))
    if region.side == "ours":
        assert ids() == [region.pool.id]
        assert region.pool.stats()["live_blocks"] == 2
        del x, y
        assert region.pool.stats()["live_blocks"] == 0


def test_it_grows_as_an_expandable_segment_does(region: Region) -> None:
    """Ever larger blocks, one at a time, cost what the largest needs."""
    for mib in (16, 32, 64, 128):
        with region.use():
            x = new_bytes(mib, 3)
        assert region.holds(x)
        assert int(x.sum(dtype=torch.int64)) == 3 * mib * MIB
        del x
    if region.side == "native":
        assert region.reserved() == (16 + 32 + 64 + 128) * MIB  # cudaMalloc cannot grow
    else:
        assert region.reserved() <= 128 * MIB * 1.02 + PAGE
        assert sum(s["total_size"] for s in segments(region.pool.id)) == region.reserved()


def test_its_holes_are_stitched(region: Region) -> None:
    with region.use():
        pieces = [new_bytes(16, value) for value in range(8)]
        del pieces[::2]
        whole = new_bytes(64, 99)
    assert region.holds(whole)
    assert int(whole.sum(dtype=torch.int64)) == 99 * 64 * MIB
    assert [int(p.min()) for p in pieces] == [1, 3, 5, 7]
    assert [int(p.max()) for p in pieces] == [1, 3, 5, 7]
    if region.side == "native":
        assert region.reserved() >= (128 + 64) * MIB  # no hole holds it
    else:
        assert region.reserved() <= 128 * MIB * 1.02 + PAGE


def test_pools_nest(side: Side) -> None:
    outer, inner, mem_pool = Region(side), Region(side), torch.cuda.MemPool()
    with outer.use():
        first = new_bytes(3, 1)
        with inner.use():
            second = new_bytes(3, 2)
            with torch.cuda.use_mem_pool(mem_pool):
                third = new_bytes(3, 3)
            fourth = new_bytes(3, 4)
        fifth = new_bytes(3, 5)
    outside = new_bytes(3, 6)
    homes = [(first, outer), (second, inner), (fourth, inner), (fifth, outer)]
    for tensor, home in homes:
        for one in (outer, inner):
            assert one.holds(tensor) == (one is home)
        assert not inside(tensor, mem_pool.id)
    assert inside(third, mem_pool.id)
    for one in (outer, inner):
        assert not one.holds(third)
        assert not one.holds(outside)
    values = [int(t[-1]) for t in (first, second, third, fourth, fifth, outside)]
    assert values == [1, 2, 3, 4, 5, 6]


def test_an_exception_leaves_the_pool(region: Region) -> None:
    with pytest.raises(KeyError, match="mine"), region.use():
        raise KeyError("mine")
    assert not region.holds(new_bytes(3))
    with region.use():
        assert region.holds(new_bytes(3))


def in_threads(*work: Callable[[], None]) -> None:
    """Runs all at once; raises what one of them raised."""
    errors: list[BaseException] = []

    def guarded(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_other_threads_are_not_routed(region: Region) -> None:
    elsewhere = []
    with region.use():
        in_threads(lambda: elsewhere.append(new_bytes(3)))
        here = new_bytes(3)
    assert region.holds(here)
    assert not region.holds(elsewhere[0])


def test_a_pool_for_each_thread(side: Side) -> None:
    regions = [Region(side) for _ in range(4)]
    barrier = threading.Barrier(len(regions))

    def work(region: Region, seed: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), region.use():
            barrier.wait(timeout=60)
            for step in range(30):
                x = new_bytes(1 + (seed + step) % 5, seed + 1)
                assert region.holds(x)
                y = x + 1
                assert int(y.min()) == int(y.max()) == seed + 2

    in_threads(*(lambda r=r, s=s: work(r, s) for s, r in enumerate(regions)))
    torch.cuda.synchronize()


def test_training_in_a_pool(region: Region) -> None:
    """Autograd's threads are not this one: what they allocate stays with the base."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)
    ).cuda()
    x = fresh(128, seed=0)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    with region.use():
        loss = model(x).square().sum()
        loss.backward()
    assert region.holds(loss)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-3)


def test_a_freed_block_is_not_another_streams_until_it_may_be(region: Region) -> None:
    """The block's own stream still reads it when another stream allocates."""
    owner, other = torch.cuda.Stream(), torch.cuda.Stream()
    sums = []
    with region.use():
        for step in range(8):
            with torch.cuda.stream(owner):
                x = new_bytes(8, 1)
                torch.cuda._sleep(5_000_000)
                sums.append(x.sum(dtype=torch.int64))
            del x
            with torch.cuda.stream(other):
                sums.append(new_bytes(8, step + 2).sum(dtype=torch.int64))
    torch.cuda.synchronize()
    assert [int(s) for s in sums[::2]] == [8 * MIB] * 8
    assert [int(s) for s in sums[1::2]] == [8 * MIB * (step + 2) for step in range(8)]


def test_record_stream_holds_a_block(region: Region) -> None:
    other = torch.cuda.Stream()
    result = torch.zeros((), dtype=torch.int64, device="cuda")
    with region.use():
        for _ in range(8):
            x = new_bytes(8, 1)
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                torch.cuda._sleep(5_000_000)
                result += x.sum(dtype=torch.int64)
            x.record_stream(other)
            del x
            new_bytes(8, 200)  # where x was, were it not held
        torch.cuda.current_stream().wait_stream(other)
    assert int(result) == 8 * 8 * MIB


@pytest.mark.parametrize("seed", range(4))
def test_random_work_on_several_streams_keeps_its_data(region: Region, seed: int) -> None:
    """Every block holds its own pattern until the moment it is freed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    streams = [torch.cuda.Stream() for _ in range(3)]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    live: list[tuple[torch.Tensor, int, int]] = []
    with region.use():
        for step in range(300):
            if live and (len(live) > 24 or draw(2)):
                tensor, value, index = live.pop(draw(len(live)))
                with torch.cuda.stream(streams[index]):
                    wrong[index] += (tensor != value).sum()
                del tensor
            else:
                index = draw(len(streams))
                size = (1 << draw(22)) + draw(100)  # of int32: up to 8 MiB
                with torch.cuda.stream(streams[index]):
                    x = torch.full((size,), step, dtype=torch.int32, device="cuda")
                live.append((x, step, index))
                del x
    torch.cuda.synchronize()
    assert all(region.holds(tensor) for tensor, _, _ in live)
    for tensor, value, index in live:
        wrong[index] += (tensor != value).sum()
    assert [int(w) for w in wrong] == [0] * len(streams)


def test_a_tensor_outlives_its_pool(region: Region) -> None:
    with region.use():
        x = new_bytes(12, 6)
    if region.side == "ours":
        region.pool.close()
    del region.pool
    settle()
    new_bytes(12, 9)
    assert int(x.sum(dtype=torch.int64)) == 6 * 12 * MIB


def test_a_capture_into_a_pool_that_eager_work_used(region: Region) -> None:
    """The graph must take neither the memory of live tensors nor leave its own to the next."""
    with region.use():
        kept = [new_bytes(5, value) for value in range(6)]
        del kept[::2]
        x = fresh(700, seed=0)
    counts = adapter.capture_counts()
    captured = capture_chain(700, region.pool.id)
    if region.side == "ours":
        assert adapter.capture_counts()["ours"] == counts["ours"] + 1
    for seed in range(3):
        x.copy_(fresh(700, seed=seed))
        assert torch.equal(captured.replay(x), chain(x))
    assert [int(k.min()) for k in kept] == [1, 3, 5]
    assert [int(k.max()) for k in kept] == [1, 3, 5]


def test_a_capture_inside_use_pool(region: Region) -> None:
    """As inside use_mem_pool: the capture has a pool of its own."""
    x = fresh(512, seed=0)
    chain(x)
    graph = torch.cuda.CUDAGraph()
    with region.use():
        eager = new_bytes(3)
        with torch.cuda.graph(graph):
            y = chain(x)
        later = new_bytes(3)
    assert region.holds(eager)
    assert region.holds(later)
    assert not region.holds(y)
    if region.side == "ours":
        assert len(ids()) == 2
    x.copy_(fresh(512, seed=1))
    graph.replay()
    assert torch.equal(y, chain(x))


def test_a_pool_that_graphs_use_takes_no_eager_work(side: Side) -> None:
    """A replay would overwrite it. A MemPool takes it: native leaves that to the user."""
    if side == "native":
        mem_pool = torch.cuda.MemPool()
        captured = capture_chain(512, mem_pool.id)
        with torch.cuda.use_mem_pool(mem_pool):
            assert inside(new_bytes(3), mem_pool.id)
        return
    pool = cgp.GraphPool()
    captured = capture_chain(512, pool.id)
    with pytest.raises(RuntimeError, match="graph"), cgp.use_pool(pool):
        pass
    assert new_bytes(3).data_ptr() not in {b["address"] for b in pool.snapshot()["blocks"]}
    x = fresh(512, seed=3)
    assert torch.equal(captured.replay(x), chain(x))
    del captured
    settle()
    with cgp.use_pool(pool):  # nothing is replayed in it any more
        eager = new_bytes(3)
    assert eager.data_ptr() in {b["address"] for b in pool.snapshot()["blocks"]}


def test_a_released_pool_takes_no_eager_work(side: Side) -> None:
    if side == "native":
        return  # a MemPool cannot be released while its object lives
    pool = cgp.GraphPool()
    pool.close()
    with pytest.raises(RuntimeError, match="released"), cgp.use_pool(pool):
        pass
    new_bytes(3)
    assert ids() == []


def test_use_pool_needs_enabling(side: Side) -> None:
    if side == "native":
        with pytest.raises(RuntimeError, match="enable"):
            cgp.GraphPool()
        return
    pool = cgp.GraphPool()
    cgp.disable()
    with pytest.raises(RuntimeError, match="enable"), cgp.use_pool(pool):
        pass
    cgp.enable()
    with cgp.use_pool(pool):
        x = new_bytes(3)
    assert x.data_ptr() in {b["address"] for b in pool.snapshot()["blocks"]}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_pool_of_another_device(side: Side) -> None:
    """use_mem_pool is told the device and does not ask the pool; use_pool asks."""
    if side == "native":
        mem_pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(mem_pool), torch.cuda.device(1):
            assert not inside(new_bytes(3), mem_pool.id)
        return
    pool = cgp.GraphPool(1)
    with pytest.raises(ValueError, match="cuda:1"), cgp.use_pool(pool):
        pass
    with torch.cuda.device(1), cgp.use_pool(pool):
        x = new_bytes(3)
    assert x.device.index == 1
    assert x.data_ptr() in {b["address"] for b in pool.snapshot()["blocks"]}
    assert not inside(new_bytes(3), pool.id)


def test_use_pool_over_and_over_does_not_grow(region: Region) -> None:
    for step in range(300):
        with region.use():
            x = new_bytes(5)
            y = chain(fresh(100 + step % 7, seed=step))
        del x, y
        if step == 20:
            reserved = region.reserved()
    assert region.reserved() == reserved
    if region.side == "ours":
        assert region.pool.stats()["live_blocks"] == 0
        assert adapter.use_count(torch.cuda.current_device(), region.pool.id) == 1
