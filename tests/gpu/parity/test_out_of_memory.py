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

EAGER_WORK_GETS_UNUSED_POOLS = """
limit(600)
graph, inside = through_ours(capture, 400, keep=True)
assert replays(graph)
text = oom(new, 300)  # the graph needs its memory
assert "Tried to allocate 300.00 MiB" in text
if OURS:
    assert f"pool {tuple(graph.pool())} holds " in text and "cudagraph_pool.report()" in text, text
else:
    assert "allocated in private pools (e.g., CUDA Graphs)" in text, text
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


PROGRAMS = {
    "eager_work_gets_unused_pools": EAGER_WORK_GETS_UNUSED_POOLS,
    "what_the_error_says": WHAT_THE_ERROR_SAYS,
    "the_next_smaller_capture_works": THE_NEXT_SMALLER_CAPTURE_WORKS_AND_NOTHING_LEAKS,
    "the_drivers_own_limit": THE_DRIVERS_OWN_LIMIT,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_out_of_memory(program: str, side: Side, run: Run) -> None:
    run(COMMON + program, side)
