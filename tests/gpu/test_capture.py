"""Captures of all kinds: right results, and memory that does not grow with the number of graphs."""

from __future__ import annotations

import gc
import random
import threading
from itertools import pairwise

import pytest

import cudagraph_pool as cgp

from .work import PAGE, WIDTH, adapter, capture_all, capture_chain, chain, fresh, torch

pytestmark = pytest.mark.usefixtures("enabled")

SIZES = [1, 3, 16, 17, 100, 333, 512, 700, 1024, 1500, 2048, 3000, 4096, 5000, 6000, 8192]


def in_order(order: str) -> list[int]:
    if order == "desc":
        return SIZES[::-1]
    return random.Random(7).sample(SIZES, len(SIZES)) if order == "shuffled" else SIZES


@pytest.mark.parametrize("order", ["asc", "desc", "shuffled"])
def test_sizes_in_any_order_cost_what_the_largest_needs(order: str) -> None:
    alone = cgp.GraphPool()
    largest = capture_chain(SIZES[-1], alone.id)
    needed = alone.stats()["peak_allocated_bytes"]
    del largest
    alone.close()

    pool = cgp.GraphPool()
    graphs = capture_all(in_order(order), pool.id)
    stats = pool.stats()
    assert stats["live_blocks"] == 0
    assert stats["reserved_bytes"] <= -(-needed // PAGE) * PAGE * 1.02 + PAGE

    for seed, rows in enumerate(random.Random(3).choices(SIZES, k=60)):
        x = fresh(rows, seed=100 + seed)
        assert torch.equal(graphs[rows].replay(x), chain(x))


def test_many_graphs_with_a_pool_each() -> None:
    """PyTorch's table of pools doubles with each of ours unless their names hash apart."""
    captured = [capture_chain(64, None) for _ in range(64)]
    for seed, one in enumerate(captured):
        x = fresh(64, seed=seed)
        assert torch.equal(one.replay(x), chain(x))


def test_outputs_that_live_on_are_not_overwritten() -> None:
    pool = cgp.GraphPool()
    x = fresh(512, seed=0)
    outputs = []
    graphs = []
    for step in range(8):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool.id):
            outputs.append(chain(x * (step + 1)))
        graphs.append(graph)
    for seed in range(3):
        x.copy_(fresh(512, seed=seed))
        # In the order of the captures: what one frees, a later one may keep its output in.
        for graph in graphs:
            graph.replay()
        for step, output in enumerate(outputs):
            assert torch.equal(output, chain(x * (step + 1)))
    spans = sorted((o.data_ptr(), o.data_ptr() + o.nbytes) for o in outputs)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_without_a_pool_each_graph_has_its_own() -> None:
    device = torch.cuda.current_device()
    first = capture_chain(512, None)
    second = capture_chain(1024, None)
    assert len(adapter.pool_ids(device)) == 2
    x = fresh(512, seed=5)
    assert torch.equal(first.replay(x), chain(x))
    del first
    gc.collect()
    torch.cuda.empty_cache()
    assert len(adapter.pool_ids(device)) == 1
    x = fresh(1024, seed=6)
    assert torch.equal(second.replay(x), chain(x))


def test_a_graph_lends_its_pool() -> None:
    first = capture_chain(2048, None)
    second = capture_chain(1024, first.graph.pool())
    assert len(adapter.pool_ids(torch.cuda.current_device())) == 1
    for graph, rows in ((first, 2048), (second, 1024)):
        x = fresh(rows, seed=rows)
        assert torch.equal(graph.replay(x), chain(x))


def test_graph_context_manager() -> None:
    pool = cgp.GraphPool()
    x, y = fresh(512, seed=0), fresh(512, seed=1)
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.current_stream()
    with cgp.graph(graph, pool=pool, stream=torch.cuda.Stream()):
        y.copy_(chain(x))
    assert torch.cuda.current_stream() == before
    x.copy_(fresh(512, seed=2))
    graph.replay()
    assert torch.equal(y, chain(x))
    assert pool.stats()["allocations"] > 0


def test_the_first_replay_draws_its_own_random_numbers() -> None:
    """However late a busy GPU comes to what PyTorch runs on the capture's stream beforehand."""

    class BeginsLate(torch.cuda.CUDAGraph):  # type: ignore[misc]
        def capture_begin(self, *args: object, **kwargs: object) -> None:
            torch.cuda._sleep(200_000_000)  # about a tenth of a second
            super().capture_begin(*args, **kwargs)

    pool = cgp.GraphPool()
    torch.rand(WIDTH, device="cuda")
    drawn = []
    for graph in (torch.cuda.CUDAGraph(), BeginsLate()):
        torch.cuda.manual_seed(1)
        with cgp.graph(graph, pool=pool):
            torch.cuda._sleep(400_000_000)
            numbers = torch.rand(WIDTH, device="cuda")
        if not isinstance(graph, BeginsLate):
            torch.cuda.synchronize()
        torch.cuda.manual_seed(2)
        graph.replay()
        drawn.append(numbers)
    assert torch.equal(*drawn)


def test_eager_memory_stays_with_the_base() -> None:
    pool = cgp.GraphPool()
    outside = fresh(1024, seed=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        inside = outside + 1
    addresses = {block["address"] for block in pool.snapshot()["blocks"]}
    assert inside.data_ptr() in addresses
    assert outside.data_ptr() not in addresses
    assert (outside * 2).data_ptr() not in addresses


def test_make_graphed_callables() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 512), torch.nn.GELU(), torch.nn.Linear(512, WIDTH)
    ).cuda()
    twin = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 512), torch.nn.GELU(), torch.nn.Linear(512, WIDTH)
    ).cuda()
    twin.load_state_dict(model.state_dict())
    pool = cgp.GraphPool()
    sample = fresh(64, seed=0).requires_grad_()
    graphed = torch.cuda.make_graphed_callables(model, (sample,), pool=pool.id)
    assert pool.stats()["allocations"] > 0
    for seed in range(3):
        x = fresh(64, seed=seed).requires_grad_()
        y = fresh(64, seed=seed).requires_grad_()
        graphed(x).square().sum().backward()
        twin(y).square().sum().backward()
        assert torch.equal(x.grad, y.grad)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        model.zero_grad(set_to_none=True)
        twin.zero_grad(set_to_none=True)


def test_backward_inside_a_capture() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1)
    ).cuda()
    x = fresh(128, seed=0)

    def step() -> None:
        model.zero_grad(set_to_none=False)
        model(x).square().mean().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    pool = cgp.GraphPool()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        step()
    for seed in (1, 2):
        x.copy_(fresh(128, seed=seed))
        graph.replay()
        replayed = [p.grad.clone() for p in model.parameters()]
        step()
        assert all(
            torch.equal(a, p.grad) for a, p in zip(replayed, model.parameters(), strict=True)
        )


def fork_and_join(x: torch.Tensor, side: torch.cuda.Stream, record: bool) -> torch.Tensor:
    """Two branches that allocate at once; a tensor of the main one is used on the side."""
    main = torch.cuda.current_stream()
    total = torch.zeros_like(x)
    for step in range(6):
        shared = x * (step + 1)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            beside = (shared + 1).sin()
            if record:
                shared.record_stream(side)
        kept = shared
        if record:
            del (
                shared,
                kept,
            )  # its memory may be taken on the main stream only when the side is done
            for _ in range(3):
                total = total + torch.full_like(x, 0.5).cos()
        main.wait_stream(side)
        total = total + beside
    return total


@pytest.mark.parametrize("record", [False, True])
def test_several_streams(record: bool) -> None:
    side = torch.cuda.Stream()
    pool = cgp.GraphPool()
    x, y = fresh(4096, seed=0), fresh(4096, seed=1)
    fork_and_join(x, side, record)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        y.copy_(fork_and_join(x, side, record))
    for seed in range(20):
        x.copy_(fresh(4096, seed=seed))
        graph.replay()
        assert torch.equal(y, fork_and_join(x, side, record))


def test_threads_capture_at_once() -> None:
    results: dict[int, bool] = {}
    together = threading.Barrier(3, timeout=60)
    chain(fresh(64, seed=0))
    torch.cuda.synchronize()
    pools = [cgp.GraphPool() for _ in range(3)]

    def work(index: int) -> None:
        stream = torch.cuda.Stream()
        x, y = fresh(700 + index, seed=index), fresh(700 + index, seed=index)
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            torch.cuda.synchronize()
            together.wait()  # from here on nothing may wait for the device: the others capture
            graph.capture_begin(pool=pools[index].id, capture_error_mode="thread_local")
            together.wait()
            for _ in range(5):
                y.copy_(chain(x))
            together.wait()
            graph.capture_end()
        together.wait()
        x.copy_(fresh(700 + index, seed=50 + index))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        results[index] = bool(torch.equal(y, chain(x)))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: True, 1: True, 2: True}
    assert all(pool.stats()["allocations"] > 0 for pool in pools)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"
)
def test_two_devices() -> None:
    pools = [cgp.GraphPool(0), cgp.GraphPool(1)]
    for index, pool in enumerate(pools):
        with torch.cuda.device(index):
            chain(fresh(1, seed=0))  # loads the kernels, which a capture may not
            torch.cuda.synchronize()
            x, y = fresh(512, seed=8), fresh(512, seed=9)
            graph = torch.cuda.CUDAGraph()
            with cgp.graph(graph, pool=pool):
                y.copy_(chain(x))
            x.copy_(fresh(512, seed=10))
            graph.replay()
            assert torch.equal(y, chain(x))
        assert pool.stats()["allocations"] > 0
    with pytest.raises(ValueError, match="the pool is on cuda:1"):
        cgp.graph(torch.cuda.CUDAGraph(), pool=pools[1])
    stream = torch.cuda.Stream(device=1)
    with pytest.raises(ValueError, match="the stream is on cuda:1"):
        cgp.graph(torch.cuda.CUDAGraph(), pool=pools[0], stream=stream)
