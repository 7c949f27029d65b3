"""Which weights a GraphRunner compares, on graphs that the CPU records."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from cpu_captures import Quantized, model, rows, runner, tree_equal
from torch import Tensor, nn


def new_parameter(net: nn.Module) -> nn.Parameter:
    """Replaces one; returns that of before, which stays alive."""
    before: nn.Parameter = net[0].weight
    net[0].weight = nn.Parameter(torch.randn(12, 6))
    return before


MOVES: list[Callable[[nn.Module], Any]] = [
    lambda net: setattr(net[0].weight, "data", torch.randn(12, 6)),
    new_parameter,
    lambda net: net.load_state_dict(Scaled(model()).state_dict(), assign=True),
    lambda net: net.to(torch.float64).to(torch.float32),
    lambda net: setattr(net, "scale", torch.full((3,), 5.0)),  # a buffer
]


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize(
    "wrap", [lambda net: net, lambda net: net.forward, lambda net: functools.partial(net)]
)
@pytest.mark.parametrize("lazy", [False, True])
def test_a_size_whose_weights_have_moved_is_captured_anew(
    move: Callable[[nn.Module], Any], wrap: Callable[[nn.Module], Any], lazy: bool
) -> None:
    net = Scaled(model())
    run = runner(wrap(net), lazy=lazy)

    def check(n: int, captures: int) -> None:
        x, before = rows(n), len(run.captures.tapes)
        torch.testing.assert_close(run(x), net(x))
        assert len(run.captures.tapes) == before + captures

    with torch.no_grad():
        check(3, 1 if lazy else 4)
        check(7, 1 if lazy else 0)
        net[0].weight.mul_(2)  # trained, not moved
        check(3, 0)
        held = move(net)
        for n in (3, 7):
            check(n, 1)
            check(n, 0)
    x = rows(3, requires_grad=True)
    run(x).sum().backward()
    found = [p.grad for p in net.parameters()]
    net.zero_grad()
    net(x).sum().backward()
    for a, p in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad)
    del held


class Scaled(nn.Sequential):  # type: ignore[misc]
    """With a buffer."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(*net)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.scale


def test_another_type_where_the_weight_lay() -> None:
    net = nn.Linear(4, 4, bias=False)
    memory = torch.randn(32)
    net.weight.data = memory[:16].view(4, 4)
    run, x = runner(net), rows(3, 4)
    with torch.no_grad():
        run(x)
        net.weight.data = memory.view(torch.float64).view(4, 4)
        assert tree_equal(run(x.double()), net(x.double()))


def test_weights_that_go_are_let_go_of() -> None:
    net = model()
    run = runner(net, [4])
    run(rows(4, requires_grad=True)).sum().backward()
    before = [weakref.ref(x) for x in net.parameters()]
    memory = weakref.ref(net[0].weight.untyped_storage())
    for tape in run.captures.tapes:
        tape.forget()  # it has what a graph has addresses of
    for part in (net[0], net[2]):
        part.weight, part.bias = (nn.Parameter(x.detach().clone()) for x in part.parameters())
    gc.collect()
    assert memory() is None
    assert [x() for x in before] == [None] * 4


def test_a_part_that_is_replaced_needs_a_reset() -> None:
    net = model()
    run, x = runner(net), rows(3)
    with torch.no_grad():
        run(x)
        net[0] = nn.Linear(6, 12)
        run.reset()
        torch.testing.assert_close(run(x), net(x))
        net[0].weight.data = torch.randn(12, 6)
        torch.testing.assert_close(run(x), net(x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse")
def test_weights_without_memory_of_their_own_work() -> None:
    net = nn.Linear(6, 5, bias=False)
    values, scale = torch.randint(-99, 99, (5, 6), dtype=torch.int8), torch.rand(5, 1)
    net.weight = nn.Parameter(Quantized(values, scale), requires_grad=False)
    net.weight.whole = net.weight  # what it does not wrap may lead back to it
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    net.register_buffer("ragged", torch.nested.nested_tensor(parts))
    net.register_buffer("jagged", torch.nested.nested_tensor(parts, layout=torch.jagged))
    net.register_buffer("sparse", torch.eye(3).to_sparse())
    net.register_buffer("nothing", None)
    run = runner(net, sizes=[4])
    with torch.no_grad():
        for n in (4, 3):
            assert tree_equal(run(x := rows(n)), net(x))
    assert len(run.captures.tapes) == 1


def test_a_part_may_have_the_runner_of_the_whole() -> None:
    """A circle through what C++ holds, which Python's collector has to be told of."""
    net = model()
    net[0].fast = runner(net)
    net[0].fast(rows(3))
    part = weakref.ref(net[0])
    del net
    gc.collect()
    assert part() is None


class Mean(nn.Module):  # type: ignore[misc]
    """Keeps a mean: in place, or in a new tensor each time."""

    mean: Tensor | None

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("mean", None)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = torch.zeros(6)  # when it first runs
        elif self.in_place:
            self.mean.mul_(0.5).add_(x.mean(0))
        else:
            self.mean = self.mean * 0.5 + x.mean(0)
        return x + self.mean


def test_buffers_that_the_function_makes() -> None:
    net = Mean(in_place=True)
    run = runner(net, sizes=[2])
    with torch.no_grad():
        run(rows(2))
        captured = len(run.captures.tapes)
        x, before = rows(2), torch.clone(net.mean)
        torch.testing.assert_close(run(x), x + before * 0.5 + x.mean(0))
        assert len(run.captures.tapes) == captured
        with pytest.raises(ValueError, match="replaces a parameter or buffer"):
            runner(Mean(in_place=False), sizes=[2])(rows(2))
