"""GraphRunner's weights and their gradients, on graphs that the CPU records and replays."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

import cudagraph_pool as cgp

pytest.importorskip("torch")

import torch
from cpu_captures import SIZES, Made, Quantized, double, model, rows, runner, tree_equal, weight
from torch import Tensor, nn
from torch.autograd import forward_ad


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


def test_parameters_that_are_not_the_modules_would_get_no_gradients() -> None:
    net = model()
    said = r"tensor of shape \(3, 12\) that requires gradients and is neither an argument nor a par"
    for run in (runner(lambda x: net(x)), runner(Made(lambda self, x: net(x), own=weight(1)))):
        with pytest.raises(ValueError, match=said):
            run(rows(3))
        with torch.no_grad():
            torch.testing.assert_close(run(x := rows(3)), net(x))
    run = runner(lambda x: net(x).detach())
    assert not run(rows(3)).requires_grad


def test_parameters_that_are_replaced_where_they_lie_get_their_gradients() -> None:
    net = model()
    run = runner(net)
    run(rows(3)).sum().backward()
    before = net[0].weight
    net[0].weight = nn.Parameter(before.data)
    before.grad = None
    run(rows(3)).sum().backward()
    assert net[0].weight.grad is not None
    assert before.grad is None


def test_a_backward_pass_that_comes_too_late() -> None:
    run = runner(model())
    first = run(rows(3))
    second = run(rows(4))
    late = "backward pass of call 2 of its pool, of size 3 in the graph of 4, came after call 3, of"
    with pytest.raises(RuntimeError, match=late):
        first.sum().backward()
    loss = second.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="came after call 4, the backward pass of call 3"):
        loss.backward()


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
    with pytest.raises(RuntimeError, match="came after call 8, of size 3"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("options", "within", "next_rows"),
    [
        ({}, nullcontext, 3),
        ({}, cgp.guard, 5),  # which is over then
        ({"lazy": True, "max_graphs": 1}, nullcontext, 5),  # the graph is gone
    ],
    ids=["same graph", "guarded", "graph gone"],
)
def test_saved_outputs_that_a_later_call_overwrites(
    options: dict[str, Any], within: Any, next_rows: int
) -> None:
    head = torch.ones(6, requires_grad=True)
    run = runner(double, **options)
    with within():
        first = (run(rows(3)) * head).sum()
    run(rows(next_rows))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


def test_forward_mode_derivatives_are_refused() -> None:
    run, x = runner(double), rows(3)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="graphs have no tangents"):
        run(x)
    assert torch.equal(run(x), double(x))


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


def test_a_backward_pass_is_not_differentiated_again() -> None:
    run = runner(Made(lambda self, x: (x * self.w) ** 2, w=weight(2)), [4])
    x = torch.ones(4, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
        gradient.sum().backward()
    assert tree_equal(torch.autograd.grad(run(x).sum(), x)[0], torch.full((4, 2), 2.0))


def test_gradients_that_are_not_strided() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    with pytest.raises(TypeError, match=r"gradient of shape \(5, 3\) holds a Tensor of layout"):
        runner(embedding)(torch.tensor([1, 2]))


def test_weights_that_an_undefined_gradient_leads_to_get_none() -> None:
    """So that an optimizer leaves them alone."""
    net = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
    both = Made(lambda self, x: (self.net[0](x), self.net[1](x)), net=net)
    out, _ = runner(both, [4])(rows(4))
    out.sum().backward()
    assert net[0].weight.grad is not None
    assert net[1].weight.grad is None


def test_outputs_that_share_memory_are_returned_so() -> None:
    first, second, part = runner(lambda x: (y := x * 3, y, y[:, :2]), [4])(x := rows(4))
    first.mul_(2)
    assert tree_equal((second, part), (x * 6, x[:, :2] * 6))


def test_autocast() -> None:
    net = model()
    run = runner(net)
    with torch.no_grad():
        for _ in range(2):
            assert run(rows(3)).dtype == torch.float32
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert tree_equal(run(x := rows(4)), net(x))
            net[0].weight.mul_(2)  # each graph casts weights itself
    assert len(run.report()) == 2 * len(SIZES)


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
    memory = torch.arange(-8.0, 8).double()  # so that products are exact, in any order
    net.weight.data = memory.view(torch.float32)[:16].view(4, 4)
    run, x = runner(net), rows(3, 4)
    with torch.no_grad():
        run(x)
        net.weight.data = memory.view(4, 4)
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
