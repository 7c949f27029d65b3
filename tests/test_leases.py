"""What sleep, wake, lend, trim and leases do above the adapter, of which a fake is asked."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import cudagraph_pool as cgp
from cudagraph_pool import _guard, _leases, _shared_exec, pools

POOL = 0, (0, 1)


class Adapter:
    """Knows no memory, and notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.errors: dict[str, Exception] = {}
        self.ids = [POOL[1]]
        self.asleep = False
        self.names = iter([(1, 5), (0, 0), (2, 7)])
        self.blocks: list[dict[str, Any]] = []
        self.workspaces: list[tuple[int, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> Any:
            self.asked.append((name, *arguments))
            if error := self.errors.get(name):
                raise error
            answers = {"begin_lease": 9, "begin_loan": (8, 1), "borrowed": [(0x20, 512)]}
            return answers.get(name, (100, 2, 3))

        return ask

    def pool_ids(self, device: int) -> list[tuple[int, int]]:
        return self.ids

    def stats(self, device: int, id: tuple[int, int]) -> dict[str, Any]:
        return {"asleep": self.asleep}

    def name_capture(self, device: int, id: tuple[int, int]) -> tuple[int, int]:
        return next(self.names)

    def snapshot(self, device: int, id: tuple[int, int]) -> dict[str, Any]:
        return {"blocks": self.blocks, "gone": [7]}

    def blas_workspaces(self) -> list[tuple[int, int, int]]:
        return self.workspaces

    def pool_of(self, device: int, address: int) -> tuple[int, int]:
        return self.ids[0]

    def take(self) -> list[tuple[Any, ...]]:
        asked, self.asked = self.asked, []
        return asked


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self, pool: tuple[int, int] | None = POOL[1]) -> None:
        self._pool = pool
        self.launches = 0

    def pool(self) -> tuple[int, int]:
        if self._pool is None:
            raise RuntimeError("no capture")
        return self._pool

    def replay(self) -> None:
        self.launches += 1

    def reset(self) -> None: ...


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Adapter:
    fake = Adapter()
    native: Any = type("Graph", (Graph,), dict(vars(Graph)))
    graph = type("CUDAGraph", (native,), {"replay": lambda self: native.replay(self)})
    shared = type("Shared", (), {"replay": lambda self: None})
    monkeypatch.setattr(_leases, "load_adapter", lambda: fake)
    monkeypatch.setattr(pools, "loaded_adapter", lambda: fake)
    monkeypatch.setattr(torch._C, "_CUDAGraph", native)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
    monkeypatch.setattr(_shared_exec, "_SharesExec", shared)
    for name in ("_last", "_contents", "_execs_pay"):
        monkeypatch.setattr(_leases, name, {})
    for once in ("_replace_replays", "_watch_resets"):
        anew = functools.cache(getattr(_leases, once).__wrapped__)
        monkeypatch.setattr(_leases, once, anew)
    return fake


def is_guarded() -> bool:
    return hasattr(torch._C._CUDAGraph.replay, "__wrapped__")


def test_a_graph_that_goes_or_is_reset_drops_its_capture(adapter: Adapter) -> None:
    graph = torch.cuda.CUDAGraph()
    _leases.name_capture(adapter, graph, *POOL)
    assert graph._captured == (*POOL, 1, 5)
    _leases.name_capture(adapter, graph, *POOL)  # it has a name already
    assert graph._captured == (*POOL, 1, 5)
    graph.reset()
    assert adapter.take() == [("drop_capture", *POOL, 1)]
    assert not hasattr(graph, "_captured")
    graph.reset()
    _leases.name_capture(adapter, graph, *POOL)
    assert adapter.take() == []
    del graph
    gc.collect()
    assert adapter.take() == [("drop_capture", *POOL, 2)]


def test_from_2_14_on_all_captures_are_named(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks: list[Any] = []
    monkeypatch.setattr(
        torch.cuda.graphs, "register_graph_capture_end_hook", hooks.append, raising=False
    )
    _leases.name_all_captures.cache_clear()
    for _ in range(2):
        _leases.name_all_captures()
    _leases.name_all_captures.cache_clear()
    (hook,) = hooks
    graph = torch.cuda.CUDAGraph()
    hook(graph)
    assert graph._captured == (*POOL, 1, 5)


def test_a_replay_is_refused_before_the_launch(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, unknown, empty = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), Graph(None)
    _leases.name_capture(adapter, named, *POOL)
    named.replay()
    assert adapter.take() == [], "nobody asks before the first lease"
    stored = unknown.replay
    for _ in range(2):
        _leases.guard_replays()
    named.replay()
    stored()
    torch.cuda.CUDAGraph.replay(empty)  # for torch to refuse
    assert adapter.take() == [
        ("begin_replay", *POOL, 1, 5),
        ("begin_replay", None, POOL[1], 0, 0),
    ]
    frames = [
        {"filename": "alloc.cpp", "line": 1},
        {"filename": "train.py", "line": 7},
        {"filename": "main.py", "line": 9},
    ]
    segments = [{"blocks": [{"address": 0x20, "frames": frames}, {"address": 0x40}]}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    adapter.errors["begin_replay"] = RuntimeError("pool (0, 1) is asleep")
    with pytest.raises(RuntimeError, match="asleep") as raised:
        unknown.replay()
    assert raised.value.__notes__ == ["512 bytes at 0x20 are borrowed, made at train.py:7"]
    assert (named.launches, unknown.launches, empty.launches) == (2, 1, 1)
    assert hasattr(_shared_exec._SharesExec.replay, "__wrapped__")


def test_trees_that_are_imported_later_copy_nothing_into_what_is_lent(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Node:
        ran = 0

        def __init__(self) -> None:
            self.graph = torch.cuda.CUDAGraph()
            self.graph.replay()

        def run(self, new_inputs: list[Any]) -> None:
            self.ran += 1

    name = "torch._inductor.cudagraph_trees"
    monkeypatch.setitem(sys.modules, name, None)
    _leases.guard_replays()
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(CUDAGraphNode=Node))
    node = Node()
    node.run([])
    adapter.errors["begin_replay"] = RuntimeError("lent")
    with pytest.raises(RuntimeError, match="lent"):
        node.run([])
    assert node.ran == 1


def test_a_guard_that_is_open_puts_back_what_asks(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=1))
    graph = torch.cuda.CUDAGraph()
    vars(graph)["_workspaces"] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_guard, "_trace", lambda: None)
    with _guard.guard():
        _leases.guard_replays()
        graph.replay()
    graph.replay()
    assert [asked[0] for asked in adapter.take()] == ["begin_replay"] * 2
    assert graph.launches == 2


def test_all_pools_sleep_though_one_cannot(adapter: Adapter) -> None:
    adapter.ids = [(pools._LARGEST, pools._LARGEST), POOL[1], (0, 2)]
    assert cgp.sleep() == 200
    assert adapter.take() == [("sleep", 0, pool, True) for pool in adapter.ids[1:]]
    adapter.errors["sleep"] = RuntimeError("a capture is under way")
    with pytest.raises(RuntimeError, match="under way"):
        cgp.sleep()
    assert len(adapter.take()) == 2
    cgp.wake()
    assert adapter.take() == [("wake", 0, pool) for pool in adapter.ids[1:]]


def test_what_the_last_sleep_and_wake_did(adapter: Adapter) -> None:
    assert set(_leases.last(POOL).values()) == {0, None}
    _leases.sleep(POOL, "nothing", ())
    made: list[int] = []
    cache: Any = SimpleNamespace(make_dropped=made.append)
    _leases.wake(POOL, [cache])
    assert _leases.last(POOL)["last_sleep_bytes"] == 100
    assert _leases.last(POOL)["last_wake_seconds"] > 0
    assert (_leases.last(POOL)["last_wake_exec_seconds"] > 0, made) == (True, [POOL[0]])
    asked = [asked for asked in adapter.take() if asked[0] in ("sleep", "wake")]
    assert asked == [("sleep", *POOL, False), ("wake", *POOL)]
    with pytest.raises(ValueError, match="keep is 'all', but must be 'live'"):
        _leases.sleep(POOL, "all", ())  # type: ignore[arg-type]


def test_a_sleep_that_fails_forgets_its_copies(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: Any = iter([[], []])
    monkeypatch.setattr(_leases, "_copies", lambda adapter, key: next(taken))
    adapter.errors["sleep"] = RuntimeError("unmap failed")
    for asleep in (False, True, True):  # the third time it has its copies
        adapter.asleep = asleep
        with pytest.raises(RuntimeError, match="unmap"):
            _leases.sleep(POOL, "offload", ())
    assert list(_leases._contents) == [POOL]
    _leases._last[POOL] = {}
    adapter.ids = []  # the pool is gone
    with pytest.raises(RuntimeError, match="unmap"):
        _leases.sleep((0, (0, 2)), "live", ())
    assert (_leases._contents, _leases._last) == ({}, {})


@pytest.mark.parametrize("asleep", [False, True])
@pytest.mark.parametrize("keep", ["offload", "nothing"])
def test_with_a_workspace_nothing_is_copied_that_a_wake_would_bring_back(
    keep: Any, asleep: bool, adapter: Adapter
) -> None:
    adapter.asleep = asleep
    adapter.workspaces = [(0x20, 4096, 1)]
    with pytest.raises(RuntimeError, match="workspace of cuBLAS's, of 4,096 bytes"):
        _leases.sleep(POOL, keep, ())
    assert "sleep" not in {asked[0] for asked in adapter.take()}
    assert _leases._contents == {}
    _leases.sleep(POOL, "live", ())


def test_live_tensors_go_to_the_host_and_come_back(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, x = torch.empty, torch.arange(8, dtype=torch.uint8)
    with torch.device("meta"):
        torch.empty(0)  # torch notes for good which functions take a device: not the one below

    def pinned(*args: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(_leases, "_block", lambda device, address, size: x)
    adapter.blocks = [
        {"address": 0x20, "bytes": 8, "pieces": [(6, 0, 8)]},
        {"address": 0x40, "bytes": 9, "pieces": [(6, 8, 1), (7, 0, 8)]},  # of a lease, and away
    ]
    with torch.device("meta"):
        _leases.sleep(POOL, "offload", ())
    x.zero_()
    # What is away can have been registered by nobody.
    adapter.errors["release_lease"] = RuntimeError("a library that follows allocations")
    with monkeypatch.context() as context:
        context.setattr(_leases, "_block", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            _leases.wake(POOL, ())
    assert ("note_filled", *POOL) not in adapter.take(), "replays are still refused"
    _leases.wake(POOL, ())
    assert x.tolist() == [*range(8)]
    assert [asked[0] for asked in adapter.take()] == ["wake", "note_filled"]
    assert _leases._contents == {}


def test_a_sleep_ends_what_the_last_replay_left(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool: Any = object.__new__(cgp.GraphPool)
    attributes = {"_id": POOL[1], "_device": torch.device("cuda", 0), "_adapter": adapter}
    execs = SimpleNamespace(stats=lambda: {"execs": 0})
    vars(pool).update(attributes, _open=True, _execs=execs, _order=pools._ReplayOrder())
    adapter.errors["sleep"] = RuntimeError("a capture is under way")
    with pytest.raises(RuntimeError, match="under way"):
        pool.sleep()
    assert pool._order.number == 0, "it can go on"
    adapter.asleep = True
    with pytest.raises(RuntimeError, match="under way"):
        pool.sleep()
    assert (pool._order.number, pool._order.what) == (1, "a sleep")
    # What a GraphRunner holds of a pool that was closed lives on.
    pool._open = False
    monkeypatch.setitem(pools._pools, POOL, pool)
    adapter.ids = [POOL[1]]
    del adapter.errors["sleep"]
    assert cgp.sleep() == 100
    assert (pool._order.number, pool._order.what) == (2, "a sleep")


@pytest.mark.parametrize("pays", [True, False])
def test_executables_go_if_that_gives_memory_back(
    pays: bool, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[int] = []
    free = [1 << 30]

    def drop() -> None:
        dropped.append(1)
        free[0] += 4096 * pays

    full: Any = SimpleNamespace(stats=lambda: {"execs": 2}, drop_idle=drop)
    empty: Any = SimpleNamespace(stats=lambda: {"execs": 0})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 1 << 40))
    for _ in range(3):
        _leases.sleep(POOL, "live", [empty, full])
    assert len(dropped) == (3 if pays else 1)


def test_a_loan_ends_whatever_happens(adapter: Adapter) -> None:
    @contextmanager
    def launches() -> Iterator[None]:
        adapter.asked.append(("nothing is launched",))
        yield
        adapter.asked.append(("go on",))

    with pytest.raises(OSError, match="x"), _leases.lend(POOL, launches()):
        raise OSError("x")
    began = [("nothing is launched",), ("begin_loan", *POOL), ("go on",)]
    assert adapter.take() == [*began, ("end_loan", 0, (8, 1))]
    assert is_guarded()


def test_a_lease_of_tensors(adapter: Adapter) -> None:
    x, y = torch.zeros(4), torch.zeros(3)
    blocks = sorted({x.data_ptr(), y.data_ptr()})
    with _leases.Lease(POOL, [x, x[1:], y]) as lease:
        assert lease.release() == 100
        with pytest.raises(ValueError, match="has 1 tensors, but 3 were leased"):
            lease.restore([x])
        lease.restore([torch.ones(4), torch.ones(3) * 2, torch.ones(3)])
    assert x.tolist() == [1, 2, 2, 2]
    assert [asked[0] for asked in adapter.asked] == [
        *("begin_lease", "release_lease", "restore_lease", "end_lease")
    ]
    assert adapter.take()[0] == ("begin_lease", *POOL, blocks)
    del lease
    gc.collect()
    assert adapter.take() == []
    lease = _leases.Lease(POOL, [x])
    del lease
    gc.collect()
    assert adapter.take()[1:] == [("end_lease", *POOL, 9)]


def test_lending_on_oom_is_switched(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_require_enabled", lambda what: adapter)
    cgp.lend_on_oom(False)
    assert not is_guarded()
    cgp.lend_on_oom()
    assert is_guarded()
    assert adapter.take() == [("lend_on_oom", False), ("lend_on_oom", True)]
    with pytest.raises(TypeError, match="enabled is 1"):
        cgp.lend_on_oom(1)  # type: ignore[arg-type]
