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

pytestmark = pytest.mark.whole_gpu

COMMON = """
import copy, ctypes, gc, os, random, sys, warnings
import torch
import cudagraph_pool as cgp
from cudagraph_pool import _torch
from torch.cuda.memory import CUDAPluggableAllocator, change_current_allocator
OURS, LIBRARY, HOOKS = sys.argv[1] == "ours", sys.argv[2], sys.argv[3] == "hooks"
MIB = 1 << 20
assert not torch.cuda.is_initialized()

def allocator():
    if not OURS:
        return CUDAPluggableAllocator(LIBRARY, "counting_malloc", "counting_free")
    if HOOKS:
        made = cgp.pluggable_allocator()
        assert isinstance(made, CUDAPluggableAllocator)
        return made
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

def clean():
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()

def chain(x):
    wide = torch.cat([x, x * 2, x + 1, x - 1], dim=1)
    summed = wide.reshape(x.shape[0], 4, -1).sum(dim=1)
    return (torch.sqrt(summed * summed + 1) / 2 + x).softmax(dim=1)

def fresh(rows, seed):
    return torch.rand(rows, 256, generator=torch.Generator().manual_seed(seed)).cuda()

def raises(call, *arguments):
    '''The text of the RuntimeError that the call must end with.'''
    try:
        call(*arguments)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")
"""

EAGER_WORK = """
change_current_allocator(allocator())
assert torch.cuda.get_allocator_backend() == "pluggable"
for step in range(20):
    x = torch.ones(3 << 20, device="cuda")
    y = [x + i for i in range(5)]
    del x
    assert sum(int(t[0]) for t in y) == 15 == sum(int(t[-1]) for t in y)
assert went_through()
warnings.simplefilter("ignore")  # what torch says of its own backward passes
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)
)
x = torch.rand(128, 256)
model(x).square().sum().backward()
expected = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
model.cuda()
for step in range(3):
    model(x.cuda()).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected):
        torch.testing.assert_close(parameter.grad.cpu(), gradient, rtol=1e-2, atol=1e-2)
    model.zero_grad()
"""

# Every block holds its own pattern until it is freed, on three streams.
RANDOM_WORK = """
change_current_allocator(allocator())
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

# Without its hook torch keeps record_stream() to itself, so it is for the allocator with hooks.
RECORD_STREAM = """
change_current_allocator(allocator())
other = torch.cuda.Stream()
result = torch.zeros((), dtype=torch.int64, device="cuda")
for _ in range(8):
    x = new(8)
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.cuda._sleep(5_000_000)
        result += x.sum(dtype=torch.int64)
    x.record_stream(other)
    del x
    new(8, 200)
torch.cuda.current_stream().wait_stream(other)
assert int(result) == 8 * 8 * MIB
assert went_through()
"""

# torch tells the two functions alone nothing of captures: ours refuse, where cudaMalloc only breaks
# the capture and leaves the user with what the next kernel says.
A_CAPTURE_WITHOUT_HOOKS = """
warnings.simplefilter("ignore")  # of the empty graph
change_current_allocator(allocator())
x = torch.ones(1 << 20, device="cuda")
stream = torch.cuda.current_stream()

def capture():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1

text = raises(capture)
if OURS:
    assert "capture" in text, text
    assert "pluggable_allocator" in text or "cudagraph_pool.allocator" in text, text
    torch.cuda.set_stream(stream)
    assert total(new(20, 3)) == 60 * MIB  # eager work goes on
    assert int((x + 1).sum()) == 2 << 20
else:
    os._exit(0)
"""

# Nobody tells the two functions of a capture, which here is on a stream that has allocated before:
# what they record on it while they serve others would become part of the capture.
A_CAPTURE_ELSEWHERE = """
import threading
change_current_allocator(allocator())
side, other = torch.cuda.Stream(), torch.cuda.Stream()
with torch.cuda.stream(side):
    x, out = new(8), new(8, 0)
    freed = new(8)
    del freed
torch.cuda.synchronize()
kept = []

def work():
    with torch.cuda.stream(other):
        kept.extend(new(8, value) for value in range(10))

graph = torch.cuda.CUDAGraph()
with torch.cuda.stream(side):
    graph.capture_begin(capture_error_mode="thread_local")
    out.copy_(x)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    out.add_(x)
    graph.capture_end()
graph.replay()
torch.cuda.synchronize()
with torch.cuda.stream(other):
    kept.extend(new(8, value) for value in range(10, 20))
torch.cuda.synchronize()
assert total(out) == 2 * 8 * MIB
assert [total(t) for t in kept] == [value * 8 * MIB for value in range(20)]
assert went_through()
"""

CAPTURES = """
if OURS:
    change_current_allocator(allocator())
assert torch.cuda.get_allocator_backend() == ("pluggable" if OURS else "native")

def capture(rows, id):
    x, out = fresh(rows, 0), fresh(rows, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=id):
        out.copy_(chain(x))
    return graph, x, out

def right(captured, seed):
    graph, x, out = captured
    x.copy_(fresh(x.shape[0], seed))
    out.fill_(float("nan"))
    graph.replay()
    return torch.equal(out, chain(x))

chain(fresh(8, 0))
sizes = [1, 64, 300, 1024, 2048, 4096, 8192]
id = torch.cuda.graph_pool_handle()
captured = {rows: capture(rows, id) for rows in sizes}
eager = [new(7, value) for value in range(5)]
for seed, rows in enumerate(random.Random(3).choices(sizes, k=40)):
    assert right(captured[rows], seed)
assert [total(t) for t in eager] == [value * 7 * MIB for value in range(5)]
if OURS:
    assert tuple(id) in _torch.pool_ids(0)
    stats = _torch.stats(0, tuple(id))
    assert stats["live_blocks"] == 0
    assert stats["reserved_bytes"] <= stats["peak_allocated_bytes"] * 1.02 + 4 * MIB, stats

# A pool of its own, an output inside it, a second stream in the capture, another graph beside it.
x = fresh(512, 0)
graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
with torch.cuda.graph(graph):
    y = chain(x)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        z = chain(x + 1)
    torch.cuda.current_stream().wait_stream(side)
    w = y + z
for seed in range(5):
    x.copy_(fresh(512, seed))
    graph.replay()
    assert right(captured[1024], seed)
    assert torch.equal(w, chain(x) + chain(x + 1))
    assert torch.equal(y, chain(x))
if OURS:
    assert len([i for i in _torch.pool_ids(0) if 0 in i]) == 2  # torch's ids have one zero

# An exception in the captured code; then the next works.
stream = torch.cuda.current_stream()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=id):
        chain(x)
        raise KeyError("mine")
except KeyError:
    torch.cuda.set_stream(stream)
captured[700] = capture(700, id)
assert all(right(one, 9) for one in captured.values())

for one in captured.values():
    one[0].reset()
graph.reset()
del captured, y, z, w, one
clean()
if OURS:
    assert [i for i in _torch.pool_ids(0) if 0 in i] == []
"""

CAPTURE_AND_RESET = """
if OURS:
    change_current_allocator(allocator())
x, out = fresh(700, 0), fresh(700, 1)

def round():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(chain(x))
    graph.replay()
    graph.reset()

for _ in range(20):
    round()
clean()
free = torch.cuda.mem_get_info()[0]
for _ in range(300):
    round()
assert torch.equal(out, chain(x))
clean()
assert free - torch.cuda.mem_get_info()[0] < 32 * MIB
"""

GRAPHED_CALLABLES = """
if OURS:
    change_current_allocator(allocator())
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)
).cuda()
warnings.simplefilter("ignore")  # what torch says of its own backward passes
expected = []
inputs = [fresh(64, seed) for seed in range(4)]
twin = copy.deepcopy(model)  # whose backward passes bind nothing of the model's to a stream
for x in inputs:
    y = twin(x)
    y.square().sum().backward()
    expected.append((y.detach().clone(), [p.grad.clone() for p in twin.parameters()]))
    twin.zero_grad(set_to_none=True)
id = torch.cuda.graph_pool_handle()
graphed = torch.cuda.make_graphed_callables(model, (fresh(64, 9),), pool=id)
if OURS:
    assert tuple(id) in _torch.pool_ids(0)
for x, (y, gradients) in zip(inputs, expected):
    out = graphed(x)
    torch.testing.assert_close(out, y, rtol=1e-3, atol=1e-4)
    out.square().sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-3)
    model.zero_grad(set_to_none=True)
"""

# torch tells the allocator of the fraction by a hook.
A_MEMORY_FRACTION = """
if OURS:
    change_current_allocator(allocator())
x = new(1)
torch.cuda.set_per_process_memory_fraction(300 * MIB / torch.cuda.mem_get_info()[1])
for _ in range(2):
    y = new(200, 3)
    try:
        new(200)
        raise AssertionError("more than the fraction")
    except torch.OutOfMemoryError as error:
        assert "CUDA out of memory" in str(error)
    assert int(y.min()) == int(y.max()) == 3
    del y
    clean()
torch.cuda.set_per_process_memory_fraction(1.0)
assert int(new(400, 2).max()) == 2
"""

# What torch's class cannot do it says itself, and the process goes on.
WHAT_THIS_PATH_CANNOT_DO = """
change_current_allocator(allocator())
x = new(4, 2)
for call in (
    torch.cuda.memory_stats,
    torch.cuda.memory_snapshot,
    torch.cuda.reset_peak_memory_stats,
    torch.cuda.MemPool,
):
    assert "does not yet support" in raises(call), call
assert "Can't swap an already initialized allocator" in raises(
    change_current_allocator, allocator()
)
assert "not allocated here" in raises(torch.cuda.caching_allocator_delete, 4096)
address = torch.cuda.caching_allocator_alloc(1 << 20)
torch.cuda.caching_allocator_delete(address)
assert "not allocated here" in raises(torch.cuda.caching_allocator_delete, address)
assert total(x) == 8 * MIB
y = new(4, 3)
assert total(y) == 12 * MIB
assert torch.empty(0, device="cuda").numel() == 0
assert went_through()
if OURS:
    try:
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        assert "CUDA out of memory" in str(error), error
    else:
        raise AssertionError("a TiB")
    assert total(new(4, 3)) == total(y)
"""

AS_THE_ALLOCATOR_OF_A_MEM_POOL = """
torch.cuda.init()
if HOOKS and OURS:
    cgp.enable()  # goes together with it
pools = [torch.cuda.MemPool(allocator().allocator()) for _ in range(2)]
outside = new(30, 9)
assert not went_through()
with torch.cuda.use_mem_pool(pools[0]):
    pieces = [new(64, value) for value in range(6)]
assert went_through()
shown = pools[0].snapshot()
assert sum(s["allocated_size"] for s in shown) == 6 * 64 * MIB
for piece in pieces:
    assert any(s["address"] <= piece.data_ptr() < s["address"] + s["total_size"] for s in shown)
assert [total(p) for p in pieces] == [value * 64 * MIB for value in range(6)]
torch.cuda.synchronize()
free = torch.cuda.mem_get_info()[0]
del pieces[::2]
with torch.cuda.use_mem_pool(pools[0]):
    again = new(64, 7)  # cached by the MemPool
assert sum(s["total_size"] for s in pools[0].snapshot()) == 6 * 64 * MIB
del again, pools[0]
gc.collect()
# Twice as large as any hole that the first pool left, and no more memory than these had.
with torch.cuda.use_mem_pool(pools[0]):
    whole = new(128, 8)
torch.cuda.synchronize()
assert free - torch.cuda.mem_get_info()[0] <= 4 * MIB
assert [int(p.min()) for p in pieces] == [int(p.max()) for p in pieces] == [1, 3, 5]
assert total(whole) == 8 * 128 * MIB
assert total(outside) == 9 * 30 * MIB
del whole, pieces, piece, pools
clean()
"""

# Unlike as the allocator of the process, here no hook is needed: the MemPool's owner knows of the
# capture and asks only for segments, which it keeps.
CAPTURES_AND_ITS_MEM_POOL = """
torch.cuda.init()
if HOOKS and OURS:
    cgp.enable()
pool = torch.cuda.MemPool(allocator().allocator())
x = fresh(300, 0)
chain(x)
into, beside = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
with torch.cuda.graph(into, pool=pool.id):
    y = chain(x)
assert went_through()
with torch.cuda.use_mem_pool(pool):
    kept = new(30, 6)
    with torch.cuda.graph(beside):
        z = chain(x) + 1
for seed in range(4):
    x.copy_(fresh(300, seed))
    into.replay()
    beside.replay()
    assert torch.equal(y, chain(x)) and torch.equal(z, chain(x) + 1)
assert total(kept) == 6 * 30 * MIB
shown = pool.snapshot()
for tensor, home in ((y, True), (kept, True), (z, False)):
    address = tensor.data_ptr()
    assert home == any(s["address"] <= address < s["address"] + s["total_size"] for s in shown)
"""

# Memory that a MemPool has grown by grows on where it ends (pytorch#147851): blocks of ever new
# sizes, each pool given back before the next, cost what the largest needs.
A_MEM_POOL_AFTER_THE_OTHER = """
torch.cuda.init()
shared = allocator()
x = new(1)
pool = torch.cuda.MemPool(shared.allocator())
with torch.cuda.use_mem_pool(pool):
    keeps_a_page = new(2, 5)
torch.cuda.synchronize()
free = torch.cuda.mem_get_info()[0]
for step, mib in enumerate((16, 40, 24, 100, 64, 200, 10)):
    one = torch.cuda.MemPool(shared.allocator())
    with torch.cuda.use_mem_pool(one):
        y = new(mib, step)
    assert total(y) == step * mib * MIB
    del y, one
    gc.collect()
    torch.cuda.empty_cache()
assert free - torch.cuda.mem_get_info()[0] <= 210 * MIB
assert total(keeps_a_page) == 10 * MIB
assert went_through()
"""

EXIT_WITH_EVERYTHING_ALIVE = """
if OURS:
    change_current_allocator(allocator())
id = torch.cuda.graph_pool_handle()
tensors, graphs = [new(3, value) for value in range(5)], []
x = fresh(100, 0)
for own in (id, id, None):
    graphs.append(torch.cuda.CUDAGraph())
    with torch.cuda.graph(graphs[-1], pool=own):
        tensors.append(chain(x))
for graph in graphs:
    graph.replay()
"""

BOTH = ("two_symbols", "hooks")
PROGRAMS = [
    ("eager_work", EAGER_WORK, BOTH),
    ("random_work", RANDOM_WORK, BOTH),
    ("record_stream", RECORD_STREAM, ("hooks",)),
    ("a_capture_without_hooks", A_CAPTURE_WITHOUT_HOOKS, ("two_symbols",)),
    ("a_capture_elsewhere", A_CAPTURE_ELSEWHERE, ("two_symbols",)),
    ("captures", CAPTURES, ("hooks",)),
    ("capture_and_reset", CAPTURE_AND_RESET, ("hooks",)),
    ("graphed_callables", GRAPHED_CALLABLES, ("hooks",)),
    ("a_memory_fraction", A_MEMORY_FRACTION, ("hooks",)),
    ("what_this_path_cannot_do", WHAT_THIS_PATH_CANNOT_DO, BOTH),
    ("as_the_allocator_of_a_mem_pool", AS_THE_ALLOCATOR_OF_A_MEM_POOL, BOTH),
    ("captures_and_its_mem_pool", CAPTURES_AND_ITS_MEM_POOL, BOTH),
    ("a_mem_pool_after_the_other", A_MEM_POOL_AFTER_THE_OTHER, BOTH),
    ("exit_with_everything_alive", EXIT_WITH_EVERYTHING_ALIVE, ("hooks",)),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_allocator(tmp_path_factory.mktemp("allocator"))


@pytest.mark.parametrize(
    ("program", "variant"),
    [
        pytest.param(program, variant, id=f"{name}-{variant}")
        for name, program, variants in PROGRAMS
        for variant in variants
    ],
)
def test_two_symbols(program: str, variant: str, side: Side, library: Path, run: Run) -> None:
    run(COMMON + program, side, str(library), variant)
