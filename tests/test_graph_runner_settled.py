"""Calls that a GraphRunner has settled, which are replayed without Python: as all others are."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

import cudagraph_pool as cgp

pytest.importorskip("torch")

import torch
from cpu_captures import CpuCaptures, CpuRunner, model, rows, runner, tree_equal
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cudagraph_pool._program import _SAMPLES as SETTLED_AFTER


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of calls that were not settled."""
    found: list[Any] = []
    call = CpuRunner._call

    def noted(self: CpuRunner, args: Any, kwargs: Any) -> Any:
        found.append((args, kwargs))
        return call(self, args, kwargs)

    monkeypatch.setattr(CpuRunner, "_call", noted)
    return found


def settle(run: CpuRunner, *args: Any, **kwargs: Any) -> None:
    for _ in range(SETTLED_AFTER):
        run(*args, **kwargs)


def results(x: Tensor, y: Tensor) -> Any:
    return {"sum": x + y, "rest": (x * 2, None, 7), "argument": y}


@pytest.mark.parametrize("clone", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_they_return_what_others_do(asked: list[Any], clone: bool, grad: bool) -> None:
    run = runner(results, clone_outputs=clone)
    with torch.set_grad_enabled(grad):
        settle(run, rows(3), y=rows(3))
        asked.clear()
        earlier, expected = [], []
        for _ in range(3):
            x, y = rows(3), rows(3)
            earlier.append(run(x, y=y))
            expected.append(results(x, y))
            assert tree_equal(earlier[-1], expected[-1])
    assert not asked
    assert tree_equal(earlier, expected) == clone
    assert not earlier[0]["sum"].requires_grad
    assert earlier[0]["sum"] is not earlier[1]["sum"]


def test_they_are_one_shape_and_mode_each(asked: list[Any]) -> None:
    net = model()
    run = runner(net)
    with torch.no_grad():
        for n in (3, 4):
            settle(run, rows(n))
        asked.clear()
        for n in (4, 3, 4, 2):
            x = rows(n)
            torch.testing.assert_close(run(x), net(x))
        assert [len(args[0]) for args, _ in asked] == [2]
        with torch.autocast("cpu", torch.bfloat16):
            assert run(rows(3)).dtype == torch.bfloat16
        net.eval()
        run(rows(3))
        assert len(asked) == 3
        net.train()
        net[0].weight.data = torch.randn(12, 6)
        x = rows(3)
        torch.testing.assert_close(run(x), net(x))
        assert len(asked) == 4
    x = rows(3)
    run(x).sum().backward()
    assert len(asked) == 5
    other = runner(lambda x: x + 1)
    settle(other, rows(3))
    with pytest.raises(ValueError, match="x has dtype"):
        other(rows(3).double())


def test_training_is_never_settled(asked: list[Any]) -> None:
    run = runner(model())
    for _ in range(2 * SETTLED_AFTER):
        run(rows(3)).sum().backward()
    assert len(asked) == 2 * SETTLED_AFTER


def test_a_new_capture_unsettles_all(asked: list[Any]) -> None:
    """Within it the function may call its own runner, which is an error."""
    run: CpuRunner = runner(lambda x: run(x) if x.shape[0] == 8 else x + 1, lazy=True)
    settle(run, rows(3))
    with pytest.raises(RuntimeError, match="calls the GraphRunner that captures it"):
        run(rows(8))
    asked.clear()
    run(rows(3))
    run(rows(3))
    assert len(asked) == 1
    run.reset()
    run(rows(3))
    assert len(asked) == 2


def test_graphs_that_may_go_are_not_settled(asked: list[Any]) -> None:
    """Each call says which one was used last."""
    run = runner(lambda x: x + 1, lazy=True, max_graphs=2)
    for n in (1, 2, 1, 1, 1, 2, 1, 4):
        run(rows(n))
    assert run.sizes_captured == [(1,), (4,)]


def test_a_guard_sees_them() -> None:
    run = runner(lambda x: x + 1)
    with torch.no_grad():
        settle(run, rows(3))
        with cgp.guard():
            first = run(rows(3))
            run(rows(3))
            with pytest.raises(RuntimeError, match="has overwritten it"):
                first + 1


def test_what_autograd_has_saved_of_them_is_seen_to_be_overwritten() -> None:
    run = runner(lambda x: x + 1)
    weight = torch.ones(3, 6, requires_grad=True)
    settle(run, rows(3))
    loss = (run(rows(3)) * weight).sum()
    run(rows(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Failing(TorchDispatchMode):  # type: ignore[misc]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "copy" in func.name():
            raise MemoryError
        return func(*args, **(kwargs or {}))


def test_one_that_fails_is_the_last_of_its_pool() -> None:
    run = runner(lambda x: x + 1)
    settle(run, rows(3))
    with pytest.raises(MemoryError), Failing():
        run(rows(3))
    row = run.captures.turns.row
    assert row.what == "a call that failed"
    assert row.wrote == (row.number - 1, "of size 3 in the graph of 4")


class Factory(nn.Module):  # type: ignore[misc]
    """Returns what refers to it, and has a runner of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.run = runner(self.by_name)

    def by_name(self, x: Tensor) -> dict[str, Tensor]:
        return defaultdict(self.missing, x=x + 1)

    def missing(self) -> Tensor:
        raise KeyError


class Marked(Tensor):  # type: ignore[misc]
    """Refers to what made it."""

    maker: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, cls):
            result.maker = args[0].maker
        return result


class Maker(nn.Module):  # type: ignore[misc]
    """Returns tensors that refer to it, and has a runner of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.run = runner(self.marked)

    def marked(self, x: Tensor) -> Tensor:
        result = (x + 1).as_subclass(Marked)
        result.maker = self
        return result


@pytest.mark.parametrize("kind", [Factory, Maker])
def test_the_garbage_collector_sees_through_them(kind: Callable[[], Any]) -> None:
    net = kind()
    settle(net.run, rows(3))
    runs = weakref.ref(net.run)
    del net
    gc.collect()
    assert runs() is None


class Parcel:
    """What a function returns, and calls somebody when a result is made of it."""

    told: Callable[[], Any] = staticmethod(lambda: None)

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.told()


pytree.register_pytree_node(Parcel, lambda parcel: ([parcel.x], None), lambda x, _: Parcel(*x))


def test_a_result_is_made_when_others_may_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    pool: Any = CpuCaptures()
    run = runner(lambda x: Parcel(x + 1), pool=pool)
    other = runner(lambda x: x * 2, pool=pool)
    settle(run, rows(3))
    settle(other, rows(3))
    came: list[bool] = []

    def wait() -> None:
        thread = threading.Thread(target=other, args=(rows(3),), daemon=True)
        thread.start()
        thread.join(timeout=10)
        came.append(not thread.is_alive())

    monkeypatch.setattr(Parcel, "told", staticmethod(wait))
    run(rows(3))
    assert came == [True]


def test_what_is_of_the_past_once_a_result_is_made_is_not_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = nn.Linear(6, 6)
    run = runner(lambda x: Parcel(net(x)))

    def move() -> None:
        monkeypatch.setattr(Parcel, "told", staticmethod(lambda: None))
        net.weight.data = torch.randn(6, 6)
        run(rows(3))

    with torch.no_grad():
        for _ in range(SETTLED_AFTER - 1):
            run(rows(3))
        monkeypatch.setattr(Parcel, "told", staticmethod(move))
        run(rows(3))
        x = rows(3)
        torch.testing.assert_close(run(x).x, net(x))
