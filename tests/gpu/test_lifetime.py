"""Enabling, disabling and giving back; and that the rest of torch works as before."""

from __future__ import annotations

import gc

import pytest

import cudagraph_pool as cgp

from .conftest import Run
from .work import adapter, capture_chain, chain, fresh, torch


def ids() -> list[tuple[int, int]]:
    return adapter.pool_ids(torch.cuda.current_device())


def test_switching_twice_and_as_a_block() -> None:
    assert not cgp.is_enabled()
    cgp.enable()
    cgp.enable()
    assert cgp.is_enabled()
    with cgp.enabled():
        assert cgp.is_enabled()
    assert cgp.is_enabled()
    cgp.disable()
    cgp.disable()
    assert not cgp.is_enabled()
    with cgp.enabled():
        assert cgp.is_enabled()
    assert not cgp.is_enabled()


def test_hot_swap_with_tensors_alive() -> None:
    before = [fresh(64, seed=seed) for seed in range(20)]
    expected = [t.clone() for t in before]
    cgp.enable()
    during = [t + 1 for t in before]
    del before[::2]
    cgp.disable()
    after = [t - 1 for t in during]
    del during
    for result, original in zip(after, expected, strict=True):
        assert torch.equal(result, (original + 1) - 1)
    del before, after
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def test_a_graph_captured_before_enabling_stays_with_the_base() -> None:
    captured = capture_chain(512, None)
    cgp.enable()
    second = capture_chain(700, captured.graph.pool())
    assert ids() == []
    for graph, rows in ((captured, 512), (second, 700)):
        x = fresh(rows, seed=rows)
        assert torch.equal(graph.replay(x), chain(x))
    del captured, second, graph
    gc.collect()
    torch.cuda.empty_cache()
    cgp.disable()


def test_disabling_while_graphs_live() -> None:
    cgp.enable()
    pool = cgp.GraphPool()
    captured = capture_chain(512, pool.id)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        inside = torch.full((1024,), 3.0, device="cuda")
    cgp.disable()
    base = capture_chain(512, None)
    assert ids() == [pool.id]
    x = fresh(512, seed=3)
    assert torch.equal(captured.replay(x), chain(x))
    assert torch.equal(base.replay(x), chain(x))
    graph.replay()
    assert inside.sum().item() == 3072.0
    left = [pool.id]
    pool.close()
    del captured, graph, base
    gc.collect()
    torch.cuda.empty_cache()
    assert ids() == left  # a tensor still lives in it
    assert inside.sum().item() == 3072.0
    del inside
    torch.cuda.empty_cache()
    assert ids() == []
    again = capture_chain(512, None)
    assert torch.equal(again.replay(x), chain(x))
    assert ids() == []


@pytest.mark.whole_gpu
@pytest.mark.usefixtures("enabled")
def test_memory_is_given_back() -> None:
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    pool = cgp.GraphPool()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        temporary = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
        del temporary
    taken = free - torch.cuda.mem_get_info()[0]
    assert taken >= 256 << 20
    torch.cuda.empty_cache()
    assert pool.stats()["reserved_bytes"] >= 256 << 20  # in use: not trimmed
    pool.close()
    torch.cuda.empty_cache()
    assert free - torch.cuda.mem_get_info()[0] >= 256 << 20  # its graph is alive
    del graph
    gc.collect()
    torch.cuda.empty_cache()
    assert free - torch.cuda.mem_get_info()[0] < 64 << 20


@pytest.mark.usefixtures("enabled")
def test_statistics_and_snapshot_count_the_pool() -> None:
    torch.cuda.empty_cache()
    pool = cgp.GraphPool()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        inside = torch.zeros(5 << 20, dtype=torch.uint8, device="cuda")
        temporary = torch.zeros(9 << 20, dtype=torch.uint8, device="cuda")
        del temporary
    stats = pool.stats()
    # A graph keeps a few bytes for its random numbers in the base; a snapshot is of all devices.
    here = [s for s in torch.cuda.memory_snapshot() if s["device"] == pool.device.index]
    others = [s for s in here if s["segment_pool_id"] != pool.id]
    reserved = sum(s["total_size"] for s in others)
    allocated = sum(s["allocated_size"] for s in others)
    assert torch.cuda.memory_reserved() == reserved + stats["reserved_bytes"]
    assert torch.cuda.memory_allocated() == allocated + stats["allocated_bytes"]
    assert torch.cuda.max_memory_allocated() >= 14 << 20
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()

    segments = [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == pool.id]
    assert sum(s["total_size"] for s in segments) == stats["reserved_bytes"]
    assert sum(s["allocated_size"] for s in segments) == stats["allocated_bytes"]
    for segment in segments:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    del inside


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("ours", [True, False])
def test_mem_pool_is_ours_or_stays_with_the_base(ours: bool) -> None:
    cgp.enable(mempools=ours)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.ones(1 << 20, device="cuda")
    assert ids() == ([tuple(pool.id)] if ours else [])
    assert pool.snapshot()
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        total = inside.sum()
    torch.cuda.current_stream().wait_stream(other)
    inside.record_stream(other)
    assert total.item() == 1 << 20
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(1024, device="cuda")
    with torch.cuda.graph(graph, pool=pool.id):
        y = x + 1
    assert ids() == ([tuple(pool.id)] if ours else [])
    graph.replay()
    assert y.sum().item() == 1024
    del inside, y, graph, total, pool


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("enabled")
def test_compile_reduce_overhead() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256)
    ).cuda()
    compiled = torch.compile(model, mode="reduce-overhead")
    for step in range(6):
        x = fresh(32, seed=step)
        with torch.no_grad():
            y = compiled(x).clone()
            torch.testing.assert_close(y, model(x))
    for step in range(6):
        x = fresh(32, seed=step)
        y = compiled(x)
        y.square().mean().backward()
        model.zero_grad()
    assert len(ids()) == 1
    del compiled, y
    torch.compiler.reset()


@pytest.mark.filterwarnings("default")
def test_compile_reduce_overhead_across_enabling() -> None:
    model = torch.nn.Linear(256, 256).cuda()
    compiled = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        first = compiled(fresh(32, seed=0))
        cgp.enable()
        for step in range(5):
            x = fresh(32, seed=step)
            torch.testing.assert_close(compiled(x), model(x))
        cgp.disable()
        torch.testing.assert_close(compiled(x), model(x))
    del first, compiled
    torch.compiler.reset()


@pytest.mark.usefixtures("enabled")
def test_torch_accelerator_agrees() -> None:
    pool = cgp.GraphPool()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        inside = torch.zeros(4 << 20, dtype=torch.uint8, device="cuda")
    assert torch.accelerator.memory_reserved() == torch.cuda.memory_reserved()
    assert torch.cuda.get_allocator_backend() == "native"
    del inside


CHANGE_CURRENT_ALLOCATOR = """
import torch, cudagraph_pool as cgp
from cudagraph_pool import _torch
torch.cuda.memory.change_current_allocator(cgp.allocator())
assert cgp.is_enabled()
x = torch.ones(1 << 20, device="cuda")
pool = cgp.GraphPool()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, pool=pool.id):
    y = x * 2
x.fill_(5)
graph.replay()
assert y.sum().item() == 10 << 20
assert pool.stats()["allocated_bytes"] == 4 << 20
assert torch.accelerator.memory_reserved() == torch.cuda.memory_reserved()
cgp.disable()
assert not cgp.is_enabled()
"""

PLUGGABLE = """
import warnings
warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
import torch, cudagraph_pool as cgp
from torch.cuda.memory import CUDAPluggableAllocator, change_current_allocator
change_current_allocator(
    CUDAPluggableAllocator(cgp.library_path(), "cudagraph_pool_malloc", "cudagraph_pool_free")
)
for step in range(20):
    x = torch.ones(3 << 20, device="cuda")
    y = [x + i for i in range(5)]
    del x
    assert sum(int(t[0]) for t in y) == 15
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        z = y[0] + 1
except RuntimeError as error:
    assert "use cudagraph_pool.pluggable_allocator()" in str(error), error
else:
    raise AssertionError("captured")
"""

EXIT_WITH_EVERYTHING_ALIVE = """
import torch, cudagraph_pool as cgp
cgp.enable()
pool = cgp.GraphPool()
graphs, outputs = [], []
for rows in range(1, 20):
    x = torch.ones(rows, 1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        outputs.append(x * 2)
    graphs.append(graph)
own = torch.cuda.CUDAGraph()
with torch.cuda.graph(own):
    outputs.append(x + 1)
for graph in graphs:
    graph.replay()
"""

IMPORT_ALONE = """
import sys, cudagraph_pool
assert "torch" not in sys.modules
assert not cudagraph_pool.is_enabled()
cudagraph_pool.disable()
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(CHANGE_CURRENT_ALLOCATOR, id="change_current_allocator"),
        pytest.param(PLUGGABLE, id="pluggable"),
        pytest.param(EXIT_WITH_EVERYTHING_ALIVE, id="exit_with_everything_alive"),
        pytest.param(IMPORT_ALONE, id="import_alone"),
    ],
)
def test_in_a_process_of_its_own(program: str, run: Run) -> None:
    run(program)
