"""torch.cuda.MemPool: with the package enabled, one without an allocator of its own is a pool of
ours and does what a native one does. Captures into MemPools are in test_mempool_captures.py.
"""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest

import cudagraph_pool as cgp

from ..conftest import Run
from ..work import adapter, capture_chain, chain, fresh, torch
from .captures import memory_snapshot_of
from .compiled import Counts, compile_allocator
from .conftest import Side
from .memory import MIB, ids, inside, new_bytes, segments, settle


def test_a_mem_pool_routes_what_is_allocated_inside(side: Side) -> None:
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
    assert ids() == ([tuple(pool.id)] if side == "ours" else [])


def test_snapshot_of_a_mem_pool_shows_it_alone(side: Side) -> None:
    pool, other = torch.cuda.MemPool(), torch.cuda.MemPool()
    captured = capture_chain(512, None)  # whose memory must not show up
    with torch.cuda.use_mem_pool(pool):
        large, small = new_bytes(12), torch.ones(16, device="cuda")
    with torch.cuda.use_mem_pool(other):
        elsewhere = new_bytes(4)
    for include_traces in (True, False):
        shown = memory_snapshot_of(pool.id, include_traces=include_traces)
        assert {tuple(s["segment_pool_id"]) for s in shown} == {tuple(pool.id)}
        types = {"large", "small"} if side == "native" else {"large"}
        assert {s["segment_type"] for s in shown} == types
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


def test_no_split(side: Side) -> None:
    split, whole = torch.cuda.MemPool(), torch.cuda.MemPool(no_split=True)
    tensors = []
    for _ in range(3):
        for pool in (split, whole):
            with torch.cuda.use_mem_pool(pool):
                tensors.append(new_bytes(4))
    if side == "ours":  # there are pages, of 2 MiB
        with torch.cuda.use_mem_pool(whole):
            tensors.append(torch.ones(16, device="cuda"))
        blocks = adapter.snapshot(0, tuple(whole.id))["blocks"]
        pages = [piece[0] for block in blocks for piece in block["pieces"]]
        assert len(pages) == len(set(pages)) == 3 * 2 + 1
        return
    # A segment for blocks of this size holds 20 MiB: all three, or, unsplit, one.
    assert len(memory_snapshot_of(split.id)) == 1
    shown = memory_snapshot_of(whole.id)
    assert len(shown) == 3
    assert all(len(segment["blocks"]) == 1 for segment in shown)


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
        assert len(ids()) == 2
        assert adapter.capture_counts()["ours"] == counts["ours"] + 1
    x.copy_(fresh(512, seed=1))
    graph.replay()
    assert torch.equal(y, chain(x))


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


def test_mem_pools_left_to_the_base(side: Side) -> None:
    if side == "ours":
        cgp.enable(mempools=False)
    pool = torch.cuda.MemPool()
    captured = capture_chain(512, pool.id)
    with torch.cuda.use_mem_pool(pool):
        assert inside(new_bytes(3), pool.id)
    assert ids() == []
    if side == "ours":
        cgp.enable()
        other = torch.cuda.MemPool()
        assert ids() == [tuple(other.id)]
    x = fresh(512, seed=1)
    assert torch.equal(captured.replay(x), chain(x))


def test_disabled_while_a_mem_pool_is_in_use(side: Side) -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        first = new_bytes(3, 1)
        if side == "ours":
            cgp.disable()
        second = new_bytes(3, 2)
    captured = capture_chain(512, pool.id)
    for value, tensor in enumerate((first, second), 1):
        assert inside(tensor, pool.id)
        assert int(tensor[-1]) == value
    x = fresh(512, seed=1)
    assert torch.equal(captured.replay(x), chain(x))


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
assert address <= d.data_ptr() <= address + 10 * MIB  # and it is back
del d
del lent
torch.cuda.empty_cache()
assert not fails(40)  # given back with the pool, and the list of lenders is right
assert fails(200)
"""


def test_use_on_oom(side: Side, run: Run) -> None:
    run(USE_ON_OOM, side)
