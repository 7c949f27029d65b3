"""How a graph comes to share executables and ceases to, with an adapter that is made up."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

import cudagraph_pool as cgp
from cudagraph_pool import _shared_exec, switch


class Native:
    """Lays out its objects in a way of its own, as what is written in C++ does."""

    __slots__ = ("_native",)


class Graph(Native):
    """As far as it goes, a torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def capture_begin(self) -> None:
        self.log.append("capture_begin")

    def replay(self) -> None:
        self.log.append("replay")

    def instantiate(self) -> None:
        self.log.append("instantiate")

    def raw_cuda_graph_exec(self) -> int:
        self.log.append("raw_cuda_graph_exec")
        return 7

    def reset(self) -> None:
        self.log.append("reset")


class SharedGraph:
    """Tells the graph when it is lent an executable."""

    def __init__(self, cache: object, graph: Graph, device: int) -> None:
        if cache is None:
            raise RuntimeError("no executable could be made")
        self.graph = weakref.ref(graph)
        self.log = graph.log
        self.log.append(f"share on {device}")
        weakref.finalize(self, self.log.append, "removed")

    def run(self, function: Callable[[], Any]) -> Any:
        self.log.append("lend")
        result = function()
        self.log.append("back")
        return result

    def prepare(self) -> None:
        self.log.append("prepare")

    def withdraw(self) -> None:
        self.log.append("withdraw")


class Adapter:
    SharedGraph = SharedGraph

    def __init__(self) -> None:
        self.keeps: dict[int, bool] = {}

    def set_keeps_template(self, graph: Graph, keeps: bool) -> bool:
        before = self.keeps.get(id(graph), False)
        self.keeps[id(graph)] = keeps
        return before


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Adapter:
    made_up = Adapter()
    monkeypatch.setattr(_shared_exec, "load_adapter", lambda: made_up)
    return made_up


def shared(graph: Graph, cache: Any = "cache") -> Any:
    """The same graph, which now shares."""
    before = _shared_exec.keep_template(graph)
    _shared_exec.share(graph, cache, 3, before)
    return graph


def test_what_else_needs_an_executable(adapter: Adapter) -> None:
    graph = shared(Graph())
    graph.log.clear()
    graph.instantiate()
    assert graph.log == ["prepare"]
    graph.log.clear()
    assert graph.raw_cuda_graph_exec() == 7
    assert graph.log[:2] == ["lend", "raw_cuda_graph_exec"]


def test_its_class_makes_graphs_that_share_nothing(adapter: Adapter) -> None:
    graph = shared(Graph())
    another = type(graph)()
    assert type(another) is Graph
    another.replay()
    another.reset()
    assert another.log == ["replay", "reset"]


class OneShot(Graph):
    """Resets itself within a replay."""

    def replay(self) -> None:
        super().replay()
        self.reset()


def test_a_reset_within_a_replay_takes_nothing_with_it(adapter: Adapter) -> None:
    graph = shared(OneShot())
    graph.replay()
    assert graph.log == ["share on 3", "lend", "replay", "withdraw", "reset", "back", "removed"]


class Newer(Graph):
    """From torch 2.14 on it is Python that makes the executable at a capture's end."""

    def __init__(self) -> None:
        super().__init__()
        self._keep_graph = False


def test_newer_releases_know_in_python_what_is_kept(adapter: Adapter) -> None:
    graph = Newer()
    before = _shared_exec.keep_template(graph)
    assert graph._keep_graph
    cache: Any = "cache"
    _shared_exec.share(graph, cache, 0, before)
    graph.reset()
    assert not graph._keep_graph


def test_a_reset_makes_it_what_it_was(adapter: Adapter) -> None:
    graph = shared(Graph())
    assert isinstance(graph, Graph)
    assert type(graph) is not Graph
    graph.reset()
    assert type(graph) is Graph
    assert set(vars(graph)) == {"log"}
    assert not adapter.keeps[id(graph)]
    assert graph.log == ["share on 3", "withdraw", "removed", "reset"], "the template goes last"
    graph.replay()
    assert graph.log[-1] == "replay"
    shared(graph).replay()
    assert graph.log[-3:] == ["lend", "replay", "back"]


def test_a_graph_that_shares_is_not_captured_into(adapter: Adapter) -> None:
    graph = shared(Graph())
    with pytest.raises(RuntimeError, match="already owns a captured graph"):
        graph.capture_begin(pool=(0, 1), capture_error_mode="global")
    assert "capture_begin" not in graph.log


def test_where_sharing_fails_the_graph_is_as_before(adapter: Adapter) -> None:
    graph = Graph()
    with pytest.raises(RuntimeError, match="no executable could be made"):
        shared(graph, cache=None)
    assert type(graph) is Graph
    assert set(vars(graph)) == {"log"}
    assert graph.log == ["reset"]
    assert not adapter.keeps[id(graph)]


def test_subclasses_keep_their_ways(adapter: Adapter) -> None:
    class Counting(Graph):
        replays = 0

        def replay(self) -> None:
            self.replays += 1
            super().replay()

    first, second, plain = shared(Counting()), shared(Counting()), shared(Graph())
    assert type(first) is type(second)
    assert type(first) is not type(plain)
    assert type(first).__name__ == "Counting"
    assert type(first).__module__ == __name__
    first.replay()
    assert first.replays == 1
    assert first.log == ["share on 3", "lend", "replay", "back"]
    first.reset()
    assert type(first) is Counting


def test_arguments_of_a_pool() -> None:
    for limit in (0, -3):
        with pytest.raises(ValueError, match=f"max_execs is {limit}, but a graph needs"):
            cgp.GraphPool(max_execs=limit)
    for limits_and_budget in ((4, -1), (None, 1)):
        with pytest.raises(ValueError, match="a budget is a number of bytes for executables"):
            cgp.GraphPool(max_execs=limits_and_budget[0], exec_budget=limits_and_budget[1])
    wrong: Any
    for wrong in ({"max_execs": "x"}, {"exec_budget": None}, {"max_execs": 2.5}):
        with pytest.raises(TypeError, match="but must be an integer"):
            cgp.GraphPool(**wrong)
    refuses: Any
    for refuses in (cgp.GraphPool, cgp.enable):
        with pytest.raises(TypeError, match="shared_exec is 'auto', but must be True or False"):
            refuses(shared_exec="auto")
    assert not cgp.is_enabled()
    limits: list[int | None] = [1, None]
    for unless_enabled in limits:
        with pytest.raises(RuntimeError, match="GraphPool needs cudagraph_pool to be enabled"):
            cgp.GraphPool(shared_exec=True, max_execs=unless_enabled)


def test_arguments_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is asked of the pool, which has nothing here."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(switch, "is_enabled", lambda: True)
    monkeypatch.setattr(switch, "load_adapter", lambda: None)
    pool: Any = object.__new__(cgp.GraphPool)
    pool._open, pool._shared_exec = True, False
    graph = torch.cuda.CUDAGraph.__new__(torch.cuda.CUDAGraph)
    wrong: Any = {"shared_exec": 1}
    for arguments, options, said in (
        ([7, pool], {}, "cuda_graph is 7, but must be a torch.cuda.CUDAGraph"),
        ([graph, pool, 7], {}, "stream is 7, but must be a torch.cuda.Stream"),
        ([graph, pool], wrong, "shared_exec is 1, but must be True or False"),
        ([graph, (0, 1)], {}, "pool must be a cudagraph_pool.GraphPool, not tuple"),
    ):
        with pytest.raises(TypeError, match=said):
            cgp.graph(*arguments, **options)
    pool._open, pool._id, pool._device = False, (0, 7), torch.device("cuda", 0)
    for use in (
        lambda: cgp.graph(graph, pool),
        lambda: cgp.use_pool(pool).__enter__(),
        lambda: cgp.forecast(pool, [1]),
        lambda: cgp.GraphRunner(len, sizes=[1], pool=pool),
        *(pool.stats, pool.snapshot, lambda: pool.plot("pool.png"), lambda: pool.id),
    ):
        with pytest.raises(RuntimeError, match=r"id \(0, 7\) of cuda:0\) was released by close"):
            use()
    pool.close()
