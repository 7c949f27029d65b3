"""What calls of a GraphRunner take and return, on graphs that the CPU records and replays."""

from __future__ import annotations

import functools
import math
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

import cudagraph_pool as cgp

pytest.importorskip("torch")

import torch
from cpu_captures import SIZES, CpuCaptures, CpuRunner, double, model, rows, runner, tree_equal
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cudagraph_pool.runner.captures import Graph


def test_sizes_are_captured_in_the_order_asked_for() -> None:
    for order, expected in (
        ("largest_first", [8, 4, 3]),
        ("smallest_first", [3, 4, 8]),
        ("given", [4, 8, 3]),
    ):
        seen: list[int] = []

        def noting(x: Tensor, seen: list[int] = seen) -> Tensor:
            seen.append(len(x))
            return x + 1

        runner(noting, sizes=[4, 8, 3], order=order, warmup=1).capture(rows(2))
        first = [n for i, n in enumerate(seen) if seen[:i].count(n) == 1]  # once is to warm up
        assert first == expected


def test_a_size_that_a_tensor_has_twice() -> None:
    run = runner(lambda x: x + x.T, sizes=[2, 6], dim=((0, 1),))
    x = torch.randn(5, 5)
    assert tree_equal(run(x), x + x.T)


@pytest.mark.parametrize("order", ["largest_first", "smallest_first"])
def test_padding_after_any_calls(order: Any) -> None:
    """What any other graph has read is written over."""
    chance = random.Random(3)
    dim: Any = {"x": (0, None), "y": (1, 0)}
    run = runner(
        lambda x, y: (x.sum(), y.sum()),
        sizes=cgp.sizes.grid(SIZES, SIZES),
        **{"dim": dim, "pad": {"x": 3, "y": 5}, "order": order},
    )
    for _ in range(60):
        a, b = chance.randint(1, 8), chance.randint(1, 8)
        x, y = run(torch.ones(a, 4), torch.ones(b, a))
        full_a, full_b = (next(size for size in SIZES if size >= n) for n in (a, b))
        assert x == 4 * a + 3 * 4 * (full_a - a)
        assert y == a * b + 5 * (full_a * full_b - a * b)


def test_padding_of_any_type_and_length() -> None:
    """Long padding is filled in. Short padding is copied, of types that torch copies together."""
    types = torch.float32, torch.int64, torch.int64, torch.float8_e4m3fn, torch.uint16, torch.bool
    run = runner(lambda *given: [x.double().sum() for x in given], pad=1, sizes=[8, 1 << 20])
    for n in (8, 3, 1 << 19, (1 << 20) - 1, 5):
        zeros = [torch.zeros(n).to(kind) for kind in types]
        assert run(*zeros) == [(8 if n <= 8 else 1 << 20) - n] * len(types)


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """Those of torch that are called within."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_call_is_one_copy_of_each_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding included: each operation takes the CPU some microseconds."""
    run = runner(lambda x, y, z: (x + y + z, y + z), sizes=[8])
    x, y, z = rows(3), torch.ones(3, 6, dtype=torch.int64), torch.ones(3, 6, dtype=torch.int64)
    run(x, y, z)
    monkeypatch.setattr(Graph, "replay", lambda graph: None)
    with Operations() as called:
        run(x, y, z)
    assert called.names == ["_foreach_copy_", "_foreach_copy_", "detach", "detach"]


def test_what_a_function_keeps_of_its_arguments() -> None:
    """By which tensor it is, as caches do: a capture must not find what a warm-up left there."""
    scaled = functools.lru_cache(maxsize=16)(lambda y: y * 10)
    run = runner(lambda x, y: x + scaled(y))
    for value in (1.0, 7.0):
        assert tree_equal(
            run(torch.zeros(3), torch.full((3,), value)), torch.full((3,), 10 * value)
        )


def test_a_result_that_is_an_argument_may_be_passed_on() -> None:
    run = runner(lambda x, y: (y + 1, x))
    x, y = torch.ones(3, 2), torch.zeros(3, 2)
    expected = x, y
    for _ in range(3):
        x, y = run(x, y)
        expected = expected[1] + 1, expected[0]
    assert tree_equal((x, y), expected)


def test_report() -> None:
    run = runner(model())
    run(rows(3))
    by_size = {row.size: row for row in run.report()}
    assert by_size[(4,)].replay_seconds is not None
    assert by_size[(8,)].replay_seconds is None
    for row in run.report():
        assert row.nodes > 0
        assert row.pool_bytes > 0
        assert row.peak_bytes > 0
        assert row.eager_seconds is not None
    table = str(run.report()).splitlines()
    assert table[1].split() == "size nodes peak pool driver capture eager replay".split()
    assert [line.split()[0] for line in table[3:]] == ["1", "2", "4", "8"]


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    CpuRunner(double, sizes=SIZES)(rows(3))
    shown = capsys.readouterr().err
    assert "capturing size 1" in shown
    assert "pool 0 MiB" in shown
    assert "4/4" in shown
    runner(double)(rows(3))
    assert capsys.readouterr().err == ""


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
    run(rows(3))
    other(rows(3))
    came: list[bool] = []

    def wait() -> None:
        thread = threading.Thread(target=other, args=(rows(3),), daemon=True)
        thread.start()
        thread.join(timeout=10)
        came.append(not thread.is_alive())

    monkeypatch.setattr(Parcel, "told", staticmethod(wait))
    run(rows(3))
    assert came == [True]


def test_larger_than_all_sizes() -> None:
    run = runner(double, overflow="eager")
    for n in (9, 3, 9):
        assert tree_equal(run(x := rows(n)), x * 2)
    with pytest.raises(ValueError, match=r"size 3 × 3, but the largest .* is 2 × 8 or 8 × 2"):
        runner(double, sizes=[(2, 8), (8, 2)], dim=(0, 1))(torch.randn(3, 3))


def test_arguments_that_are_not_as_captured() -> None:
    run = runner(lambda x, y: x + y)
    with pytest.raises(TypeError, match=r"y holds a Tensor of layout torch\.strided on meta"):
        run(rows(3), rows(3, device="meta"))
    run(rows(3), rows(3))
    for x, y, said in (
        (rows(3, dtype=torch.float64), rows(3), "x is torch.float64 of .* as torch.float32"),
        (rows(3, 7), rows(3, 7), r"of shape \(3, 7\) .* captured as .* of shape \(any, 6\)"),
        (rows(3)[None], rows(3), r"x is torch.float32 of shape \(1, 3, 6\)"),
        (rows(3, device="meta"), rows(3), "on meta, but was captured as .* on cpu: pass it so"),
        (rows(3), rows(2), "is {'x along dimension 0': 3, 'y along dimension 0': 2}: dim says"),
        (rows(0), rows(0), "must be one number above 0, but is {'x along dimension 0': 0"),
    ):
        with pytest.raises(ValueError, match=said):
            run(x, y)
    assert run(rows(2), rows(2)).shape == (2, 6)


def test_arguments_that_are_no_constants_are_named() -> None:
    class Batch:
        scale = torch.ones(1)

    run = runner(lambda x, *more: x)
    with pytest.raises(TypeError, match=r"more\[0\] holds a Batch; a GraphRunner takes"):
        run(rows(2), Batch())
    with pytest.raises(TypeError, match=r"more\[1\]\['b'\] holds a bytearray; a Gra"):
        run(rows(2), 1, {"b": bytearray(b"1")})
    run = runner(lambda x, s: x / s, sizes=[2])
    x = rows(2)
    for s in (0.0, -0.0, float("nan"), float("nan")):
        assert torch.equal(run(x, s).nan_to_num(), (x / s).nan_to_num())
    assert len(run.report()) == 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_are_not_plain_are_named() -> None:
    class Tagged(torch.Tensor):  # type: ignore[misc]
        pass

    parts = [rows(2), rows(3)]
    run = runner(lambda x, y: x * 2)
    run(rows(2), rows(2))
    for y, said in (
        (rows(2).to_sparse(), "Tensor of layout torch.sparse_coo"),
        (torch.nested.nested_tensor(parts, layout=torch.jagged), "nested NestedTensor"),
        (torch.nested.nested_tensor(parts), "nested Tensor"),
        (rows(2).as_subclass(Tagged), "Tagged"),
    ):
        with pytest.raises(TypeError, match=f"y holds a {said} .*; a GraphRunner takes and ret"):
            run(rows(2), y)
    assert tree_equal(run(x := nn.Parameter(rows(2)), x), x * 2)


def test_the_order_of_keywords() -> None:
    """Which only some functions see."""
    a, b = rows(3), rows(3)

    def work(*, a: Tensor, b: Tensor) -> Tensor:
        return a - b

    run = runner(work)
    assert tree_equal(run(a=a, b=b), a - b)
    assert tree_equal(run(b=b, a=a), a - b)
    assert len(run.report()) == len(SIZES)
    run = runner(lambda **tensors: torch.cat(list(tensors.values()), 1))
    assert tree_equal(run(b=b, a=a), torch.cat([b, a], 1))
    assert tree_equal(run(a=a, b=b), torch.cat([a, b], 1))


def test_a_call_without_tensors() -> None:
    with pytest.raises(ValueError, match="is that of no argument: dim says"):
        runner(double)(5)


def test_padding_that_an_argument_cannot_hold() -> None:
    for pad, dtype in (
        (0.5, torch.int64),
        (-1, torch.uint8),
        (2, torch.bool),
        (math.inf, torch.int8),
    ):
        with pytest.raises(ValueError, match=f"pad is {pad} for y, which torch.* would hold as "):
            runner(lambda x, y: x, pad=pad)(rows(3), torch.ones(3, dtype=dtype))
    runner(lambda x, y: x * y, pad=0.5, dim={"x": 0})(rows(3), torch.tensor(2))  # has no padding


def test_names_of_what_a_function_takes_more_of() -> None:
    def add(x: Tensor, *more: Tensor, **named: Tensor) -> Tensor:
        return more[0].sum() + 0 * x

    x = torch.ones(3)
    assert runner(add, pad={"more": 7})(x, x)[0] == 3 + 7
    assert runner(add, pad={"more": 5, "more[0]": 7})(x, x)[0] == 3 + 7, "the finer name counts"
    run = runner(add, dim={"x": 0, "more": 0})
    for n in (3, 2):
        assert run(torch.ones(n), torch.ones(n))[0] == n
    with pytest.raises(ValueError, match=r"pad names \[1, 'named'\]"):
        runner(add, pad={"named": 7, 1: 7})(x, x)
    linear = nn.Linear(6, 2)
    for net in (functools.partial(linear), torch.no_grad()(linear)):
        assert runner(net, dim={"input": 0})(rows(3)).shape == (3, 2)


class Scaled:
    def __init__(self, x: Tensor, scale: Any) -> None:
        self.x, self.scale = x, scale


pytree.register_pytree_node(
    Scaled, lambda node: ([node.x], node.scale), lambda held, scale: Scaled(next(iter(held)), scale)
)


def test_what_nodes_know_beside_their_tensors() -> None:
    """Of nodes that do not name what they hold, too."""
    run = runner(lambda node: node.x * (100 if node.scale is True else node.scale))
    for scale, result in ((1, 1), (True, 100), (1.0, 1), (2, 2)):
        assert run(Scaled(torch.ones(3, 2), scale))[0, 0] == result
    with pytest.raises(TypeError, match="an argument holds a Linear; a GraphRunner takes"):
        run(Scaled(torch.ones(3, 2), [nn.Linear(1, 1)]))
