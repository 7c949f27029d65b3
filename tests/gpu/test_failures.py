"""What goes wrong says so clearly, changes nothing, and the next capture works."""

# What fails in a capture may fail once more where the capture ends.
# ruff: noqa: PT012

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import cudagraph_pool as cgp

from .work import adapter, capture_chain, chain, fresh, torch

pytestmark = pytest.mark.usefixtures("enabled")

Capture = Callable[[torch.cuda.CUDAGraph, cgp.GraphPool], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def torch_capture(graph: torch.cuda.CUDAGraph, pool: cgp.GraphPool) -> Iterator[None]:
    # torch.cuda.graph leaves its stream current when a capture fails.
    before = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool.id):
            yield
    finally:
        torch.cuda.set_stream(before)


def our_capture(
    graph: torch.cuda.CUDAGraph, pool: cgp.GraphPool
) -> contextlib.AbstractContextManager[None]:
    return cgp.graph(graph, pool=pool)


def assert_next_capture_works(pool: cgp.GraphPool) -> None:
    captured = capture_chain(777, pool.id)
    x = fresh(777, seed=42)
    assert torch.equal(captured.replay(x), chain(x))


@pytest.mark.parametrize("capture", [torch_capture, our_capture])
def test_invalidated_capture(capture: Capture) -> None:
    pool = cgp.GraphPool()
    x = fresh(512, seed=0)
    before = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError), capture(graph, pool):
        y = chain(x)
        torch.cuda.synchronize()  # what no capture survives
    del y
    assert torch.cuda.current_stream() == before
    del graph
    gc.collect()  # the traceback held it; since torch 2.14 it releases its pool when it goes
    assert_next_capture_works(pool)
    assert adapter.use_count(torch.cuda.current_device(), pool.id) == 1
    # Eager allocations find no route left.
    address = fresh(64, seed=1).data_ptr()
    assert address not in {block["address"] for block in pool.snapshot()["blocks"]}


def test_random_numbers_go_on_after_a_failed_capture() -> None:
    """torch.cuda.graph leaves the generator in the capture, and torch.randn raises ever after."""
    pool = cgp.GraphPool()
    torch.manual_seed(5)
    expected = [torch.randn(8, device="cuda") for _ in range(4)]
    drawn = torch.cuda.CUDAGraph()
    with cgp.graph(drawn, pool=pool):
        random = torch.randn(8, device="cuda")
    torch.manual_seed(5)
    assert torch.equal(torch.randn(8, device="cuda"), expected[0])
    with pytest.raises(RuntimeError), cgp.graph(torch.cuda.CUDAGraph(), pool=pool):
        torch.randn(8, device="cuda")
        torch.cuda.synchronize()
    assert torch.equal(torch.randn(8, device="cuda"), expected[1])
    default = torch.cuda.default_stream()
    with pytest.raises(RuntimeError, match="non-default stream"):
        cgp.graph(torch.cuda.CUDAGraph(), pool, default).__enter__()
    assert torch.equal(torch.randn(8, device="cuda"), expected[2])
    drawn.replay()
    assert torch.equal(random, expected[3])


def test_invalidated_capture_without_a_pool_leaves_nothing_behind() -> None:
    """Before torch 2.14 nobody says that it failed, but the next capture on its stream shows it."""
    x = fresh(512, seed=0)
    stream = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError), torch.cuda.graph(graph):
        y = chain(x)
        torch.cuda.synchronize()
    torch.cuda.set_stream(stream)
    del y, graph
    torch.cuda.empty_cache()
    assert torch.equal(chain(x), chain(x.clone()))  # eager work is served as ever
    cgp.disable()  # which a capture under way would refuse
    cgp.enable()
    following = capture_chain(333, None)
    x = fresh(333, seed=1)
    assert torch.equal(following.replay(x), chain(x))
    following.graph.reset()
    torch.cuda.empty_cache()
    assert adapter.pool_ids(torch.cuda.current_device()) == []


def test_a_capture_that_another_thread_ends_while_the_first_empties_the_cache() -> None:
    x = fresh(64, seed=0)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()

    def end(graph: torch.cuda.CUDAGraph) -> None:
        with torch.cuda.stream(stream):
            graph.capture_end()

    with ThreadPoolExecutor(1) as other:
        for _ in range(2000):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="relaxed")
                y = x + 1
            done = other.submit(end, graph)
            while not done.done():
                torch.cuda.empty_cache()
            done.result()
            del y
            graph.reset()
    torch.cuda.empty_cache()
    assert adapter.pool_ids(torch.cuda.current_device()) == []


def test_graph_memory_is_not_shared_with_processes() -> None:
    pool = cgp.GraphPool()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        inside = torch.zeros(1024, device="cuda")
    with pytest.raises(RuntimeError, match="cannot be shared with another process"):
        inside.untyped_storage()._share_cuda_()
