"""Pools that sleep, wake, lend, are trimmed and lease: replays are right, or refused before they
are launched.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

import cudagraph_pool as cgp

from .shared import capture_shared_chain
from .work import PAGE, Captured, adapter, capture_chain, chain, fresh, torch

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.usefixtures("enabled")

MIB = 1 << 20
SIZES = [64, 700, 1500, 3000]
SHARED_GPU = "PYTEST_XDIST_WORKER" in os.environ  # with other processes of tests


def capture(rows: int, pool: cgp.GraphPool) -> Captured:
    """As capture_chain, by a graph that is known."""
    captured = Captured(torch.cuda.CUDAGraph(), fresh(rows, seed=0), fresh(rows, seed=1))
    with cgp.graph(captured.graph, pool=pool):
        captured.y.copy_(chain(captured.x))
    return captured


def assert_right(captured: Captured, seed: int = 0) -> None:
    x = fresh(len(captured.x), seed=seed)
    assert torch.equal(captured.replay(x), chain(x))


def assert_refused(launch: Callable[[], object], output: Tensor, said: str = "asleep") -> None:
    output.fill_(7)
    with pytest.raises(RuntimeError, match=said):
        launch()
    torch.cuda.synchronize()
    assert (output == 7).all()


def new_bytes(mib: int, value: int = 1) -> Tensor:
    return torch.full((mib * MIB,), value, dtype=torch.uint8, device="cuda")


def with_scratch(pool: cgp.GraphPool, mib: int) -> Captured:
    """A graph whose pool has that much scratch, which its replay overwrites and reads back."""
    graph = torch.cuda.CUDAGraph()
    x, y = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
    with cgp.graph(graph, pool=pool):
        wide = x.expand(mib * MIB // 4).contiguous()
        y.copy_(wide.double().sum() / wide.numel())
        del wide
    return Captured(graph, x, y)


def assert_scratch_right(captured: Captured, value: float = 5) -> None:
    assert captured.replay(torch.full((1,), value, device="cuda")).item() == value


def is_borrowed(tensor: Tensor, pool: cgp.GraphPool) -> bool:
    return adapter.pool_of(0, tensor.data_ptr()) == (pool.id[0] ^ 1 << 63, pool.id[1])


def test_memory_comes_back_and_replays_are_equal() -> None:
    pool = cgp.GraphPool()
    graphs = [capture(n, pool) for n in SIZES] + [capture_chain(n, pool.id) for n in SIZES]
    for captured in graphs:
        assert_right(captured)
    held = pool.stats()["reserved_bytes"]
    order = random.Random(0)
    for round_ in range(10):
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        given = pool.sleep()
        assert given == held, "nothing lives in it"
        if not SHARED_GPU:
            assert torch.cuda.mem_get_info()[0] >= free + given
        stats = pool.stats()
        assert stats["asleep"]
        assert (stats["reserved_bytes"], stats["away_bytes"]) == (0, held)
        assert stats["last_sleep_bytes"] == given
        pool.wake()
        stats = pool.stats()
        assert not stats["asleep"]
        assert stats["reserved_bytes"] == held
        assert stats["last_wake_seconds"] < 1
        for captured in order.sample(graphs, len(graphs)):
            assert_right(captured, seed=round_)


def test_a_wake_makes_executables_again() -> None:
    pool = cgp.GraphPool(shared_exec=True)
    graphs = [capture(n, pool) for n in SIZES]
    for captured in graphs:
        assert_right(captured)
    execs = pool.stats()["execs"]
    for round_ in range(3):  # from the second time on they may stay
        with pool.asleep():
            asleep = pool.stats()["execs"]
        stats = pool.stats()
        assert asleep <= stats["execs"] == execs
        assert stats["last_wake_exec_seconds"] < 1
        made = stats["exec_instantiations"]
        for captured in graphs:
            assert_right(captured, seed=round_)
        assert pool.stats()["exec_instantiations"] - made <= len(graphs) - execs


Replay = tuple[Callable[[], object], "Tensor"]  # and the output


def of_a_graph(make: Callable[[cgp.GraphPool], Captured]) -> Callable[[cgp.GraphPool], Replay]:
    def of(pool: cgp.GraphPool) -> Replay:
        captured = make(pool)
        return lambda: captured.graph.replay(), captured.y

    return of


def of_a_runner(pool: cgp.GraphPool) -> Replay:
    y = torch.empty_like(fresh(700, seed=0))
    run = cgp.GraphRunner(lambda x: y.copy_(chain(x)), sizes=[700], pool=pool, progress=False)
    x = fresh(700, seed=0)
    return lambda: run(x), y  # what a call returns does not live


def of_graphed_callables(pool: cgp.GraphPool) -> Replay:
    linear = torch.nn.Linear(256, 256, device="cuda")
    x = fresh(64, seed=0).requires_grad_()
    graphed = torch.cuda.make_graphed_callables(linear, (x,), pool=pool.id)
    return lambda: graphed(x), graphed(x).detach()


@pytest.mark.parametrize(
    "make",
    [
        of_a_graph(lambda pool: capture_chain(700, pool.id)),
        of_a_graph(lambda pool: capture(700, pool)),
        of_a_graph(lambda pool: capture_shared_chain(700, pool)),
        of_a_runner,
        of_graphed_callables,
    ],
)
def test_a_replay_is_refused_before_the_launch(make: Any) -> None:
    pool = cgp.GraphPool()
    replay, y = make(pool)
    replay()
    torch.cuda.synchronize()
    expected = y.clone()
    for _ in range(2):
        with pool.asleep():
            assert_refused(replay, y)
        replay()
        torch.cuda.synchronize()
        assert torch.equal(y, expected)


@pytest.mark.parametrize("keep", ["offload", "nothing"])
def test_live_tensors_go_too_where_that_is_asked_for(keep: Any) -> None:
    pool = cgp.GraphPool()
    graph, x = torch.cuda.CUDAGraph(), fresh(3000, seed=0)
    with cgp.graph(graph, pool=pool):
        y, freed = chain(x), x * 3
    graph.replay()
    expected, address = y.clone(), y.data_ptr()
    pool.sleep()  # what lives stays
    assert torch.equal(y, expected)
    pool.sleep(keep)
    assert pool.stats()["reserved_bytes"] == 0
    assert pool.stats()["allocated_bytes"] > 0
    del freed
    with pytest.raises(RuntimeError, match=r"wake\(\)"):
        capture(64, pool)
    pool.sleep(keep)  # again: it has its copies
    pool.wake()
    assert y.data_ptr() == address
    assert keep == "nothing" or torch.equal(y, expected)
    graph.replay()
    assert torch.equal(y, expected)


def test_what_may_read_a_tensor_that_is_gone_is_refused() -> None:
    pool, other = cgp.GraphPool(), cgp.GraphPool()
    before = capture(64, other)
    graph, x = torch.cuda.CUDAGraph(), fresh(700, seed=0)
    with cgp.graph(graph, pool=pool):
        y = chain(x)
    after = capture(64, other)
    with pool.asleep("offload"):
        assert_right(before)
        assert_refused(after.graph.replay, after.y, r"wake\(\)")
    with pool.asleep():
        assert_right(after)
    graph.replay()
    assert torch.equal(y, chain(x))

    # It goes asleep, and the fixture finds nothing left.


@pytest.mark.filterwarnings("ignore")  # of inductor and triton
def test_graph_trees_sleep_between_calls() -> None:
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    def work(x: Tensor) -> Tensor:
        return chain(x).cumsum(1)

    compiled = torch.compile(work, mode="reduce-overhead", dynamic=False)
    expected = {rows: work(fresh(rows, seed=rows)) for rows in (128, 256)}
    for call in range(5):
        for rows, eager in expected.items():
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled(fresh(rows, seed=rows)).clone()
            torch.testing.assert_close(found, eager)
        cgp.sleep()
        if call:  # the second call is recorded, which wakes the pool
            cgp.wake()
    del compiled, found
    torch._dynamo.reset()
    reset_cudagraph_trees()
    gc.collect()


def test_a_training_step_borrows_with_its_backward_pass() -> None:
    pool = cgp.GraphPool()
    captured = with_scratch(pool, 256)
    x = torch.rand(4096, 1024, device="cuda")
    weight = torch.rand(1024, 1024, device="cuda", requires_grad=True)

    def step(seen: list[bool]) -> Tensor:
        hidden = x @ weight
        hidden.register_hook(lambda grad: seen.append(is_borrowed(grad, pool)))
        (hidden.relu() * 2).square().mean().backward()
        grad, weight.grad = weight.grad, None
        assert grad is not None
        return grad

    expected = step([])
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held, seen = torch.cuda.memory_reserved(), list[bool]()
    for _ in range(3):
        with pool.lend():
            grad = step(seen)
            assert is_borrowed(grad, pool)
            assert torch.equal(grad, expected)
            del grad
        assert_scratch_right(captured)
    assert seen == [True] * 3, "the backward pass ran in another thread"
    assert torch.cuda.max_memory_reserved() <= held + 4 * MIB
    assert not is_borrowed(new_bytes(2), pool)


def test_a_replay_is_refused_while_what_it_needs_is_borrowed() -> None:
    pool = cgp.GraphPool()
    captured = with_scratch(pool, 64)
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        with pool.lend():
            borrowed = new_bytes(16, 3)
        assert is_borrowed(borrowed, pool)
        assert pool.stats()["lent_bytes"] == 16 * MIB
        assert_refused(captured.graph.replay, captured.y, "16.00 MiB")
        with pytest.raises(RuntimeError) as raised:
            captured.graph.replay()
        assert any("test_leases.py" in note for note in raised.value.__notes__)
    finally:
        torch.cuda.memory._record_memory_history(None)
    assert int(borrowed.sum(dtype=torch.int64)) == 3 * 16 * MIB
    del borrowed
    assert_scratch_right(captured)


def test_a_replay_waits_for_those_who_borrowed() -> None:
    pool = cgp.GraphPool()
    captured = with_scratch(pool, 64)
    stream, side = torch.cuda.Stream(), torch.cuda.Stream()
    for value in range(1, 6):
        with pool.lend():
            late, recorded = new_bytes(24), new_bytes(16)
            assert is_borrowed(late, pool)
            assert is_borrowed(recorded, pool)
            side.wait_stream(torch.cuda.current_stream())
            torch.cuda._sleep(20_000_000)
            late.fill_(255)
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                recorded.fill_(255)
            recorded.record_stream(side)
            del late, recorded
        captured.x.fill_(value)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            captured.graph.replay()
        stream.synchronize()
        assert captured.y.item() == value


def test_a_loan_leaves_what_a_call_returned() -> None:
    pool = cgp.GraphPool()
    run = cgp.GraphRunner(chain, sizes=[3000], pool=pool, progress=False)
    x = fresh(3000, seed=0)
    y = run(x)
    expected, lendable = y.clone(), pool.stats()["lendable_bytes"]
    assert lendable > 0
    with pool.lend():
        borrowed = [new_bytes(2, 255) for _ in range(lendable // (2 * MIB))]
        assert all(is_borrowed(each, pool) for each in borrowed)
        del borrowed
    assert torch.equal(y, expected)
    assert torch.equal(run(x), expected)


def test_a_product_within_a_loan_leaves_nothing_borrowed() -> None:
    pool = cgp.GraphPool()
    captured = with_scratch(pool, 256)
    x = torch.rand(256, 256, device="cuda")
    stream = torch.cuda.Stream()  # where nothing was multiplied so far
    stream.wait_stream(torch.cuda.current_stream())
    with pool.lend(), torch.cuda.stream(stream):
        assert (x @ x).sum().item() > 0
    assert pool.stats()["lent_bytes"] == 0
    assert_scratch_right(captured)


def test_eager_work_that_runs_out_borrows() -> None:
    pool = cgp.GraphPool()
    captured = with_scratch(pool, 256)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    cgp.lend_on_oom()
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + MIB) / total)
        borrowed = new_bytes(128, 3)
        assert is_borrowed(borrowed, pool)
        assert_refused(captured.graph.replay, captured.y, "128.00 MiB")
        with pytest.raises(torch.OutOfMemoryError):
            new_bytes(2 * pool.stats()["reserved_bytes"] // MIB)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        cgp.lend_on_oom(False)
    assert int(borrowed.sum(dtype=torch.int64)) == 3 * 128 * MIB
    del borrowed
    assert_scratch_right(captured)


@pytest.mark.parametrize("goes", ["deleted", "reset"])
def test_the_pool_shrinks_to_what_the_graphs_left_need(goes: str) -> None:
    pool, alone = cgp.GraphPool(), cgp.GraphPool()
    small = [capture(rows, pool) for rows in range(50, 550, 50)]
    large = [capture(rows, pool) for rows in range(1000, 9000, 200)]
    assert pool.trim() == 0
    assert pool.stats()["unnamed_captures"] == 0
    if goes == "reset":
        for captured in large:
            captured.graph.reset()
    else:
        large.clear()
    assert pool.trim() > 0
    kept = [capture(len(captured.x), alone) for captured in small]
    assert pool.stats()["reserved_bytes"] <= 1.1 * alone.stats()["reserved_bytes"] + PAGE
    for captured in small + kept:
        assert_right(captured)
    del kept


def test_activations_leave_between_a_forward_and_a_backward_pass() -> None:
    pool = cgp.GraphPool()
    x = torch.rand(4096, 1024, device="cuda")
    weight = torch.rand(1024, device="cuda", requires_grad=True)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with cgp.graph(forward, pool=pool):
        hidden = x * weight
        activation = hidden.sigmoid()
        loss = activation.square().mean()
    with cgp.graph(backward, pool=pool):
        (grad,) = torch.autograd.grad(loss, weight)
    forward.replay()
    backward.replay()
    expected = grad.clone()
    for _ in range(3):
        grad.zero_()
        forward.replay()
        with pool.lease([activation]) as lease:
            copies = [activation.detach().to("cpu", copy=True)]
            assert lease.release() >= 12 * MIB
            assert pool.stats()["away_bytes"] >= 12 * MIB
            assert_refused(backward.replay, grad, "restore")
            lease.restore(copies)
            backward.replay()
            assert torch.equal(grad, expected)
    assert pool.stats()["away_bytes"] == 0
    with pytest.raises(RuntimeError, match="no live block"):
        pool.lease([x])
    del loss, grad, activation, hidden
