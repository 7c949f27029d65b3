"""Which weights a GraphRunner watches, on graphs that the CPU records."""

from __future__ import annotations

import functools
import itertools
import math
import random
import weakref
from types import MethodType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from cpu_captures import Quantized, model, rows, runner, tree_equal
from torch import Tensor, nn

from cudagraph_pool._adapter import load_adapter


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


def test_weights_that_wrap_others_move_with_these() -> None:
    net = nn.Linear(6, 5, bias=False)
    values, scale = torch.randint(-99, 99, (5, 6), dtype=torch.int8), torch.rand(5, 1)
    net.weight = nn.Parameter(Quantized(values, scale), requires_grad=False)
    net.weight.whole = net.weight  # what it does not wrap may lead back to it
    run = runner(net, sizes=[4])
    x = rows(4)
    moves = [
        lambda: setattr(values, "data", values * 2),
        lambda: setattr(scale, "data", scale * 2),
        lambda: setattr(net.weight, "scale", scale * 2),
    ]
    with torch.no_grad():
        for captured, move in enumerate([*moves, None], 1):
            for _ in range(5):
                assert tree_equal(run(x), net(x))
            assert len(run.captures.tapes) == captured
            if move is not None:
                move()


def test_weights_that_are_laid_out_anew_where_they_lie() -> None:
    """As no two layouts of one memory may be taken for each other."""
    layouts = {
        (tuple(laid.shape), laid.stride(), offset)
        for shape in itertools.product(range(1, 5), repeat=3)
        for offset in range(3)
        for order in itertools.permutations(range(3))
        for laid in [torch.zeros(99)[offset:][: math.prod(shape)].view(shape).permute(order)]
    }
    home: dict[str, Any] = {"weight": nn.Parameter(torch.zeros(1))}
    weight = home["weight"]
    memory = torch.zeros(99)

    def lay(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> None:
        weight.data = memory.as_strided(shape, strides, offset)

    chance, in_order = random.Random(0), sorted(layouts)
    for _ in range(200):
        before = chance.choice(in_order)
        lay(*before)
        watch = load_adapter().WeightWatch([], [home], [])
        for after in [*chance.sample(in_order, 100), before]:
            lay(*after)
            assert (watch.flags() is None) == (after != before), (before, after)
    for shape in ((1, 64), (512, 1, 4)):  # equal if the weights of a sum are in a line
        weight.data = torch.zeros(shape)
        watch = load_adapter().WeightWatch([], [home], [])
        weight.data = weight.data.transpose(-1, -2)
        assert watch.flags() is None


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_buffers_which_have_no_sizes(layout: torch.layout) -> None:
    net = model()
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    net.register_buffer("ragged", torch.nested.nested_tensor(parts, layout=layout))
    run = runner(net, sizes=[3])
    x = rows(3)
    with torch.no_grad():
        assert tree_equal(run(x), net(x))
        captured = len(run.captures.tapes)
        assert tree_equal(run(x), net(x))
        assert len(run.captures.tapes) == captured
        net.ragged = torch.nested.nested_tensor(parts, layout=layout)
        run(x)
        assert len(run.captures.tapes) == 2 * captured


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


def test_arguments_that_require_gradients_matter_without_gradients_too() -> None:
    def work(x: Tensor) -> Tensor:
        if not x.requires_grad:
            return x * 1
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(x.square().sum(), x)
        return gradient

    run = runner(work)
    x = rows(3)
    with torch.no_grad():
        for _ in range(5):
            assert tree_equal(run(x), work(x))
            x.requires_grad_(not x.requires_grad)


def owned(net: nn.Module) -> Any:
    """A method of an object that has it."""

    class Owner:
        def __init__(self) -> None:
            self.net = net

        def run(self, x: Tensor) -> Any:
            return self.net(x)

    return Owner().run


def slotted(net: nn.Module) -> Any:
    """The same of one whose class says which attributes it has; and has a base that does."""

    class Base:
        __slots__ = ("__net", "nothing")

        def __init__(self) -> None:
            self.__net = net

        def run(self, x: Tensor) -> Any:
            return self.__net(x)

    class Owner(Base):
        __slots__ = "more"

    return Owner().run


def hidden(net: nn.Module) -> nn.Module:
    """A module that keeps it out of its state."""

    class Hides(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.nets = [net]

        def forward(self, x: Tensor) -> Any:
            return self.nets[0](x)

    return Hides()


def unregistered(net: nn.Module) -> nn.Module:
    """A module that has it as its attribute, but not as its part."""

    class Holds(nn.Module):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Any:
            return self.net(x)

    module = Holds()
    object.__setattr__(module, "net", net)
    return module


def replaced(net: nn.Module) -> nn.Module:
    """A module whose forward is another one's."""
    module = nn.Identity()
    module.forward = lambda x: net(x)
    return module


def rebound(net: nn.Module) -> nn.Module:
    """The same by a method."""
    module = nn.Identity()
    module.forward = MethodType(lambda self, x: net(x), module)
    return module


def hooked(net: nn.Module) -> nn.Module:
    """A module whose hook calls it."""
    module = nn.Identity()
    module.register_forward_hook(lambda module, args, output: net(output))
    return module


def callable_object(net: nn.Module) -> Any:
    """One whose code finds it elsewhere."""

    class Calls:
        def __call__(self, x: Tensor) -> Any:
            return net(x)

    return Calls()


@pytest.mark.parametrize(
    "wrap",
    [
        *(hidden, unregistered, replaced, rebound, hooked, callable_object),
        functools.partial,
        lambda net: torch.no_grad()(functools.partial(net.forward)),
        lambda net: lambda x: net(x),
        lambda net: functools.partial(lambda net, x: net(x), net),
        *(owned, slotted),
        lambda net: lambda x, nets=[{"net": net}]: nets[0]["net"](x),
        lambda net: (lambda own: lambda x: own.net(x))(SimpleNamespace(net=net)),
        lambda net: lambda x: (lambda y: net(y))(x),
        lambda net: (lambda inner: lambda x: inner(x))(lambda x: net(x)),
    ],
)
def test_weights_of_what_a_function_refers_to(wrap: Any) -> None:
    net = model()
    run = runner(wrap(net), sizes=[4])
    x = rows(4)
    with torch.no_grad():
        run(x)
        net[0].weight.data = torch.randn(12, 6)
        assert tree_equal(run(x), net(x))


def test_tensors_that_a_function_finds_are_watched() -> None:
    """But for what memory cannot be told of, and is not looked at."""
    scale = torch.ones(6)
    jagged = torch.nested.nested_tensor([rows(1)], layout=torch.jagged)
    run = runner(lambda x: x * scale if jagged.is_nested else x, sizes=[4])
    x = rows(4)
    assert not run(x).requires_grad
    scale.requires_grad_()
    run(x).sum().backward()
    torch.testing.assert_close(scale.grad, x.sum(0))
    with torch.no_grad():
        scale.data = torch.full((6,), 3.0)
        assert tree_equal(run(x), x * 3)


def test_tensors_of_objects_are_left_to_these() -> None:
    class Engine:
        def __init__(self) -> None:
            self.batches = [rows(1)]

        def run(self, x: Tensor) -> Tensor:
            return x * len(self.batches)

    engine = Engine()
    run = runner(engine.run, sizes=[4])
    run(rows(4))
    batch = weakref.ref(engine.batches.pop())
    assert batch() is None


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
