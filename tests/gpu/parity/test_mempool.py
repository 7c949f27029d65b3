"""torch.cuda.MemPool: with the package enabled, one without an allocator of its own is a pool of
ours and does what a native one does. Captures into MemPools are in test_mempool_captures.py.
"""

from __future__ import annotations

import cudagraph_pool as cgp

from ..conftest import Run
from ..work import adapter, capture_chain, chain, fresh, torch
from .captures import memory_snapshot_of
from .conftest import Side
from .memory import ids, inside, new_bytes


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
