"""torch.cuda.MemPool: with the package enabled, one without an allocator of its own is a pool of
ours and does what a native one does. Captures into MemPools are in test_mempool_captures.py.
"""

from __future__ import annotations

from ..conftest import Run
from .conftest import Side

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
