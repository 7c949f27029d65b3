"""Out of memory: who gives way to whom, what the error says, and that the process goes on.

Each test is a program in a process of its own, since a memory fraction and an observer stay for
good, and what is measured is all memory that the process has.
"""

from __future__ import annotations

import pytest

from ..conftest import Run
from .conftest import Side

pytestmark = pytest.mark.whole_gpu

# What the programs share. `limit(mib)` allows so many MiB beyond what is reserved now;
# `capture(mib)` captures a graph that writes to that much memory at once and keeps none of it.
COMMON = """
import gc, re, sys
import torch
import cudagraph_pool as cgp
from cudagraph_pool import _torch
OURS = sys.argv[1] == "ours"
if OURS:
    cgp.enable()
MIB = 1 << 20
x = torch.ones(1024, device="cuda")
out = torch.zeros(1024, device="cuda")
warm = torch.cuda.CUDAGraph()
with torch.cuda.graph(warm):
    out.copy_(x + 1)
warm.replay()
torch.cuda.synchronize()
del warm
gc.collect()
torch.cuda.empty_cache()
assert _torch.pool_ids(0) == []

def new(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

def limit(mib):
    allowed = torch.cuda.memory_reserved() + mib * MIB
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])

def capture(mib, pool=None, keep=False):
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool):
            out.copy_(x + 1)
            inside = new(mib)
            inside.fill_(3)
    finally:
        torch.cuda.set_stream(before)
    return (graph, inside) if keep else graph

def replays(graph):
    out.zero_()
    graph.replay()
    return bool((out == 2).all())

def oom(call, *arguments, **named):
    '''The text of the OutOfMemoryError that the call must end with.'''
    try:
        call(*arguments, **named)
    except RuntimeError as error:
        # Where a capture failed its end may fail too: then the first error stands behind.
        while error is not None and not isinstance(error, torch.OutOfMemoryError):
            error = error.__context__
        assert error is not None
        return str(error)
    raise AssertionError("enough memory")

def says_what_is_held(text, id):
    '''Both name what the process's graphs hold; ours by pool, and what of it is in use.'''
    if not OURS:
        assert "allocated in private pools (e.g., CUDA Graphs)" in text, text
        return
    stats = {tuple(pool["id"]): pool for pool in cgp.stats()["pools"]}
    held = sum(pool["reserved_bytes"] for pool in stats.values())
    live = sum(pool["allocated_bytes"] for pool in stats.values())
    own = stats[tuple(id)]
    amounts = lambda held, live: (
        f"{shown(held)} ({shown(live)} in live blocks, {shown(held - live)} free)"
    )
    assert f"graph pools of GPU 0 hold {amounts(held, live)}: pool " in text, (text, stats)
    named = (
        f"pool {tuple(id)} holds {amounts(own['reserved_bytes'], own['allocated_bytes'])} "
        f"for {own['users']} user(s)"
    )
    assert named in text, (named, text)
    assert "cudagraph_pool.report()" in text, text

def shown(size):
    '''As torch prints sizes.'''
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size <= 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.2f} {unit}"
        size /= 1024

def clean():
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()

def through_ours(call, *arguments, **named):
    '''Captures in our pools if ours is enabled, else in the base's.'''
    before = _torch.capture_counts()
    result = call(*arguments, **named)
    after = _torch.capture_counts()
    assert after["ours"] - before["ours"] == (1 if OURS else 0), (before, after)
    return result
"""

A_CAPTURE_GETS_THE_CACHE_OF_EAGER_WORK = """
limit(600)
cached = [new(150) for _ in range(3)]
del cached
assert torch.cuda.memory_reserved() >= 450 * MIB
graph = through_ours(capture, 400)
assert replays(graph)
assert torch.cuda.memory_reserved() < 600 * MIB
"""

# What torch.cuda.graph does before a capture nobody does before eager work in a pool: native before
# torch 2.14 does not empty its cache while any route is open, and fails (pytorch#159674).
EAGER_WORK_IN_A_POOL_GETS_THE_CACHE = """
limit(600)
cached = [new(150) for _ in range(3)]
del cached
if OURS:
    pool = cgp.GraphPool()
    with cgp.use_pool(pool):
        y = new(400)
    assert y.data_ptr() in {block["address"] for block in pool.snapshot()["blocks"]}
    y.fill_(7)
    assert int(y.min()) == int(y.max()) == 7
else:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        if torch.torch_version.TorchVersion(torch.__version__) < "2.14":
            text = oom(new, 400)
            assert "Tried to allocate 400.00 MiB" in text
            torch.cuda.empty_cache()
        y = new(400)
"""

EAGER_WORK_GETS_UNUSED_POOLS = """
limit(600)
graph, inside = through_ours(capture, 400, keep=True)
assert replays(graph)
text = oom(new, 300)  # the graph needs its memory
assert "Tried to allocate 300.00 MiB" in text
says_what_is_held(text, graph.pool())
assert replays(graph)
assert int(inside[-1]) == 3
del graph, inside
gc.collect()
assert torch.cuda.memory_reserved() >= 400 * MIB  # nobody has asked for it yet
y = new(500)
assert y.numel() == 500 * MIB
assert _torch.pool_ids(0) == []
# Nothing is held any more, so there is nothing to be said of it.
text = oom(new, 300)
assert "Tried to allocate 300.00 MiB" in text
assert "cudagraph_pool" not in text, text
"""

# 1 TiB, which no GPU has.
EACH_WAY_TO_RUN_OUT_EAGERLY = """
graph, inside = through_ours(capture, 100, keep=True)
ooms = torch.cuda.memory_stats()["num_ooms"]
ways = [
    lambda: torch.empty(1 << 40, dtype=torch.uint8, device="cuda"),
    lambda: torch.cuda.caching_allocator_alloc(1 << 40),
    lambda: inside.untyped_storage().resize_(1 << 40),
    lambda: torch.zeros(1 << 38, device="cuda"),
]
for way in ways:
    text = oom(way)
    assert "CUDA out of memory. Tried to allocate 1024.00 GiB" in text, text
    says_what_is_held(text, graph.pool())
assert torch.cuda.memory_stats()["num_ooms"] == ooms + len(ways)
assert replays(graph)
assert int(inside[-1]) == 3
"""

A_SHARED_POOL_GIVES_WAY_WITH_ITS_LAST_GRAPH = """
limit(600)
id = torch.cuda.graph_pool_handle()
first = through_ours(capture, 400, id)
second = through_ours(capture, 100, id)
first.reset()
oom(new, 300)
assert replays(second)
second.reset()
y = new(500).fill_(1)
assert int(y.min()) == int(y.max()) == 1  # a sum would make a copy eight times as large
del y
third = through_ours(capture, 500)
assert replays(third)
"""

# The base and our pools together have the allowance of the process.
THE_FRACTION_COUNTS_POOLS = """
limit(600)
fraction = torch.cuda.get_per_process_memory_fraction()
assert 0 < fraction < 1
graph, inside = through_ours(capture, 300, keep=True)
text = oom(new, 350)
assert "Tried to allocate 350.00 MiB" in text
y = new(200)
oom(new, 150)
text = oom(capture, 150)
assert "Tried to allocate 150.00 MiB" in text
second = through_ours(capture, 50)
assert all(replays(one) for one in (graph, second, graph))
assert int(inside[0]) == int(inside[-1]) == 3
del y, graph, second, inside
clean()
third = through_ours(capture, 550)
assert replays(third)
del third
clean()
torch.cuda.set_per_process_memory_fraction(1.0)
graph = through_ours(capture, 1200)
assert replays(graph)
"""

# The sums are right at every moment, whoever holds the memory.
THE_FRACTION_IN_BOTH_DIRECTIONS = """
limit(400)
for step in range(10):
    y = new(300)
    oom(capture, 200)
    assert replays(through_ours(capture, 60))
    clean()
    del y
    graph = through_ours(capture, 300)
    oom(new, 200)
    z = new(60)
    assert replays(graph)
    del graph, z
    clean()
assert torch.cuda.memory_reserved() < 50 * MIB
"""

WHAT_THE_ERROR_SAYS = """
limit(600)
if OURS:
    pool = cgp.GraphPool()
    id = pool.id
else:
    id = torch.cuda.graph_pool_handle()
graph, inside = capture(100, id, keep=True)
text = oom(capture, 3000, id)
assert "CUDA out of memory" in text
assert "Tried to allocate 2.93 GiB" in text or "Tried to allocate 3000.00 MiB" in text, text
assert re.search(r"GPU:? ?0", text), text
assert re.search(r"\\bfree\\b", text, re.IGNORECASE), text
if OURS:
    assert str(id) in text, text
    held = pool.stats()["reserved_bytes"] / MIB
    assert held >= 100
    # Its users: the GraphPool, the first graph and, as yet, the one that failed.
    own = re.search(
        rf"pool {re.escape(str(id))} holds ([0-9.]+) MiB \\(([0-9.]+) MiB in live blocks, "
        r"[0-9.]+ [a-zA-Z]+ free\\) for 3 user\\(s\\)", text)
    assert own, text
    assert abs(float(own.group(1)) - held) < 0.01, (held, text)
    assert 100 <= float(own.group(2)) <= held, text
    (free, total) = re.search(r"Free on the GPU: ([0-9.]+) GiB of ([0-9.]+) GiB", text).groups()
    has = [bytes / MIB / 1024 for bytes in torch.cuda.mem_get_info()]
    assert abs(float(free) - has[0]) <= 0.1, (text, has)
    assert abs(float(total) - has[1]) < 0.01, (text, has)
    assert text.index("Free on the GPU") < text.index("cudagraph_pool: graph pools of GPU 0 hold")
assert replays(graph)
"""

THE_HISTORY_SHOWS_IT = """
torch.cuda.memory._record_memory_history(context="all", stacks="python")
limit(300)
oom(capture, 500)
entries = torch.cuda.memory._snapshot()["device_traces"][0]
(told,) = [entry for entry in entries if entry["action"] == "oom"]
assert told["size"] == 500 * MIB, told
assert 0 < told["device_free"] <= torch.cuda.mem_get_info()[1], told
if OURS:
    assert abs(told["device_free"] - torch.cuda.mem_get_info()[0]) <= 64 * MIB, told
assert "capture" in {frame["name"] for frame in told["frames"]}, told
"""

# Of these one was attached when nobody but the base could hear of it: see OBSERVER_FIRST.
OBSERVERS = """
first = globals().get("first", [])
seen = []
torch._C._cuda_attach_out_of_memory_observer(lambda *told: seen.append(told))
reserved = torch.cuda.memory_reserved()
limit(300)
before = torch.cuda.memory_stats()["num_ooms"]
oom(new, 400)
assert len(seen) == 1
oom(capture, 500)
assert len(seen) == 2, seen
for told, mib in zip(seen, (400, 500)):
    device, asked, allowed, free = told
    assert (device, asked) == (0, mib * MIB), told
    # With a fraction set, native tells what it allows instead of what the device has; of what is in
    # our pools, up to 4 MiB here, it does not know.
    assert -MIB < reserved + 300 * MIB - allowed < (5 if OURS and mib == 500 else 1) * MIB, told
    assert 0 < free <= torch.cuda.mem_get_info()[1], told
assert torch.cuda.memory_stats()["num_ooms"] == before + 2
capture(100)
assert len(seen) == 2
assert first in ([], seen), first
"""

OBSERVER_FIRST = """
import torch
first = []
torch.cuda.init()
torch._C._cuda_attach_out_of_memory_observer(lambda *told: first.append(told))
"""
OBSERVED = """
assert len(first) == 2
"""

THE_NEXT_SMALLER_CAPTURE_WORKS_AND_NOTHING_LEAKS = """
limit(300)
pool = cgp.GraphPool() if OURS else None
id = pool.id if OURS else torch.cuda.graph_pool_handle()
anchor = capture(10, id)
def round():
    oom(capture, 500, id)
    graph = through_ours(capture, 200, id)
    assert replays(graph)
    oom(capture, 500)
    graph.reset()
    small = through_ours(capture, 50)
    assert replays(small)
    assert replays(anchor)
round()
clean()
kept = torch.cuda.memory_reserved(), torch.cuda.memory_allocated(), _torch.pool_ids(0)
free = torch.cuda.mem_get_info()[0]
for _ in range(30):
    round()
clean()
assert (torch.cuda.memory_reserved(), torch.cuda.memory_allocated(), _torch.pool_ids(0)) == kept
assert free - torch.cuda.mem_get_info()[0] < 64 * MIB
if OURS:
    assert pool.stats()["live_blocks"] == 0
    assert _torch.use_count(0, id) == 2  # the GraphPool and the anchor
    pool.close()
anchor.reset()
clean()
assert _torch.pool_ids(0) == []
assert torch.cuda.memory_reserved() < 50 * MIB
"""

# Eager work after a failed capture goes where eager work goes.
NO_ROUTE_IS_LEFT = """
limit(300)
pool = cgp.GraphPool() if OURS else None
id = pool.id if OURS else torch.cuda.graph_pool_handle()
oom(capture, 500, id)
y = new(20)
shown = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(id)]
assert not any(s["address"] <= y.data_ptr() < s["address"] + s["total_size"] for s in shown)
if OURS:
    assert y.data_ptr() not in {block["address"] for block in pool.snapshot()["blocks"]}
side_stream = torch.cuda.Stream()
with torch.cuda.stream(side_stream):
    z = new(20)
    z.fill_(5)
side_stream.synchronize()
assert int(z[-1]) == 5
"""

# Without a limit: the driver itself says no.
THE_DRIVERS_OWN_LIMIT = """
clean()
free = torch.cuda.mem_get_info()[0]
ballast = new(free // MIB - 1024)
text = oom(capture, 2048)
assert "Tried to allocate 2.00 GiB" in text or "Tried to allocate 2048.00 MiB" in text, text
text = oom(new, 2048)
assert "Tried to allocate" in text
graph = through_ours(capture, 256)
assert replays(graph)
del ballast
second = through_ours(capture, 2048)  # torch.cuda.graph empties the base's cache first
assert all(replays(one) for one in (graph, second, graph))
del graph, second
gc.collect()
y = new(torch.cuda.mem_get_info()[0] // MIB + 1024)  # more than is free: an unused pool's too
assert y.numel() > 0
"""

# A block that does not fit anywhere is asked for in the middle of others that stay.
OUT_OF_MEMORY_IN_THE_MIDDLE = """
limit(400)
pool = cgp.GraphPool() if OURS else None
id = pool.id if OURS else torch.cuda.graph_pool_handle()
graph = torch.cuda.CUDAGraph()
stream = torch.cuda.Stream()
kept = []
failures = 0
torch.cuda.synchronize()
with torch.cuda.stream(stream):
    graph.capture_begin(pool=id)
    for value in range(8):
        kept.append(new(20).fill_(value))
        try:
            new(500)
        except torch.OutOfMemoryError:
            failures += 1
    out.copy_(x + 1)
    graph.capture_end()
assert failures == 8
for _ in range(3):
    assert replays(graph)
    assert [int(t[0]) for t in kept] == [int(t[-1]) for t in kept] == list(range(8))
spans = sorted((t.data_ptr(), t.data_ptr() + t.numel()) for t in kept)
assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
if OURS:
    assert pool.stats()["live_blocks"] == 8
"""

OUT_OF_MEMORY_IN_USE_POOL = """
limit(400)
pool = cgp.GraphPool() if OURS else torch.cuda.MemPool()
use = cgp.use_pool if OURS else torch.cuda.use_mem_pool
with use(pool):
    kept = [new(50).fill_(value) for value in range(4)]
    text = oom(new, 500)
    assert "Tried to allocate 500.00 MiB" in text
    if OURS:
        assert str(pool.id) in text
    more = new(50).fill_(9)
outside = new(50)
oom(new, 500)
assert [int(t[-1]) for t in (*kept, more)] == [0, 1, 2, 3, 9]
del kept, more
if OURS:
    with use(pool):
        y = new(250)  # where the five were, stitched or in one
    assert pool.stats()["reserved_bytes"] <= 260 * MIB
"""

# Every allocation is tried again once what stands in its way has gone.
A_LOOP_THAT_HALVES_ITS_BATCH = """
limit(300)
mib, tried = 4096, []
while True:
    tried.append(mib)
    try:
        graph = capture(mib)
        break
    except RuntimeError:
        graph = None
        mib //= 2
assert tried == [4096, 2048, 1024, 512, 256]
assert replays(graph)
assert len(_torch.pool_ids(0)) == (1 if OURS else 0)
assert torch.cuda.memory_reserved() < 300 * MIB
"""

PROGRAMS = {
    "a_capture_gets_the_cache_of_eager_work": A_CAPTURE_GETS_THE_CACHE_OF_EAGER_WORK,
    "eager_work_in_a_pool_gets_the_cache": EAGER_WORK_IN_A_POOL_GETS_THE_CACHE,
    "eager_work_gets_unused_pools": EAGER_WORK_GETS_UNUSED_POOLS,
    "each_way_to_run_out_eagerly": EACH_WAY_TO_RUN_OUT_EAGERLY,
    "a_shared_pool_gives_way": A_SHARED_POOL_GIVES_WAY_WITH_ITS_LAST_GRAPH,
    "the_fraction_counts_pools": THE_FRACTION_COUNTS_POOLS,
    "the_fraction_in_both_directions": THE_FRACTION_IN_BOTH_DIRECTIONS,
    "what_the_error_says": WHAT_THE_ERROR_SAYS,
    "the_history_shows_it": THE_HISTORY_SHOWS_IT,
    "observers": OBSERVERS,
    "the_next_smaller_capture_works": THE_NEXT_SMALLER_CAPTURE_WORKS_AND_NOTHING_LEAKS,
    "no_route_is_left": NO_ROUTE_IS_LEFT,
    "the_drivers_own_limit": THE_DRIVERS_OWN_LIMIT,
    "out_of_memory_in_the_middle": OUT_OF_MEMORY_IN_THE_MIDDLE,
    "out_of_memory_in_use_pool": OUT_OF_MEMORY_IN_USE_POOL,
    "a_loop_that_halves_its_batch": A_LOOP_THAT_HALVES_ITS_BATCH,
}


# A fraction that was set before the package was enabled is the process's too.
FRACTION_FIRST = """
import torch
torch.cuda.set_per_process_memory_fraction((600 << 20) / torch.cuda.mem_get_info()[1])
"""
A_FRACTION_FROM_BEFORE_COUNTS_POOLS = """
fraction = torch.cuda.get_per_process_memory_fraction()
assert abs(fraction * torch.cuda.mem_get_info()[1] - 600 * MIB) < MIB
text = oom(capture, 700)
assert "Tried to allocate 700.00 MiB" in text
graph = through_ours(capture, 400)
oom(new, 300)
y = new(100)
assert replays(graph)
assert torch.cuda.get_per_process_memory_fraction() == fraction
"""


def test_an_observer_from_before_hears_of_pools(side: Side, run: Run) -> None:
    run(OBSERVER_FIRST + COMMON + OBSERVERS + OBSERVED, side)


def test_a_fraction_from_before_counts_pools(side: Side, run: Run) -> None:
    run(FRACTION_FIRST + COMMON + A_FRACTION_FROM_BEFORE_COUNTS_POOLS, side)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_out_of_memory(program: str, side: Side, run: Run) -> None:
    run(COMMON + program, side)
