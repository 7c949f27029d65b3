"""cudagraph_pool_malloc and cudagraph_pool_free in torch.cuda.memory.CUDAPluggableAllocator: as the
allocator of the process, with and without the pool hooks, and as that of a torch.cuda.MemPool.

On native the same programs run with an allocator in C over cudaMalloc, or, where that one cannot
do it at all (captures), with PyTorch's own. Each is a process of its own: an allocator can be
changed only before CUDA is initialised.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ..conftest import Run
from .compiled import compile_allocator
from .conftest import Side
from .programs import PRELUDE

pytestmark = pytest.mark.whole_gpu

COMMON = """
import ctypes, os, random, threading
from torch.cuda.memory import CUDAPluggableAllocator, change_current_allocator
OURS, LIBRARY, HOOKS = side == "ours", sys.argv[2], sys.argv[3] == "hooks"
MIB = 1 << 20

def allocator():
    if not OURS:
        return CUDAPluggableAllocator(LIBRARY, "counting_malloc", "counting_free")
    if HOOKS:
        return cgp.pluggable_allocator()
    return CUDAPluggableAllocator(
        cgp.library_path(), "cudagraph_pool_malloc", "cudagraph_pool_free"
    )

def went_through():
    if OURS:
        return bool(_torch.driver_calls(0))
    return ctypes.c_int64.in_dll(ctypes.CDLL(LIBRARY), "counting_allocations").value > 0

def new(mib, value=1):
    return torch.full((mib * MIB,), value, dtype=torch.uint8, device="cuda")

def total(tensor):
    return int(tensor.sum(dtype=torch.int64))

def raises(kind, call, *arguments):
    '''The text of the error that the call must end with.'''
    try:
        call(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError("no error")
"""

# Every block holds its own pattern until it is freed, on three streams.
RANDOM_WORK = """
change_current_allocator(allocator())
assert torch.cuda.get_allocator_backend() == "pluggable"
draw = random.Random(5).randrange
streams = [torch.cuda.Stream() for _ in range(3)]
wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
torch.cuda.synchronize()
live = []
for step in range(400):
    if live and (len(live) > 24 or draw(2)):
        tensor, value, index = live.pop(draw(len(live)))
        with torch.cuda.stream(streams[index]):
            wrong[index] += (tensor != value).sum()
        del tensor
    else:
        index = draw(3)
        with torch.cuda.stream(streams[index]):
            x = torch.full(((1 << draw(22)) + draw(100),), step, dtype=torch.int32, device="cuda")
        live.append((x, step, index))
        del x
torch.cuda.synchronize()
for tensor, value, index in live:
    wrong[index] += (tensor != value).sum()
assert [int(w) for w in wrong] == [0, 0, 0]
assert went_through()
"""


# After each a capture fails in the user's code. Of the fraction torch tells by a hook too.
CAPTURES_AND_A_FRACTION = """
if OURS:
    change_current_allocator(allocator())
id, made = torch.cuda.graph_pool_handle(), []
eager = [new(7, value) for value in range(5)]
stream = torch.cuda.current_stream()
for elements in (100, 70_000, 1 << 20, 3000, 5 << 20):
    x, y = torch.ones(elements, device="cuda"), torch.ones(elements, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=id):
        y.copy_(work(x))
    made.append((graph, x, y))
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=id):
            work(x)
            raise KeyError("mine")
    except KeyError:
        torch.cuda.set_stream(stream)
for captured in made + made[::-1]:
    check(*captured)
assert [total(t) for t in eager] == [value * 7 * MIB for value in range(5)]
if OURS:
    assert tuple(id) in ours()
    stats = _torch.stats(0, tuple(id))
    assert stats["live_blocks"] == 0
    assert stats["reserved_bytes"] <= stats["peak_allocated_bytes"] * 1.02 + 4 * MIB, stats
torch.cuda.set_per_process_memory_fraction(2000 * MIB / torch.cuda.mem_get_info()[1])
for _ in range(2):
    filled = new(1500, 3)
    assert "CUDA out of memory" in raises(torch.OutOfMemoryError, new, 1500)
    assert int(filled.min()) == int(filled.max()) == 3
    del filled
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
torch.cuda.set_per_process_memory_fraction(1.0)
assert int(new(2000, 2).max()) == 2
"""

# Here no hook is needed for captures: the MemPool's owner knows of them and asks for segments only.
A_MEM_POOL = """
torch.cuda.init()
if HOOKS:
    enable()  # goes together with it
pool = torch.cuda.MemPool(allocator().allocator())
outside, x = new(30, 9), torch.ones(1 << 18, device="cuda")
work(x)
assert not went_through()
into, y = capture(x, pool.id)
assert went_through()
with torch.cuda.use_mem_pool(pool):
    pieces = [new(64, value) for value in range(6)]
    beside, z = capture(x)
check(into, x, y)
check(beside, x, z)
shown = pool.snapshot()
for tensor, home in ((y, True), (z, False), (outside, False), *((p, True) for p in pieces)):
    address = tensor.data_ptr()
    assert home == any(s["address"] <= address < s["address"] + s["total_size"] for s in shown)
del pieces[::2]
with torch.cuda.use_mem_pool(pool):
    again = new(64, 7)  # cached by the MemPool
assert sum(s["total_size"] for s in pool.snapshot()) == sum(s["total_size"] for s in shown)
assert [total(p) for p in pieces] == [value * 64 * MIB for value in (1, 3, 5)]
assert total(outside) == 9 * 30 * MIB
"""

BOTH = ("two_symbols", "hooks")
PROGRAMS = [
    ("random_work", RANDOM_WORK, BOTH),
    ("captures_and_a_fraction", CAPTURES_AND_A_FRACTION, ("hooks",)),
    ("a_mem_pool", A_MEM_POOL, BOTH),
]


@pytest.mark.parametrize(
    ("program", "variant"),
    [
        pytest.param(program, variant, id=f"{name}-{variant}")
        for name, program, variants in PROGRAMS
        for variant in variants
    ],
)
def test_two_symbols(program: str, variant: str, side: Side, tmp_path: Path, run: Run) -> None:
    run(PRELUDE + COMMON + program, side, str(compile_allocator(tmp_path)), variant)
