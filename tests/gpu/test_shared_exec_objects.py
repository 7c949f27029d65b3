"""To its owner a graph that shares executables is as any other: reset, deleted, asked, captured."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest

import cudagraph_pool as cgp

from .shared import Trail, capture, capture_shared_chain
from .work import capture_chain, chain, fresh, torch

pytestmark = pytest.mark.usefixtures("enabled")

COUNTS = ("execs", "exec_instantiations", "exec_updates")


def counts(pool: cgp.GraphPool) -> tuple[int, ...]:
    stats = pool.stats()
    return tuple(stats[name] for name in COUNTS)


def has_executable_of_its_own(graph: torch.cuda.CUDAGraph) -> bool:
    """As stock graphs do, which keep no template."""
    try:
        graph.raw_cuda_graph()
    except RuntimeError:
        return True
    return False


def test_who_shares_is_said_where_it_is_captured_or_by_the_pool() -> None:
    x = fresh(16, seed=0)
    x.add_(1)

    def captured(pool: cgp.GraphPool, **how: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with cgp.graph(graph, pool=pool, **how):
            x.add_(1)
        return graph

    plain, sharing = cgp.GraphPool(), cgp.GraphPool(shared_exec=True)
    cases: list[tuple[cgp.GraphPool, dict[str, Any], bool]] = [
        (plain, {}, False),
        (plain, {"shared_exec": False}, False),
        (plain, {"shared_exec": None}, False),
        (plain, {"shared_exec": True}, True),
        (sharing, {}, True),
        (sharing, {"shared_exec": None}, True),
        (sharing, {"shared_exec": True}, True),
        (sharing, {"shared_exec": False}, False),
    ]
    graphs = []
    for pool, how, shares in cases:
        graph = captured(pool, **how)
        assert has_executable_of_its_own(graph) != shares
        before = x.clone()
        graph.replay()
        assert torch.equal(x, before + 1)
        graphs.append(graph)
    assert counts(plain) == (1, 1, 0)
    # torch.cuda.graph knows of no sharing.
    stock = torch.cuda.CUDAGraph()
    with torch.cuda.graph(stock, pool=sharing.id):
        x.add_(1)
    assert has_executable_of_its_own(stock)


def test_arguments() -> None:
    for limit in (0, -1):
        with pytest.raises(ValueError, match=f"max_execs is {limit}"):
            cgp.GraphPool(max_execs=limit)
    with pytest.raises(TypeError):
        cgp.GraphPool(None, True)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        cgp.graph(torch.cuda.CUDAGraph(), cgp.GraphPool(), None, "global", True)  # type: ignore[call-arg]


def test_counts_of_a_pool() -> None:
    pool = cgp.GraphPool(max_execs=1)
    assert counts(pool) == (0, 0, 0)
    capture_chain(16, pool.id)
    assert counts(pool) == (0, 0, 0), "stock graphs do not count"
    trail = Trail(pool, marks=2)
    assert counts(pool) == (1, 1, 0)
    trail.replay(0)
    trail.replay(1)
    trail.replay(0)
    assert counts(pool) == (1, 1, 2)
    trail.check()
    del trail
    gc.collect()
    assert counts(pool) == (0, 1, 2)


def attributes_of_a_reset_graph() -> set[str]:
    """What torch's own graph has: from torch 2.15 on a reset adds some."""
    stock, x = torch.cuda.CUDAGraph(), fresh(64, seed=0)
    with torch.cuda.graph(stock):
        x.add_(1)
    stock.reset()
    return set(vars(stock))


def test_it_stays_a_cuda_graph() -> None:
    pool = cgp.GraphPool()
    x, y = fresh(64, seed=0), fresh(64, seed=1)
    chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    identity = id(graph)
    captured = capture(lambda: y.copy_(chain(x)), pool, graph)
    assert captured is graph
    assert id(graph) == identity
    assert isinstance(graph, torch.cuda.CUDAGraph)
    assert isinstance(graph, torch._C._CUDAGraph)
    assert type(graph).__name__ == "CUDAGraph"
    assert graph.pool() == pool.id
    graph.note = "mine"
    graph.reset()
    assert type(graph) is torch.cuda.CUDAGraph
    assert graph.note == "mine"
    assert set(vars(graph)) - attributes_of_a_reset_graph() == {"note", "_keeps"}


@pytest.mark.filterwarnings("ignore:DEBUG")
def test_handles_and_dump(tmp_path: Path) -> None:
    pool = cgp.GraphPool(max_execs=1)
    trail = Trail(pool, marks=2)
    first, second = trail.graphs
    assert first.raw_cuda_graph() != second.raw_cuda_graph()
    one = first.raw_cuda_graph_exec()
    assert one != 0
    assert second.raw_cuda_graph_exec() == one, "they share it"
    trail.replay(0)
    path = tmp_path / "graph.dot"
    first.debug_dump(str(path))
    assert "digraph" in path.read_text()
    assert first.raw_cuda_graph() != 0, "the dump took the template away"
    trail.replay(1)
    trail.replay(0)
    trail.check()


def test_a_subclass_keeps_its_ways() -> None:
    class Counting(torch.cuda.CUDAGraph):  # type: ignore[misc]
        replays = 0

        def replay(self) -> None:
            self.replays += 1
            super().replay()

        def label(self) -> str:
            return f"{self.replays} replays"

    pool = cgp.GraphPool()
    x = fresh(8, seed=0)
    x.add_(1)
    graph = Counting()
    capture(lambda: x.add_(1), pool, graph)
    other = Counting()
    capture(lambda: x.add_(2), pool, other)
    assert type(other) is type(graph)
    before = x.clone()
    graph.replay()
    graph.replay()
    other.replay()
    assert torch.equal(x, before + 1 + 1 + 2)
    assert isinstance(graph, Counting)
    assert graph.label() == "2 replays"
    assert other.label() == "1 replays"
    graph.reset()
    assert type(graph) is Counting
    assert graph.label() == "2 replays"


def test_a_replay_that_fails_gives_its_executable_back() -> None:
    class Failing(torch.cuda.CUDAGraph):  # type: ignore[misc]
        def replay(self) -> None:
            raise KeyError("mine")

    pool = cgp.GraphPool(max_execs=1)
    x = fresh(8, seed=0)
    x.add_(1)
    failing = Failing()
    capture(lambda: x.add_(1), pool, failing)
    other = capture(lambda: x.add_(2), pool)
    with pytest.raises(KeyError, match="mine"):
        failing.replay()
    before = x.clone()
    other.replay()
    assert torch.equal(x, before + 2)
    assert pool.stats()["execs"] == 1  # one that is lent would have stayed beside it


def test_reset_and_capture_again() -> None:
    pool = cgp.GraphPool(max_execs=1)
    x, y = fresh(64, seed=0), fresh(64, seed=1)
    chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    for step in range(6):
        shared = step % 3 != 2
        with cgp.graph(graph, pool=pool, shared_exec=shared):
            y.copy_(chain(x * (step + 1)))
        assert has_executable_of_its_own(graph) != shared
        x.copy_(fresh(64, seed=step))
        graph.replay()
        assert torch.equal(y, chain(x * (step + 1)))
        graph.reset()
        assert pool.stats()["execs"] == 0
        graph.reset()  # as stock graphs, which do not mind
    with pytest.raises(RuntimeError):
        graph.replay()


def test_a_graph_is_not_captured_twice() -> None:
    pool = cgp.GraphPool()
    trail = Trail(pool, marks=2)
    for shared in (True, False):
        with (
            pytest.raises(RuntimeError, match="already owns a captured graph"),
            cgp.graph(trail.graphs[0], pool=pool, shared_exec=shared),
        ):
            pass
        trail.replay(0)
        trail.replay(1)
        trail.check()
    stock = torch.cuda.CUDAGraph()
    with cgp.graph(stock, pool=pool):
        trail._step(7)
    with (
        pytest.raises(RuntimeError, match="already owns a captured graph"),
        cgp.graph(stock, pool=pool, shared_exec=True),
    ):
        pass
    assert has_executable_of_its_own(stock)


def test_reset_and_deletion_leave_the_others_alone() -> None:
    pool = cgp.GraphPool(max_execs=1)
    trail = Trail(pool, marks=4, spin=100_000)
    for index in (0, 1, 2, 3):
        trail.replay(index)
    trail.graphs[3].reset()  # held, and still running
    trail.replay(1)
    trail.graphs[1] = torch.cuda.CUDAGraph()  # deletes what is held
    gc.collect()
    trail.replay(2)
    trail.replay(0)
    trail.check()
    assert pool.stats()["execs"] == 1
    del trail.graphs[0:]
    assert pool.stats()["execs"] == 0


def test_deleted_by_another_thread() -> None:
    pool = cgp.GraphPool(max_execs=1)
    trails = [Trail(pool, marks=2)]
    trails[0].replay(1)
    trails[0].check()
    graphs = trails.pop().graphs

    def delete() -> None:
        while graphs:
            graphs.pop().reset()

    thread = threading.Thread(target=delete)
    thread.start()
    thread.join()
    assert pool.stats()["execs"] == 0


def test_a_cycle_of_objects_is_collected() -> None:
    pool = cgp.GraphPool(max_execs=1)
    graph = Trail(pool, marks=1).graphs[0]
    graph.itself = graph
    del graph
    gc.collect()
    assert pool.stats()["execs"] == 0


def test_graphs_outlive_their_pool() -> None:
    pool = cgp.GraphPool(max_execs=1)
    graphs = {rows: capture_shared_chain(rows, pool) for rows in (16, 100, 700)}
    pool.close()
    with pytest.raises(RuntimeError, match="was released"):
        pool.stats()
    del pool
    gc.collect()
    torch.cuda.empty_cache()
    for seed, rows in enumerate((16, 700, 100, 16, 100)):
        x = fresh(rows, seed=seed)
        assert torch.equal(graphs[rows].replay(x), chain(x))
    graphs[16].graph.reset()
    x = fresh(700, seed=9)
    assert torch.equal(graphs[700].replay(x), chain(x))


def test_disabling_while_graphs_live() -> None:
    pool = cgp.GraphPool(max_execs=1)
    trail = Trail(pool, marks=3)
    cgp.disable()
    try:
        for index in (2, 0, 1, 1, 2):
            trail.replay(index)
        trail.check()
        trail.graphs.pop().reset()
    finally:
        cgp.enable()
    trail.replay(1)
    trail.check()


def test_a_template_that_was_kept_anyway() -> None:
    """Of a graph made with keep_graph=True."""
    pool = cgp.GraphPool(max_execs=1)
    x = fresh(8, seed=0)
    x.add_(1)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    capture(lambda: x.add_(3), pool, graph)
    before = x.clone()
    graph.replay()
    assert torch.equal(x, before + 3)
    graph.reset()
    with cgp.graph(graph, pool=pool):
        x.add_(4)
    assert not has_executable_of_its_own(graph), "it keeps its template, as it was made to"
    graph.instantiate()
    graph.replay()
    assert torch.equal(x, before + 3 + 4)


def test_a_capture_that_is_invalidated_leaves_the_graph_as_it_was() -> None:
    pool = cgp.GraphPool(max_execs=1)
    trail = Trail(pool, marks=2)
    x, y = fresh(64, seed=0), fresh(64, seed=1)
    chain(x)
    torch.cuda.synchronize()
    before = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError), cgp.graph(graph, pool=pool, shared_exec=True):  # noqa: PT012
        y.copy_(chain(x))
        torch.cuda.synchronize()  # what no capture survives
    assert torch.cuda.current_stream() == before
    assert type(graph) is torch.cuda.CUDAGraph
    assert set(vars(graph)) <= attributes_of_a_reset_graph()
    with cgp.graph(graph, pool=pool):
        y.copy_(chain(x))
    assert has_executable_of_its_own(graph)
    x.copy_(fresh(64, seed=2))
    graph.replay()
    assert torch.equal(y, chain(x))
    for index in (0, 1, 0):
        trail.replay(index)
    trail.check()
    assert counts(pool)[0] == 1


def test_an_exception_in_the_captured_code() -> None:
    pool = cgp.GraphPool()
    x = fresh(64, seed=0)
    x.add_(1)
    graph = torch.cuda.CUDAGraph()
    with (  # noqa: PT012
        pytest.raises(KeyError, match="mine"),
        cgp.graph(graph, pool=pool, shared_exec=True),
    ):
        x.add_(1)
        raise KeyError("mine")
    graph.reset()
    assert pool.stats()["execs"] == 0
    with cgp.graph(graph, pool=pool):
        x.add_(2)
    before = x.clone()
    graph.replay()
    assert torch.equal(x, before + 2)
    assert has_executable_of_its_own(graph)


@pytest.mark.whole_gpu
def test_templates_cost_no_device_memory() -> None:
    pool, stock = cgp.GraphPool(max_execs=1), cgp.GraphPool()
    x = torch.zeros(1, device="cuda")
    x.add_(1)

    def many_nodes(step: int) -> None:
        for _ in range(400):
            x.add_(step)

    def taken(target: cgp.GraphPool, shared: bool) -> tuple[int, list[torch.cuda.CUDAGraph]]:
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        graphs = []
        for step in range(32):
            graph = torch.cuda.CUDAGraph()
            with cgp.graph(graph, pool=target, shared_exec=shared):
                many_nodes(step)
            graphs.append(graph)
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
        return free - torch.cuda.mem_get_info()[0], graphs

    stock_bytes, kept = taken(stock, shared=False)
    shared_bytes, also_kept = taken(pool, shared=True)
    assert len(kept) == len(also_kept)
    assert counts(pool)[:2] == (1, 1)
    assert shared_bytes <= stock_bytes / 4 + (2 << 20)


def test_graphs_of_code_that_knows_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from cudagraph_pool import _shared_capture

    # Within the budget each would get an executable of its own.
    monkeypatch.setattr(_shared_capture, "_EXEC_BUDGET", 0)
    monkeypatch.setattr(_shared_capture, "_caches", {})
    device = torch.cuda.current_device()
    pool = torch.cuda.graph_pool_handle()
    cgp.enable(shared_exec=True)
    sharing = {rows: capture_chain(rows, pool) for rows in (1024, 700, 512, 333, 64, 3)}
    kept = torch.cuda.CUDAGraph(keep_graph=True)
    x = torch.zeros(8, device="cuda")
    with torch.cuda.graph(kept, pool=pool):
        x.add_(1)
    cgp.enable()
    alone = capture_chain(1024, pool)
    for seed, rows in enumerate([64, 1024, 3, 3, 700, 64, 512, 333, 1024]):
        fed = fresh(rows, seed)
        assert torch.equal(sharing[rows].replay(fed), chain(fed))
    assert torch.equal(alone.replay(fed), chain(fed))
    kept.replay()
    assert x.eq(1).all()
    stats = _shared_capture._caches[device].stats()
    assert 1 <= stats["execs"] < len(sharing)
    assert stats["exec_updates"] > 0
    assert [hasattr(graph, "_shared_graph") for graph in (sharing[3].graph, kept, alone.graph)] == [
        True,
        False,
        False,
    ]
