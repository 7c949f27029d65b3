"""Graphs that share executables do what each would do with one of its own."""

from __future__ import annotations

import ctypes
import random
import time
from functools import partial
from typing import Any

import pytest

import cudagraph_pool as cgp
from cudagraph_pool._shared_exec import _MAX_EXECS

from .shared import Driver, Trail, capture, capture_shared_chain
from .work import WIDTH, capture_chain, chain, fresh, in_threads, torch

pytestmark = pytest.mark.usefixtures("enabled")

SIZES = [1, 3, 16, 17, 100, 333, 512, 700, 1024, 1500, 2048, 3000, 4096]
LIMITS: list[dict[str, Any]] = [{"max_execs": 1}, {"max_execs": 2}, {}, {"max_execs": None}]


@pytest.mark.parametrize("limit", LIMITS, ids=["1", "2", "default", "none"])
def test_bit_for_bit_what_separate_executables_do(limit: dict[str, Any]) -> None:
    pool, plain = cgp.GraphPool(**limit), cgp.GraphPool()
    shared = {rows: capture_shared_chain(rows, pool) for rows in SIZES}
    separate = {rows: capture_chain(rows, plain.id) for rows in SIZES}
    for seed, rows in enumerate(random.Random(3).choices(SIZES, k=200)):
        x = fresh(rows, seed=100 + seed)
        result = shared[rows].replay(x)
        assert torch.equal(result, separate[rows].replay(x))
        assert torch.equal(result, chain(x))
    stats = pool.stats()
    assert stats["exec_updates"] > 0
    assert stats["execs"] < len(SIZES)
    assert stats["exec_alone"] == {}
    assert stats["execs"] <= (limit.get("max_execs", _MAX_EXECS) or len(SIZES))


@pytest.mark.parametrize("limit", LIMITS, ids=["1", "2", "default", "none"])
def test_replays_that_are_queued_are_not_disturbed_by_switches(limit: dict[str, Any]) -> None:
    pool = cgp.GraphPool(**limit)
    trail = Trail(pool, marks=12, spin=200_000)
    choice = random.Random(5)
    for _ in range(400):  # far more than the device has done by then
        trail.replay(choice.randrange(12))
    trail.check()


def test_a_graph_does_not_wait_for_another_stream() -> None:
    pool = cgp.GraphPool(max_execs=1)
    slow = Trail(pool, marks=1, spin=2_000_000_000)
    fast = Trail(pool, marks=2, spin=1)
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    end = torch.cuda.Event()
    with torch.cuda.stream(a):
        slow.replay(0)
        end.record()
    with torch.cuda.stream(b):
        fast.replay(0)
        fast.replay(1)
    b.synchronize()
    assert not end.query(), "the second waited for the first, or the first did not run"
    slow.check()
    fast.check()


def test_prepared_ahead() -> None:
    pool = cgp.GraphPool(max_execs=2)
    trail = Trail(pool, marks=4)
    for index in (0, 3, 1, 2, 3, 0):
        trail.graphs[index].instantiate()
        before = pool.stats()
        trail.replay(index)
        assert pool.stats() == before, "the switch was made ahead"
    trail.check()


@pytest.mark.parametrize("registered", [False, True])
def test_random_numbers_go_on_as_with_stock_graphs(registered: bool) -> None:
    sizes = [64, 128, 1000, 4096]
    order = random.Random(8).choices(range(len(sizes)), k=40)
    inputs = [fresh(rows, seed=rows) for rows in sizes]

    def run(shared: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        pool = cgp.GraphPool(shared_exec=shared, max_execs=1)
        generator = torch.Generator(device="cuda") if registered else None
        used = generator or torch.cuda.default_generators[torch.cuda.current_device()]
        used.manual_seed(1)
        outputs = [torch.empty_like(x) for x in inputs]
        graphs = []
        for x, y in zip(inputs, outputs, strict=True):

            def work(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
                dropped = torch.nn.functional.dropout(x, 0.5)
                y.copy_(dropped + torch.rand(x.shape, device="cuda", generator=generator))

            work()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            if generator is not None:
                graph.register_generator_state(generator)
            with cgp.graph(graph, pool=pool):
                work()
            graphs.append(graph)
        torch.manual_seed(11)
        used.manual_seed(12)
        results = []
        for step, index in enumerate(order):
            if step % 7 == 3:
                torch.rand(5, device="cuda", generator=generator)  # eager work in between
            graphs[index].replay()
            results.append(outputs[index].clone())
        return results, used.get_state()

    ours, our_state = run(shared=True)
    theirs, their_state = run(shared=False)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(our_state, their_state)
    assert not torch.equal(ours[0], ours[order.index(order[0], 1)]), "they repeat themselves"


def test_copies_and_memsets() -> None:
    pool = cgp.GraphPool(max_execs=1)
    driver = Driver()
    graphs, sources, targets = [], [], []
    for rows in (3, 64, 700):
        source = torch.empty(rows, WIDTH).pin_memory()
        target = torch.empty(rows, WIDTH).pin_memory()
        first, second, filled = (torch.empty(rows, WIDTH, device="cuda") for _ in range(3))

        def work(
            parts: tuple[torch.Tensor, ...] = (source, first, second, filled, target),
        ) -> None:
            source, first, second, filled, target = parts
            first.copy_(source, non_blocking=True)
            second.copy_(first)
            driver.memset(filled, 0x3F800000 + len(filled))
            second.add_(filled)
            target.copy_(second, non_blocking=True)

        work()
        torch.cuda.synchronize()
        graphs.append(capture(work, pool))
        sources.append(source)
        targets.append(target)
    one = [
        torch.tensor(0x3F800000 + len(source), dtype=torch.int32).view(torch.float32)
        for source in sources
    ]
    choice = random.Random(9)
    for _ in range(40):
        index = choice.randrange(len(graphs))
        sources[index].uniform_()
        targets[index].zero_()
        graphs[index].replay()
        torch.cuda.synchronize()
        assert torch.equal(targets[index], sources[index] + one[index])
    assert pool.stats()["execs"] == 1


def test_external_events() -> None:
    try:
        events = [torch.cuda.Event(external=True) for _ in range(3)]
    except TypeError:
        pytest.skip("this torch has no external events")
    pool = cgp.GraphPool(max_execs=1)
    state = torch.zeros(1, dtype=torch.int64, device="cuda")
    torch.cuda._sleep(1)
    side = torch.cuda.Stream()
    graphs = []
    for index, event in enumerate(events):

        def work(mark: int = index + 1, event: torch.cuda.Event = event) -> None:
            torch.cuda._sleep(50_000_000)
            state.fill_(mark)
            event.record()

        graphs.append(capture(work, pool))
    assert pool.stats()["execs"] == 1
    for index in (0, 2, 1, 2, 0):
        graphs[index].replay()
        side.wait_event(events[index])
        with torch.cuda.stream(side):
            seen = state.clone()
        side.synchronize()
        assert seen.item() == index + 1, "another graph's event was recorded"
        torch.cuda.synchronize()


def test_host_callbacks() -> None:
    pool = cgp.GraphPool(max_execs=1)
    driver = Driver()
    seen: list[int | None] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(seen.append)
    state = torch.zeros(1, device="cuda")
    state.add_(1)

    def work(number: int) -> None:
        state.add_(1)
        driver.launch_host(function, number)
        state.mul_(2)

    graphs = [capture(partial(work, n), pool) for n in (10, 20, 30)]
    order = [0, 2, 2, 1, 0]
    for index in order:
        graphs[index].replay()
    torch.cuda.synchronize()
    assert seen == [(10, 20, 30)[index] for index in order]
    assert pool.stats()["execs"] == 1


def test_what_a_graph_keeps_lives_as_long_as_its_launches() -> None:
    """As NCCL lets the graphs that it is captured in keep the plans of its kernels."""
    pool = cgp.GraphPool(max_execs=1)
    driver = Driver()
    gone: list[int | None] = []
    destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(gone.append)
    trail = Trail(pool, marks=3, spin=300_000_000)
    for index in range(3):
        trail.replay(index)
        driver.retain(trail.graphs[index], destructor, index + 1)
    torch.cuda.synchronize()
    trail.replay(1)
    first_ended = torch.cuda.Event()
    first_ended.record()
    trail.replay(0)  # now what graph 1 keeps is kept by its template and its launch only
    trail.graphs[1].reset()
    trail.replay(2)
    trail.graphs[2].reset()
    time.sleep(0.01)
    seen = list(gone)
    assert not first_ended.query(), "not a test: the launch has ended"
    assert seen == [], "a launch that runs may need it"
    trail.check()
    trail.replay(0)
    trail.check()
    deadline = time.monotonic() + 10
    while set(gone) != {2, 3} and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(gone) == {2, 3}
    trail.graphs[0].reset()
    while len(gone) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(gone) == {1, 2, 3}


def test_what_cannot_be_shared_keeps_its_own() -> None:
    pool = cgp.GraphPool(max_execs=1)
    driver = Driver()
    trail = Trail(pool, marks=3)
    state = torch.zeros(1, device="cuda")
    state.add_(1).zero_()
    inner = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(inner):
        state.add_(1)

    def with_memory(number: int) -> None:
        driver.allocate_and_free()
        state.add_(number)

    def with_child(number: int) -> None:
        driver.add_child(inner)
        state.add_(number)

    alone = [capture(partial(with_memory, n), pool) for n in (10, 100)]
    alone += [capture(partial(with_child, n), pool) for n in (1000, 10000)]
    expected = 0
    for index in (0, 1, 2, 3, 1, 0, 3, 2):
        trail.replay(index % 3)
        alone[index].replay()
        expected += (10, 100, 1001, 10001)[index]
    torch.cuda.synchronize()
    assert state.item() == expected
    trail.check()
    stats = pool.stats()
    assert stats["execs"] == 1 + len(alone)
    (n,) = stats["exec_alone"].values()
    assert n == len(alone)
    assert stats["exec_instantiations"] == 1 + len(alone)
    alone.clear()
    assert pool.stats()["execs"] == 1
    assert pool.stats()["exec_alone"] == {}


@pytest.mark.whole_gpu
def test_driver_memory_does_not_grow_with_switches() -> None:
    pool = cgp.GraphPool(max_execs=2)
    trail = Trail(pool, marks=8)
    other = Trail(pool, marks=2, spin=100)  # another kind
    for index in range(8):
        trail.replay(index)
    other.replay(0)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    choice = random.Random(1)
    for _ in range(1000):
        trail.replay(choice.randrange(8))
    for step in range(200):
        other.replay(step % 2)
        trail.replay(choice.randrange(8))
    trail.check()
    other.check()
    assert free - torch.cuda.mem_get_info()[0] <= 2 << 20


def test_threads_replay_graphs_of_one_pool() -> None:
    pool = cgp.GraphPool(max_execs=2)
    trails = [Trail(pool, marks=4, spin=2_000) for _ in range(4)]

    def work(trail: Trail, seed: int) -> None:
        choice = random.Random(seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(300):
                trail.replay(choice.randrange(4))

    in_threads(*(partial(work, trail, seed) for seed, trail in enumerate(trails)))
    for trail in trails:
        trail.check()


def test_replays_while_another_thread_captures() -> None:
    """A switch is nothing that breaks a capture, not even one of the strictest mode."""
    pool, other = cgp.GraphPool(max_execs=1), cgp.GraphPool(shared_exec=True)
    trail = Trail(pool, marks=4)
    x, y = fresh(64, seed=0), fresh(64, seed=1)
    chain(x)
    torch.cuda.synchronize()

    def switch() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(40):
                trail.replay(step % 4)

    graph = torch.cuda.CUDAGraph()
    with cgp.graph(graph, pool=other, capture_error_mode="global"):
        y.copy_(chain(x))
        in_threads(switch)
    trail.check()
    x.copy_(fresh(64, seed=2))
    graph.replay()
    assert torch.equal(y, chain(x))
