"""What outlives its graph, its pool or its stream."""

from __future__ import annotations

import ctypes
import gc

import pytest

import cudagraph_pool as cgp

from .work import PAGE, torch

MIB = 1 << 20


@pytest.mark.usefixtures("enabled")
def test_eager_work_waits_for_the_replay_of_a_graph_that_was_deleted() -> None:
    size = 32 * MIB
    pool = cgp.GraphPool()
    graph = torch.cuda.CUDAGraph()
    torch.empty(16, device="cuda").fill_(7)
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    with cgp.graph(graph, pool):
        torch.cuda._sleep(500_000_000)
        scratch = torch.empty(size, dtype=torch.uint8, device="cuda")
        scratch.fill_(7)
        del scratch
    reserved = pool.stats()["reserved_bytes"]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        graph.replay()
    del graph  # CUDA allows it while it runs
    with cgp.use_pool(pool):
        y = torch.zeros(size, dtype=torch.uint8, device="cuda")
    assert not side.query(), "the host has waited, or the replay is too short to show anything"
    torch.cuda.synchronize()
    assert int((y != 0).sum()) == 0
    assert pool.stats()["reserved_bytes"] == reserved


@pytest.mark.parametrize("freed", ["within", "after"])
@pytest.mark.usefixtures("enabled")
def test_an_external_stream_may_go_before_its_block(freed: str) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_void_p()
    torch.zeros(1, device="cuda")
    assert driver.cuStreamCreate(ctypes.byref(handle), 1) == 0

    def destroy() -> None:
        torch.cuda.synchronize()
        assert driver.cuStreamDestroy_v2(handle) == 0

    pool = cgp.GraphPool()
    with cgp.use_pool(pool):
        with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
            block = torch.ones(1 << 20, device="cuda")
        if freed == "within":
            del block
            destroy()
    if freed == "after":
        destroy()
        del block
    with cgp.use_pool(pool):
        u = torch.full((1 << 20,), 2.0, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        v = u + 1
    graph.replay()
    assert v.sum().item() == 3 << 20
    assert pool.stats()["live_blocks"] == 2
    assert pool.stats()["reserved_bytes"] <= 8 * MIB + PAGE, "what the stream freed is used again"


@pytest.mark.usefixtures("enabled")
def test_a_block_that_outlives_its_pool_keeps_its_page_only() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    pool = cgp.GraphPool()
    with cgp.use_pool(pool):
        big = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
        small = torch.arange(1024, device="cuda")
    del big
    pool.close()
    del pool
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before <= 16 * PAGE
    assert small.sum().item() == 1023 * 512
    del small
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before
