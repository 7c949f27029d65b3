"""GraphRunner, on graphs that the CPU records and replays (cpu_captures.py)."""

from __future__ import annotations

import functools
import gc
import math
import random
import subprocess
import sys
import threading
import weakref
from typing import Any, NamedTuple

import pytest

import cudagraph_pool as cgp

pytest.importorskip("torch")
try:
    from cudagraph_pool._allocator import load_adapter

    load_adapter()
except ImportError as error:
    pytest.skip(f"needs the adapter: {error}", allow_module_level=True)

import torch
from cpu_captures import CpuCaptures, CpuRunner, Stream, tree_equal
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

SIZES = [1, 2, 4, 8]


def runner(function: Any, sizes: Any = SIZES, **options: Any) -> CpuRunner:
    return CpuRunner(function, sizes=sizes, progress=False, **options)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3))


def rows(n: int, columns: int = 6, **options: Any) -> Tensor:
    return torch.randn(n, columns, **options)


def double(x: Tensor) -> Tensor:
    return x * 2


# What a call returns


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


@pytest.mark.parametrize("dim", [0, (0,), (0, 1), {"x": (0, None), "y": (None, 0)}])
def test_padding_after_any_calls(dim: Any) -> None:
    """What is there already is not written again; what any other graph has read is."""
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


def test_padding_after_a_warm_up_that_failed() -> None:
    """It may have written to all of an input."""

    def work(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if len(y) == 100:
            x.add_(5)
        return x.sum().expand(len(x)) * 1, y * 1

    run = runner(work, [(8, 10), (4, 100)], dim={"x": (0, None), "y": (None, 0)}, lazy=True)
    run(torch.ones(1), torch.ones(5))
    with pytest.raises(ValueError, match="changes x in place"):
        run(torch.ones(2), torch.ones(50))
    total, _ = run(torch.ones(2), torch.ones(5))
    assert tree_equal(total, torch.full((2,), 2.0))


def test_what_a_function_keeps_of_its_arguments() -> None:
    """By which tensor it is, as caches do: a capture must not find what a warm-up left there."""
    scaled = functools.lru_cache(maxsize=16)(lambda y: y * 10)
    run = runner(lambda x, y: x + scaled(y))
    for value in (1.0, 7.0):
        assert tree_equal(
            run(torch.zeros(3), torch.full((3,), value)), torch.full((3,), 10 * value)
        )


def test_memory_formats_are_kept() -> None:
    strides = []

    def work(x: Tensor) -> Tensor:
        strides.append(x.is_contiguous(memory_format=torch.channels_last))
        return x * 2

    run = runner(work)
    x = torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last)
    assert tree_equal(run(x), x * 2)
    assert all(strides)
    with pytest.raises(ValueError, match=r"x has the strides .* captured as torch.channels_last"):
        run(x.contiguous())
    sliced = torch.randn(6, 4, 5, 6).to(memory_format=torch.channels_last)[::2]
    with pytest.raises(ValueError, match=r"pass it \.contiguous"):
        run(sliced)


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


# Whose memory it is


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


def test_calls_on_several_streams_form_one_row() -> None:
    shared = CpuCaptures()
    one, other = runner(double, pool=shared), runner(double, pool=shared)
    first, second = Stream(), Stream()
    shared.stream = first
    one(rows(2))
    one(rows(2))
    assert first.waited_for == []
    shared.stream = second
    other(rows(2))
    assert second.waited_for == [first]
    shared.stream = first
    one(rows(2))
    assert first.waited_for == [second]


def test_a_capture_on_another_stream_waits_for_what_reads_the_inputs() -> None:
    run = runner(double, lazy=True)
    first, second = Stream(), Stream()
    run.captures.stream = first
    run(rows(2))
    run.captures.stream = second
    run.capture(rows(4))
    assert second.waited_for == [first]
    run.captures.stream = first
    run(rows(4))
    assert first.waited_for == [second]


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


# Training


def gradients(run: Any, net: nn.Module, x: Tensor) -> list[Tensor]:
    x.grad = None
    run(x).square().sum().backward()
    return [x.grad.clone(), *(p.grad.clone() for p in net.parameters())]


def test_gradients_are_those_of_eager() -> None:
    net = model()
    run = runner(net)
    for n in (3, 8, 5, 1):
        x = rows(n, requires_grad=True)
        net.zero_grad()
        found = gradients(run, net, x)
        net.zero_grad()
        for a, b in zip(found, gradients(net, net, x), strict=True):
            torch.testing.assert_close(a, b)


def test_gradients_accumulate() -> None:
    net = model()
    run = runner(net)
    batches = [rows(n, requires_grad=True) for n in (4, 7, 2)]
    net.zero_grad()
    for x in batches:
        found = gradients(run, net, x)
    net.zero_grad()
    for x in batches:
        expected = gradients(net, net, x)
    for a, b in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_stay_when_others_come() -> None:
    """Neither a parameter nor an argument keeps memory of the pool as its gradient."""
    net = model()
    run = runner(net)
    leaf = rows(12, 3, requires_grad=True)
    run(leaf.view(6, 6)).sum().backward()
    kept = [leaf.grad.clone(), *(p.grad.clone() for p in net.parameters())]
    with torch.no_grad():
        for n in (1, 2, 4, 8):
            run(rows(n))
    run(rows(8, requires_grad=True))
    for a, b in zip([leaf.grad, *(p.grad for p in net.parameters())], kept, strict=True):
        assert tree_equal(a, b)


def test_a_first_call_in_a_checkpoint() -> None:
    net = model()
    run = runner(net)
    x = rows(3, requires_grad=True)
    checkpoint(run, x, use_reentrant=False).square().sum().backward()
    found = [x.grad.clone(), *(p.grad.clone() for p in net.parameters())]
    net.zero_grad()
    for a, b in zip(found, gradients(net, net, x), strict=True):
        torch.testing.assert_close(a, b)


def test_parameters_that_a_function_finds_get_gradients() -> None:
    net = model()
    scale = torch.ones(3, requires_grad=True)
    run = runner(lambda x: (net(x) * scale, x.detach().argmax(1)))
    x = rows(3)
    found, index = run(x)
    assert not index.requires_grad
    found.sum().backward()
    assert scale.grad is not None
    torch.testing.assert_close(scale.grad, net(x).sum(0))
    assert all(p.grad is not None for p in net.parameters())


def test_an_output_without_a_gradient() -> None:
    net = model()
    run = runner(lambda x: (net(x), x * 3))
    x = rows(3, requires_grad=True)
    _, tripled = run(x)
    tripled.sum().backward()
    assert tree_equal(x.grad, torch.full((3, 6), 3.0))


def test_a_backward_pass_that_comes_too_late() -> None:
    run = runner(model())
    first = run(rows(3))
    second = run(rows(4))
    late = "backward pass of call 2 of its pool, of size 3 in the graph of 4, came after call 3, of"
    with pytest.raises(RuntimeError, match=late):
        first.sum().backward()
    loss = second.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"call 3, .* has run already, .* retain_graph=True"):
        loss.backward()


def test_training_and_inference_are_two_programs() -> None:
    net = model()
    net.append(nn.Dropout(0.5))
    run = runner(net, sizes=[4])
    x = rows(4)
    net.eval()
    with torch.no_grad():
        expected = net(x)
        assert tree_equal(run(x), expected)
    with torch.inference_mode():
        assert tree_equal(run(x), expected)
    assert len(run.report()) == 1
    assert run(x).requires_grad
    net.train()
    assert (run(x) == 0).any()
    assert len(run.report()) == 3


def test_autocast() -> None:
    net = model()
    run = runner(net)
    x = rows(3)
    with torch.no_grad():
        assert run(x).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.is_autocast_cache_enabled()
            assert run(x).dtype == torch.bfloat16
            assert tree_equal(run(x), net(x))
            assert torch.is_autocast_cache_enabled()
        net[0].weight.mul_(2)  # each graph casts weights itself
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for n in (8, 2, 1, 4):
                assert tree_equal(run(x := rows(n)), net(x))
        x = rows(3)
        assert run(x).dtype == torch.float32
    assert len(run.report()) == 2 * len(SIZES)


def test_a_capture_or_a_failed_call_ends_what_was_open() -> None:
    """Both write to the inputs that an open backward pass reads."""
    run = runner(lambda x, y: x * x + y, lazy=True)
    y = run(rows(3, requires_grad=True), rows(3))
    run.capture(rows(8, requires_grad=True), rows(8))
    with pytest.raises(RuntimeError, match="came after call 3, a capture"):
        y.sum().backward()
    with cgp.guard():
        late = run(rows(3), rows(3))
        run(rows(3), rows(3))
        y = run(rows(3, requires_grad=True), rows(3))
        with pytest.raises(RuntimeError, match="has overwritten it"):
            run(rows(3, requires_grad=True), late)
    with pytest.raises(RuntimeError, match="a call that failed"):
        y.sum().backward()


def test_gradients_that_are_asked_for_are_the_callers() -> None:
    weight = torch.ones(6, requires_grad=True)
    run = runner(lambda x: x * weight)
    (first,) = torch.autograd.grad(run(torch.ones(3, 6)).sum(), weight)
    torch.autograd.grad(run(torch.full((3, 6), 5.0)).sum(), weight)
    assert tree_equal(first, torch.full((6,), 3.0))


def test_what_the_backward_pass_reads_must_stay() -> None:
    scale = torch.ones(6, requires_grad=True)
    run = runner(lambda x: (x.exp(), x * scale))
    x = rows(3, requires_grad=True)
    y, _ = run(x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place or replaced before the backward"):
        y.sum().backward()
    _, z = run(x)
    with torch.no_grad():
        scale.add_(1)
    with pytest.raises(RuntimeError, match="changed in place or replaced before the backward"):
        z.sum().backward()
    x.grad = None
    _, z = run(x)
    z.mul_(3).sum().backward()  # which nothing reads
    assert tree_equal(x.grad, torch.full((3, 6), 6.0))


def test_saved_outputs_that_are_overwritten() -> None:
    """What autograd saved of them outside of the runner: a frozen encoder, called twice."""
    head = torch.ones(6, requires_grad=True)
    run = runner(double)
    first = (run(rows(3)) * head).sum()
    second = (run(rows(5)) * head).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (first + second).backward()
    x = rows(5)
    (run(x) * head).sum().backward()
    assert tree_equal(head.grad, (x * 2).sum(0))


def test_hooks_run_once() -> None:
    weight = torch.ones(6, requires_grad=True)
    run = runner(lambda x: x * weight)
    run(torch.ones(3, 6))
    hook = weight.register_hook(lambda gradient: gradient * 2)
    run(torch.ones(3, 6)).sum().backward()
    assert tree_equal(weight.grad, torch.full((6,), 6.0))
    with pytest.raises(ValueError, match=r"a parameter of shape \(6,\) has a hook, which would"):
        runner(lambda x: x * weight)(torch.ones(3, 6))
    hook.remove()


def test_a_backward_pass_has_the_types_of_its_forward_pass() -> None:
    first = nn.Parameter(torch.ones(1, 1))
    second = nn.Parameter(torch.full((1, 1), 1.001))

    def work(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return (x @ first) @ second

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = runner(work)(torch.ones(1, 1))
    y.sum().backward()
    assert first.grad is not None
    assert first.grad.item() == pytest.approx(1.001)


def test_a_leaf_made_by_the_function_is_its_own() -> None:
    made = []

    def work(x: Tensor) -> Tensor:
        made.append(torch.zeros_like(x, requires_grad=True))
        return x + made[-1]

    x = rows(3, requires_grad=True)
    y = runner(work, sizes=[4])(x)
    y.sum().backward()
    assert tree_equal(x.grad, torch.ones(3, 6))
    assert made[-1].grad is None


def test_views_of_leaves_without_gradients() -> None:
    net = model()
    run = runner(lambda x: (x * 1, net[0].bias[1:], x.view_as(x)))
    x = rows(3, requires_grad=True)
    with torch.no_grad():
        found = run(x)
    assert tree_equal(found, (x, net[0].bias[1:], x))


# When graphs come and go


def test_weights_that_move_are_captured_anew() -> None:
    net = model()
    run = runner(net)
    x = rows(3)

    def check() -> None:
        with torch.no_grad():
            torch.testing.assert_close(run(x), net(x))

    check()
    captured = len(run.captures.tapes)
    with torch.no_grad():
        net[0].weight.mul_(2)  # trained, not moved
    check()
    assert len(run.captures.tapes) == captured
    moves: list[Any] = [
        lambda: setattr(net[0].weight, "data", torch.randn(12, 6)),
        lambda: setattr(net[2], "bias", nn.Parameter(torch.randn(3))),
        lambda: net.load_state_dict(model().state_dict(), assign=True),
        lambda: net.append(nn.Linear(3, 2)),
        lambda: net[3].register_buffer("extra", torch.zeros(1)),
        lambda: net.__delitem__(3),
        lambda: net.__setitem__(1, nn.Tanh()),
        lambda: setattr(net[2].bias, "data", net[2].bias.data.clone().to(torch.float32)),
        lambda: setattr(net[0].weight, "data", net[0].weight.data.T.contiguous().T),  # the strides
    ]
    for number, move in enumerate(moves, 2):
        move()
        check()
        assert len(run.captures.tapes) == captured * number


def test_modes_and_frozen_parameters_of_parts() -> None:
    net = model().append(nn.Dropout(0.9))
    run = runner(net, sizes=[4])
    x = rows(4)
    with torch.no_grad():
        assert (run(x) == 0).any()
        net[3].eval()
        assert tree_equal(run(x), net(x))
    net[0].requires_grad_(False)
    run(x).sum().backward()
    assert net[0].weight.grad is None
    net[0].requires_grad_(True)
    run(x).sum().backward()
    assert net[0].weight.grad is not None
    captured = len(run.captures.tapes)
    net[0].requires_grad_(False)
    run(x)
    assert len(run.captures.tapes) == captured


class Forces(nn.Module):  # type: ignore[misc]
    """Computes gradients itself, of those of its weights that have any."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        if not self.weight.requires_grad:
            return x * 1
        with torch.enable_grad():
            energy = (x * self.weight).sum(1).square()
            (gradient,) = torch.autograd.grad(energy.sum(), self.weight)
        return x + gradient


def test_frozen_parameters_matter_without_gradients_too() -> None:
    net = Forces()
    run = runner(net, sizes=[4])
    x = rows(4)
    with torch.no_grad():
        assert tree_equal(run(x), net(x))
        net.weight.requires_grad_(False)
        assert tree_equal(run(x), net(x))


def test_weights_of_a_partial() -> None:
    net = model()
    run = runner(functools.partial(net), sizes=[4])
    x = rows(4)
    with torch.no_grad():
        run(x)
        net[0].weight.data = torch.randn(12, 6)
        assert tree_equal(run(x), net(x))


class Counting(nn.Module):  # type: ignore[misc]
    """Keeps a mean: in place, or in a new tensor each time."""

    mean: Tensor | None

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("mean", None)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean
        if mean is None:
            self.mean = torch.zeros(6)  # when it first runs
        elif self.in_place:
            mean.mul_(0.5).add_(x.mean(0))
        else:
            self.mean = mean * 0.5 + x.mean(0)
        return x + self.mean


def test_buffers_that_the_function_makes() -> None:
    net = Counting(in_place=True)
    run = runner(net, sizes=[2])
    with torch.no_grad():
        run(rows(2))
        captured = len(run.captures.tapes)
        assert net.mean is not None
        x, before = rows(2), net.mean.clone()
        y = run(x)
    assert len(run.captures.tapes) == captured
    torch.testing.assert_close(y, x + before * 0.5 + x.mean(0))
    with torch.no_grad(), pytest.raises(ValueError, match="replaces a parameter or buffer"):
        runner(Counting(in_place=False), sizes=[2])(rows(2))


def test_a_part_may_have_the_runner_of_the_whole() -> None:
    """A circle through what C++ holds, which Python's collector has to be told of."""
    net = model()
    net[0].fast = runner(net)
    net[0].fast(rows(3))
    part = weakref.ref(net[0])
    del net
    gc.collect()
    assert part() is None


def test_the_graph_least_used_makes_room() -> None:
    run = runner(double, lazy=True, max_graphs=2)
    for n in (1, 8, 1, 4):  # 8 goes
        assert tree_equal(run(x := rows(n)), x * 2)
    assert run.sizes_captured == [(1,), (4,)]
    assert tree_equal(run(x := rows(8)), x * 2)
    assert run.sizes_captured == [(4,), (8,)]


def test_sizes_that_come_with_the_calls() -> None:
    run = runner(double, sizes="auto", padding=0.5)
    sizes = (7, 100, 8, 33, 1, 99)
    for n in sizes:
        assert tree_equal(run(x := rows(n)), x * 2)
    captured = [n for (n,) in run.sizes_captured]
    assert all(any(n <= b <= 1.5 * n for b in captured) for n in sizes)
    assert len(captured) == 4


def test_a_capture_that_fails_leaves_the_runner_as_it_was() -> None:
    failing = True

    def work(x: Tensor) -> Tensor:
        if failing and len(x) == 2:
            raise OSError("out of luck")
        return x * 2

    run = runner(work)
    with pytest.raises(OSError, match="out of luck") as raised:
        run(rows(3))
    assert raised.value.__notes__ == ["while a GraphRunner captured size 2"]
    assert run.report() == []
    failing = False
    assert tree_equal(run(x := rows(3)), x * 2)


def test_capture_runs_nothing_for_the_caller() -> None:
    run = runner(double)
    run.capture(rows(3))
    assert run.sizes_captured == [(1,), (2,), (4,), (8,)]
    assert sum(tape.replays for tape in run.captures.tapes) == 0


# What cannot be captured


def test_arguments_that_are_not_as_captured() -> None:
    run = runner(lambda x, y: x + y)
    run(rows(3), rows(3))
    for x, y, said in (
        (rows(3, dtype=torch.float64), rows(3), "x has dtype torch.float64, .* torch.float32"),
        (rows(3, 7), rows(3, 7), r"x has the shape \(3, 7\), .* captured with \(any, 6\)"),
        (rows(3)[None], rows(3), r"x has the shape \(1, 3, 6\)"),
        (rows(3, device="meta"), rows(3), "x has device meta, but was captured with cpu"),
        (rows(3), rows(2), "y along dimension 0 has 2, but x along dimension 0 has 3"),
        (rows(0), rows(0), "x along dimension 0 has no elements"),
    ):
        with pytest.raises(ValueError, match=said):
            run(x, y)
    assert run(rows(2), rows(2)).shape == (2, 6)


def test_errors_name_the_argument() -> None:
    def work(batch: dict[str, Any], *more: Tensor) -> Tensor:
        return batch["ids"] + more[0]

    run = runner(work)
    run({"ids": rows(2)}, rows(2))
    with pytest.raises(ValueError, match=r"batch\['ids'\] has the shape"):
        run({"ids": rows(2, 9)}, rows(2))
    with pytest.raises(ValueError, match=r"more\[0\] has the shape"):
        run({"ids": rows(2)}, rows(2, 9))


def test_what_cannot_be_a_key() -> None:
    with pytest.raises(TypeError, match="an argument holds a bytearray, and what it"):
        runner(lambda x, y: x)(rows(2), bytearray(b"1"))


def test_arguments_that_may_change_while_they_stay_the_same() -> None:
    class Batch:
        scale = torch.ones(1)

    with pytest.raises(TypeError, match="an argument holds a Batch, and what it stands for"):
        runner(lambda x, batch: x * batch.scale)(rows(2), Batch())
    run = runner(lambda x, s: x / s, sizes=[2])
    x = rows(2)
    for s in (0.0, -0.0, float("nan"), float("nan")):
        assert torch.equal(run(x, s).nan_to_num(), (x / s).nan_to_num())
    assert len(run.report()) == 3

    jagged = torch.nested.nested_tensor([rows(2), rows(3)], layout=torch.jagged)
    for x in (rows(3).to_sparse(), jagged):
        with pytest.raises(TypeError, match=r"an argument is a .* tensor; a graph's must be"):
            runner(double)(x)

    class Tagged(torch.Tensor):  # type: ignore[misc]
        pass

    with pytest.raises(TypeError, match="x is a Tagged; the function would be given a plain"):
        runner(double)(rows(2).as_subclass(Tagged))


def test_the_order_of_keywords_that_a_function_sees() -> None:
    run = runner(lambda **tensors: torch.cat(list(tensors.values()), 1))
    a, b = rows(3, 1), rows(3, 1)
    assert tree_equal(run(b=b, a=a), torch.cat([b, a], 1))
    assert tree_equal(run(a=a, b=b), torch.cat([a, b], 1))


def test_an_optional_argument_may_be_named() -> None:
    def work(x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if mask is None else x * mask[:, None]

    run = runner(work, dim={"x": 0, "mask": 0}, pad={"mask": 1})
    x, mask = rows(3), torch.ones(3)
    assert tree_equal(run(x), x)
    assert tree_equal(run(x, mask), x)


def test_results_that_cannot_be_cut() -> None:
    for work, said in (
        (lambda x: x.flatten(), r"output has the shape \(48,\) at size 8 and \(6,\) at 1"),
        (lambda x: torch.cat([x, x]), "where its padding lies is unknown"),
        (lambda x: (x, len(x)), r"output\[1\] is 8 at size 8 and 1 at 1: a value that Python"),
        (lambda x: list(x), r"returns 8 value\(s\) at size 8 and 1 at 1"),
        (lambda x: x[:2], r"output has the shape \(2, 6\) at size 8 and \(1, 6\) at 1"),
        (lambda x: (x, "few" if len(x) < 3 else "many"), "is 'many' at size 8 and 'few' at 1"),
        (lambda x: (x, x) if len(x) == 4 else x, "at size 8 and 2 at 4, or others"),
        (lambda x: x[:, :3] if len(x) == 4 else x, r"of shape \(8, 6\) at size 8 and of shape \(4"),
        (lambda x: object(), "output is a object; a GraphRunner's function returns tensors"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            runner(work)(rows(3))


def test_arguments_changed_in_place() -> None:
    with pytest.raises(ValueError, match="the function changes x in place"):
        runner(lambda x: x.add_(1))(rows(3))
    with torch.inference_mode(), pytest.raises(ValueError, match="the function changes x"):
        runner(lambda x: x[0].zero_() + x)(rows(3))
    with pytest.raises(ValueError, match="the function changes x"):  # and autograd is not told
        runner(lambda x: x.data.add_(1) * 2)(rows(3))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sizes": "all"}, "sizes is 'all', but must be a sequence or 'auto'"),
        ({"order": "random"}, "unknown order 'random'"),
        ({"overflow": "ignore"}, "overflow is 'ignore'"),
        ({"sizes": 8}, "sizes is 8, but must be a sequence of integers or of tuples"),
        ({"sizes": [0.5]}, r"sizes has 0.5, but a size is an integer of at least 1"),
        ({"sizes": "auto", "padding": float("inf")}, "padding is inf"),
        ({"warmup": -1}, "warmup is -1"),
        ({"max_graphs": 4}, "max_graphs is 4: .* with lazy=True"),
        ({"max_graphs": 0, "lazy": True}, "max_graphs is 0"),
        ({"sizes": "auto", "dim": {"x": None}}, "says so for one tensor at least"),
        ({"sizes": "auto", "padding": -1}, "padding is -1"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        runner(double, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dim": {"y": 0}}, r"dim names \['y'\], but the tensors passed are \['x'\]"),
        ({"pad": {"y": 0}}, r"pad names \['y'\]"),
        ({"dim": 2}, r"x has the shape \(3, 6\), but its dimension 2 should be dynamic"),
        ({"dim": (0, 1)}, r"dim is \(0, 1\) for x, but a size has 1 number"),
        ({"dim": "0"}, "dim is '0' for x, but must be an integer"),
        ({"dim": (0.5,)}, r"dim is \(0.5,\) for x, but must be an integer"),
        ({"pad": "0"}, "pad is '0' for x, but must be a number"),
        ({"dim": ((0, -2),)}, "dim names a dimension of x twice"),
        ({"dim": {"x": None}}, "no argument has a dynamic dimension"),
    ],
)
def test_options_that_do_not_suit_the_call(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        runner(double, **options)(rows(3))


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_call_from_code_that_is_compiled() -> None:
    run = runner(double)
    x = rows(3)
    compiled = torch.compile(lambda x: run(x + 1) - 1, backend="eager")
    assert tree_equal(compiled(x), (x + 1) * 2 - 1)
    assert run.sizes_captured == [(size,) for size in SIZES]


def test_importing_it_does_not_import_the_compiler() -> None:
    """Which takes seconds."""
    script = (
        "import sys, cudagraph_pool as cgp; cgp.GraphRunner; print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.filterwarnings("ignore")  # of torch.func
def test_transforms_are_refused() -> None:
    """Most would end in an error of torch's own; tangents would be lost."""
    run = runner(lambda x: x * x)
    x = torch.arange(3.0)
    calls: list[Any] = [
        lambda: torch.vmap(run)(torch.ones(2, 3)),
        lambda: torch.func.grad(lambda y: run(y).sum())(x),
        lambda: torch.func.jvp(run, (x,), (x,)),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="a graph has neither"):
            call()
    with forward_ad.dual_level():
        with pytest.raises(RuntimeError, match="a graph has neither"):
            run(forward_ad.make_dual(x, x))
        assert tree_equal(run(x), x * x)


def test_a_function_that_calls_its_own_runner() -> None:
    net = model()
    net.forward = runner(net)
    with pytest.raises(RuntimeError, match="calls the GraphRunner that captures it"):
        net(rows(3))


def test_it_needs_to_be_enabled() -> None:
    with pytest.raises(RuntimeError, match="GraphRunner needs cudagraph_pool to be enabled"):
        cgp.GraphRunner(double, sizes=SIZES)
    with pytest.raises(TypeError, match="a GraphRunner runs a callable, not a int"):
        runner(3)


# What it says


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
