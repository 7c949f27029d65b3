"""What calls of a GraphRunner return, on graphs that a CPU records and replays (cpu_captures)."""

from __future__ import annotations

import functools
import gc
import math
import random
import sys
import threading
import weakref
from collections import defaultdict
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
    is_captured,
    model,
    rows,
    runner,
    tree_equal,
)
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@pytest.mark.parametrize("lazy", [False, True])
def test_every_size_in_any_order(lazy: bool) -> None:
    run = runner(double, lazy=lazy)
    for n in (3, 8, 1, 5, 5, 2, 7, 4, 6, 1):
        x = rows(n)
        assert tree_equal(run(x), x * 2)
    assert run.sizes_captured == [(1,), (2,), (4,), (8,)]


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


def test_constants_are_told_apart_by_type() -> None:
    def work(x: Tensor, n: Any) -> Tensor:
        return x * n if isinstance(n, bool) else x + n

    run = runner(work, sizes=[2])
    x = rows(2)
    for n in (1, True, 1.0, 0, False):
        assert tree_equal(run(x, n), work(x, n))


def test_the_order_of_keywords_is_no_matter() -> None:
    def work(*, a: Tensor, b: Tensor) -> Tensor:
        return a - b

    run = runner(work)
    a, b = rows(3), rows(3)
    assert tree_equal(run(a=a, b=b), a - b)
    assert tree_equal(run(b=b, a=a), a - b)
    assert len(run.report()) == len(SIZES)


def test_several_dynamic_dimensions() -> None:
    def work(tokens: Tensor, mask: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        scores = (tokens @ tokens.transpose(1, 2)) * mask[:, None]
        return scores, tokens[:, :, 0] @ weight[: tokens.shape[1]]

    run = runner(
        work,
        sizes=cgp.sizes.grid([1, 4], [2, 5, 8]),
        dim={"tokens": (0, 1), "mask": (0, 1)},
    )
    weight = rows(8, 2)
    for batch in (1, 2, 4):
        for length in (1, 2, 3, 6, 8):
            tokens, mask = torch.randn(batch, length, 3), torch.ones(batch, length)
            expected = (tokens @ tokens.transpose(1, 2)) * mask[:, None]
            scores, weighted = run(tokens, mask, weight)
            torch.testing.assert_close(scores, expected)
            torch.testing.assert_close(weighted, tokens[:, :, 0] @ weight[:length])
    assert len(run.report()) == 6


def test_a_size_that_a_tensor_has_twice() -> None:
    run = runner(lambda x: x + x.T, sizes=[2, 6], dim=((0, 1),))
    x = torch.randn(5, 5)
    assert tree_equal(run(x), x + x.T)


def test_an_extent_that_happens_to_be_the_size_is_not_cut() -> None:
    constant = torch.randn(8, 8)
    run = runner(lambda x: (x @ constant, constant * 1), sizes=[8])
    x = rows(5, 8)
    cut, whole = run(x)
    assert cut.shape == (5, 8)
    assert tree_equal(whole, constant)


def test_padding_has_the_value_asked_for() -> None:
    seen = runner(lambda ids, mask: (ids.sum(0), mask.sum(0), ids * 1), pad={"ids": 7})
    ids, mask = torch.ones(8, dtype=torch.int64), torch.ones(8)
    for n in (8, 3, 5):  # what the larger call left is padded over
        total, masked, same = seen(ids[:n], mask[:n])
        bucket = 8 if n > 4 else 4
        assert total == n + 7 * (bucket - n)
        assert masked == n
        assert tree_equal(same, ids[:n])


@pytest.mark.parametrize("order", ["largest_first", "smallest_first"])
def test_warm_ups_read_what_the_call_holds(order: Any) -> None:
    """A size below one that was filled in reads the beginning of that, in two dimensions not."""
    for dim, grid in ((0, SIZES), ((0, 1), cgp.sizes.grid(SIZES, SIZES))):
        seen: list[tuple[Any, float]] = []

        def work(x: Tensor, seen: list[tuple[Any, float]] = seen) -> Tensor:
            if not is_captured():  # a capture runs nothing, but on the CPU
                seen.append((tuple(x.shape), float(x.sum())))
            return x * 1

        runner(work, grid, dim=dim, pad=0.5, order=order, warmup=2)(torch.ones(3, 5))
        assert {shape for shape, _ in seen} >= {(n, 5) if dim == 0 else (n, n) for n in SIZES}
        for (height, width), total in seen:
            own = min(height, 3) * min(width, 5)
            assert total == own + 0.5 * (height * width - own)


@pytest.mark.parametrize("dim", [0, (0,), (0, 1), {"x": (0, None), "y": (None, 0)}])
def test_padding_after_any_calls(dim: Any) -> None:
    """What any other graph has read is written over."""
    chance = random.Random(3)
    grid = isinstance(dim, dict) or dim == (0, 1)
    run = runner(
        lambda x, y: (x.sum(), y.sum()),
        sizes=cgp.sizes.grid(SIZES, SIZES) if grid else SIZES,
        dim=dim,
        pad={"x": 3, "y": 5},
        order=chance.choice(["largest_first", "smallest_first"]),
    )

    def padded(shape: tuple[int, ...], entry: Any, size: tuple[int, ...]) -> int:
        dims = entry if isinstance(entry, tuple) else (entry,)
        full = list(shape)
        for extent, dynamic in zip(size, dims, strict=True):
            if dynamic is not None:
                full[dynamic] = next(s for s in SIZES if s >= extent)
        return math.prod(full) - math.prod(shape)

    for _ in range(60):
        size = tuple(chance.randint(1, 8) for _ in range(2 if grid else 1))
        shapes = [(size[0], 4), (size[1], 4)] if isinstance(dim, dict) else [(*size, 4)] * 2
        entries = list(dim.values()) if isinstance(dim, dict) else [dim, dim]
        found = run(*(torch.ones(shape) for shape in shapes))
        for value, shape, entry, pad in zip(found, shapes, entries, (3, 5), strict=True):
            assert value == math.prod(shape) + pad * padded(shape, entry, size)


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


def test_any_strides_are_copied_from() -> None:
    run = runner(double)
    wide = rows(5, 12)
    for x in (wide[:, ::2], wide[:, :6], rows(1).expand(5, 6), rows(6, 5).T):
        assert tree_equal(run(x), x * 2)


def test_larger_than_all_sizes() -> None:
    with pytest.raises(ValueError, match="size 9, but the largest that was captured is 8"):
        runner(double)(rows(9))
    run = runner(double, overflow="eager")
    for n in (9, 3, 9):
        x = rows(n)
        assert tree_equal(run(x), x * 2)
    assert run.sizes_captured == [(1,), (2,), (4,), (8,)]
    with pytest.raises(ValueError, match="the largest that was captured is 2 × 8 or 8 × 2"):
        runner(double, sizes=[(2, 8), (8, 2)], dim=(0, 1))(torch.randn(3, 3))


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


def test_graphs_go_with_the_runner() -> None:
    run = runner(model())
    run(rows(4, requires_grad=True)).sum().backward()
    tapes = [weakref.ref(tape) for tape in run.captures.tapes]
    del run
    gc.collect()
    assert [tape() for tape in tapes] == [None] * len(tapes)


def test_what_a_call_returns_may_be_the_next_ones_argument() -> None:
    run = runner(lambda x: torch.tanh(x) + 1)
    x = expected = rows(5)
    for _ in range(4):
        x, expected = run(x), torch.tanh(expected) + 1
    assert tree_equal(x, expected)


def test_a_result_that_is_an_argument_may_be_passed_on() -> None:
    run = runner(lambda x, y: (y + 1, x))
    x, y = torch.ones(3, 2), torch.zeros(3, 2)
    expected = x, y
    for _ in range(3):
        x, y = run(x, y)
        expected = expected[1] + 1, expected[0]
    assert tree_equal((x, y), expected)


def test_changing_a_result_changes_no_other() -> None:
    run = runner(double)
    x = rows(3)
    run(x).t_().unsqueeze_(0)
    assert tree_equal(run(x), x * 2)


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


def test_progress_where_there_is_no_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that was started without, or has closed it."""
    monkeypatch.setattr(sys, "stderr", None)
    assert tree_equal(CpuRunner(double, sizes=SIZES)(x := rows(3)), x * 2)


class Factory(nn.Module):  # type: ignore[misc]
    """Returns what refers to it, and has a runner of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.run = runner(self.by_name)

    def by_name(self, x: Tensor) -> dict[str, Tensor]:
        return defaultdict(self.missing, x=x + 1)

    def missing(self) -> Tensor:
        raise KeyError


def test_the_garbage_collector_sees_through_a_runner() -> None:
    net = Factory()
    net.run(rows(3))
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
