"""What calls of a GraphRunner return, on graphs that a CPU records and replays (cpu_captures)."""

from __future__ import annotations

import functools
import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import cudagraph_pool as cgp

pytest.importorskip("torch")

import torch
from cpu_captures import (
    SIZES,
    CpuCaptures,
    CpuRunner,
    double,
    model,
    rows,
    runner,
    tree_equal,
)
from torch import Tensor
from torch.utils import _pytree as pytree


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


def test_nested_arguments_and_results() -> None:
    class Pair(NamedTuple):
        low: Any
        high: Any

    def work(batch: dict[str, Any], scale: float, *, shift: Tensor, mode: str = "add") -> Any:
        a, (b, flag) = batch["a"], batch["more"]
        moved = (a + shift if mode == "add" else a - shift) * scale
        return {"moved": moved, "pair": Pair(b.sum(1), [moved.max(1).values, flag])}, None

    run = runner(work)
    for mode in ("add", "subtract"):
        for n in (1, 3, 8):
            batch = {"a": rows(n), "more": (rows(n, 4), True)}
            for scale in (2, 0.5):
                arguments = {"shift": rows(n, 1), "mode": mode}
                found = run(batch, scale, **arguments)
                assert tree_equal(found, work(batch, scale, **arguments))
                assert isinstance(found[0]["pair"], Pair)
    # Each mode and each scale is a program of its own.
    assert len(run.report()) == 4 * len(SIZES)


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


def test_what_a_function_keeps_of_its_arguments() -> None:
    """By which tensor it is, as caches do: a capture must not find what a warm-up left there."""
    scaled = functools.lru_cache(maxsize=16)(lambda y: y * 10)
    run = runner(lambda x, y: x + scaled(y))
    for value in (1.0, 7.0):
        assert tree_equal(
            run(torch.zeros(3), torch.full((3,), value)), torch.full((3,), 10 * value)
        )


def test_memory_formats_are_those_of_the_first_call() -> None:
    strides = []

    def work(x: Tensor) -> Tensor:
        strides.append(x.is_contiguous(memory_format=torch.channels_last))
        return x * 2

    run = runner(work)
    x = torch.randn(3, 4, 5, 6)
    for call in (x.to(memory_format=torch.channels_last), x, x.transpose(2, 3).mT):
        assert tree_equal(run(call), x * 2)
    assert all(strides)


def test_what_is_returned_lasts_until_the_next_call() -> None:
    run = runner(double)
    first = run(rows(8))
    kept = first.clone()
    run(rows(3))
    assert not tree_equal(first, kept), "as cpu_captures.py makes visible"
    copies = runner(double, clone_outputs=True)
    first = copies(rows(8))
    kept = first.clone()
    copies(rows(3))
    copies(rows(8))
    assert tree_equal(first, kept)


def test_what_is_returned_outlives_the_runner() -> None:
    run = runner(double)
    x = rows(4)
    y = run(x)[1:]
    tape = weakref.ref(run.captures.tapes[1])
    del run
    gc.collect()
    assert tape() is not None
    assert tree_equal(y, x[1:] * 2)
    del y
    gc.collect()
    assert tape() is None, "and nothing else does"


def test_a_result_that_is_an_argument_may_be_passed_on() -> None:
    run = runner(lambda x, y: (y + 1, x))
    x, y = torch.ones(3, 2), torch.zeros(3, 2)
    expected = x, y
    for _ in range(3):
        x, y = run(x, y)
        expected = expected[1] + 1, expected[0]
    assert tree_equal((x, y), expected)


def test_calls_of_several_threads() -> None:
    run = runner(lambda x: x * 2, clone_outputs=True)
    wrong: list[int] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(30):
            x = torch.randn(1 + seed, 4, generator=generator)
            with torch.no_grad():
                if not torch.equal(run(x), x * 2):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


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
