"""Enabling and disabling at any time, in any process, and leaving nothing behind."""

from __future__ import annotations

from multiprocessing.connection import Connection

import pytest

import cudagraph_pool as cgp

from ..conftest import Run
from ..work import Captured, adapter, capture_chain, chain, fresh, torch
from .captures import assert_whose, buffers, capture
from .conftest import Side
from .programs import PRELUDE

# ---- when, and from where -----------------------------------------------------------------------

WITH_TENSORS_ALIVE = """
import threading

other = torch.cuda.Stream()
tensors = [torch.full((1 << 18,), float(i), device="cuda") for i in range(20)]
with torch.cuda.stream(other):
    on_other = [torch.full((1 << 18,), 100.0 + i, device="cuda") for i in range(20)]
pinned = torch.full((1 << 18,), 7.0).pin_memory()
graph_before, x, y = capture_and_check(False)
allocated = torch.cuda.memory_allocated()
enable()
assert torch.cuda.memory_allocated() == allocated
kept = [capture_and_check(side == "ours")]

# What the base made before is used, lent to another stream and freed on another thread now.
for i in range(20):
    tensors[i].record_stream(other)
torch.cuda.synchronize()
for i in range(20):
    assert tensors[i].sum().item() == i * (1 << 18)
    assert on_other[i].sum().item() == (100 + i) * (1 << 18)
held = torch.cuda.memory_allocated()
thread = threading.Thread(target=lambda: (tensors.clear(), on_other.clear()))
thread.start()
thread.join()
torch.cuda.synchronize()
torch.cuda.empty_cache()
assert torch.cuda.memory_allocated() <= held - 40 * (1 << 20)
assert pinned.cuda(non_blocking=True).sum().item() == 7 * (1 << 18)
kept.append(capture_and_check(side == "ours"))
check(graph_before, x, y)
"""


CHANGE_CURRENT_ALLOCATOR = """
if side == "ours":
    torch.cuda.memory.change_current_allocator(cgp.allocator())
    assert cgp.is_enabled()
    assert not torch.cuda.is_initialized()
kept = [capture_and_check(side == "ours")]
mem_pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(mem_pool):
    inside = torch.ones(1 << 20, device="cuda")
assert mem_pool.snapshot()
assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
assert torch.accelerator.memory_reserved() == torch.cuda.memory_reserved()
reserved = sum(segment["total_size"] for segment in torch.cuda.memory_snapshot())
assert reserved == torch.cuda.memory_reserved()
try:
    torch.cuda.memory.change_current_allocator(cgp.allocator())
except RuntimeError as error:
    assert "initialized" in str(error), error
else:
    raise AssertionError("changed a second time")
kept.append(capture_and_check(side == "ours"))
cgp.disable()
assert not cgp.is_enabled()
kept.append(capture_and_check(False))
for graph, x, y in kept:
    check(graph, x, y)
enable()
kept.append(capture_and_check(side == "ours"))
del inside, mem_pool
"""


# Eager memory is the base's, and so are its settings.
ALLOCATOR_SETTINGS = """
def allocated(size):
    before = torch.cuda.memory_allocated()
    tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
    return torch.cuda.memory_allocated() - before


enable()
kept = [capture_and_check(side == "ours")]
set_settings = torch._C._accelerator_setAllocatorSettings
# In two divisions, halves of the way from 1 to 2 MiB.
for divisions, size in ((1, 1200 << 10), (2, 1536 << 10), (1, 1200 << 10)):
    set_settings(f"roundup_power2_divisions:{divisions}")
    assert allocated(1200 << 10) == size, divisions
for on in (True, False):
    torch.cuda.empty_cache()
    set_settings(f"expandable_segments:{on}")
    held = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
    found = [
        segment["is_expandable"]
        for segment in torch.cuda.memory_snapshot()
        if 0 <= held.data_ptr() - segment["address"] < segment["total_size"]
    ]
    assert found == [on], (on, found)
    del held
    kept.append(capture_and_check(side == "ours"))
for graph, x, y in kept:
    check(graph, x, y)
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(WITH_TENSORS_ALIVE, id="with_tensors_alive"),
        pytest.param(CHANGE_CURRENT_ALLOCATOR, id="change_current_allocator"),
        pytest.param(ALLOCATOR_SETTINGS, id="allocator_settings"),
    ],
)
def test_in_a_process_of_its_own(program: str, side: Side, run: Run) -> None:
    run(PRELUDE + program, side)


# ---- off and on again ---------------------------------------------------------------------------


def pointwise(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2 + torch.cos(x)


@pytest.mark.filterwarnings("default")
def test_off_and_on_with_graphs_and_trees_alive(side: Side) -> None:
    device = torch.cuda.current_device()
    compiled = torch.compile(pointwise, mode="reduce-overhead", dynamic=False)

    def run_tree(rows: int) -> None:
        for step in range(4):  # compiles, warms up, records, replays
            x = fresh(rows, seed=step)
            torch.testing.assert_close(compiled(x).clone(), pointwise(x))

    try:
        run_tree(8)
        trees = set(adapter.pool_ids(device))
        assert bool(trees) == (side == "ours")
        graphs: dict[int, Captured] = {100: capture_chain(100, None)}
        for turn, enabled in enumerate([False, True, False, True], start=1):
            if side == "ours":
                (cgp.enable if enabled else cgp.disable)()
                assert cgp.is_enabled() == enabled
            run_tree(8)  # recorded before
            run_tree(8 + turn)  # recorded now, in the same pool
            rows = 100 + turn
            graphs[rows] = capture_chain(rows, None)
            taken = tuple(graphs[rows].graph.pool()) in adapter.pool_ids(device)
            assert taken == (side == "ours" and enabled)
            for rows, captured in graphs.items():
                x = fresh(rows, seed=turn)
                assert torch.equal(captured.replay(x), chain(x))
        assert trees <= set(adapter.pool_ids(device))
    finally:
        torch.compiler.reset()


# ---- other processes ----------------------------------------------------------------------------

FORK = """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of forking with threads about

# Before CUDA is initialized a child may do everything, and its end is no business of its parent's.
child = os.fork()
if child == 0:
    enable()
    kept = capture_and_check(side == "ours")
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert not torch.cuda.is_initialized()

# After it a child may drop what it inherited, and work on the CPU.
enable()
graph, x, y = capture_and_check(side == "ours")
inherited = {"in the pool": capture(x)[1], "eager": torch.ones(1 << 20, device="cuda")}
child = os.fork()
if child == 0:
    try:
        inherited.clear()
        assert torch.arange(10).sum().item() == 45
        for use in (lambda: torch.ones(1, device="cuda"), lambda: torch.cuda.synchronize()):
            try:
                use()
            except RuntimeError as error:
                assert "forked subprocess" in str(error), error
            else:
                raise AssertionError("CUDA worked in a forked child")
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert inherited["eager"].sum().item() == 1 << 20
check(graph, x, y)
kept = capture_and_check(side == "ours")
"""


def test_fork(side: Side, run: Run) -> None:
    run(PRELUDE + FORK, side)


def double_in_place(side: Side, parent: Connection) -> None:
    """What another process does with a tensor that it is sent."""
    if side == "ours":
        cgp.enable()
    tensor = parent.recv()
    tensor.mul_(2)
    parent.send(tensor.sum().item())
    del tensor
    torch.cuda.ipc_collect()


def test_eager_memory_is_shared_with_another_process(side: Side) -> None:
    """Memory of graphs is not: tests/gpu/test_failures.py."""
    context = torch.multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=double_in_place, args=(side, there), daemon=True)
    child.start()
    there.close()  # so that recv() ends if the child does
    graph, _ = capture(buffers)
    assert_whose(side)
    tensor = torch.arange(5000, device="cuda")[1000:]  # not where its block begins
    torch.cuda.synchronize()
    here.send(tensor)
    assert here.recv() == 2 * sum(range(1000, 5000))
    child.join(60)
    assert child.exitcode == 0
    assert tensor.tolist() == list(range(2000, 10000, 2))
    graph.replay()
    del tensor
    torch.cuda.ipc_collect()


# Each case is a child that leaves in its own way, forked before CUDA is initialized, so that torch
# is imported once. What it says goes to the stderr of all, which must be empty.
EXIT = """
import atexit, ctypes, itertools, os, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of forking with threads about

KINDS = ("pool", "graphs", "tensors")


def build():
    enable()
    pool = cgp.GraphPool() if side == "ours" else None
    x = torch.ones(1 << 18, device="cuda")
    (shared, y), (own, z) = capture(x, pool and pool.id), capture(x)
    shared.replay()
    own.replay()
    assert len(ours()) == (2 if side == "ours" else 0)
    return {"pool": [pool], "graphs": [shared, own], "tensors": [x, y, z]}


def drop(state, kinds):
    for kind in kinds:
        state[kind].clear()


def keep_for_good(state):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(state))


cases = {"keep for good": keep_for_good}
cases["in a cycle"] = lambda state: state.update(itself=state)
cases["disabled"] = lambda state: cgp.disable()
cases["disabled at exit"] = lambda state: atexit.register(cgp.disable)
for order in itertools.permutations(KINDS):
    cases[f"at exit {order}"] = lambda state, order=order: atexit.register(drop, state, order)

children = {}
for name, leave in cases.items():
    child = os.fork()
    if child == 0:
        state = build()
        leave(state)
        sys.exit(0)
    children[child] = name
codes = {children[child]: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
assert not any(codes.values()), codes
"""


def test_exit_with_anything_alive(side: Side, run: Run) -> None:
    run(PRELUDE + EXIT, side)
