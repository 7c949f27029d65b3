"""GraphRunner with gradients, on graphs that the CPU records and replays (cpu_captures.py)."""

from __future__ import annotations

from typing import Any

import pytest

import cudagraph_pool as cgp

pytest.importorskip("torch")

import torch
from cpu_captures import (
    SIZES,
    Made,
    double,
    model,
    rows,
    runner,
    tree_equal,
    weight,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def gradients(run: Any, net: nn.Module, x: Tensor) -> list[Tensor]:
    x.grad = None
    run(x).square().sum().backward()
    return [x.grad.clone(), *(p.grad.clone() for p in net.parameters())]


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


def test_a_checkpoint_whose_graph_is_gone() -> None:
    run = runner(lambda x: x.exp(), lazy=True, max_graphs=1)
    x = rows(3, requires_grad=True)
    y = checkpoint(run, x, use_reentrant=False)
    run(rows(8, requires_grad=True))
    with pytest.raises(RuntimeError, match="came after call 4, of size 8 in the graph of 8"):
        y.sum().backward()


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
    with pytest.raises(
        RuntimeError, match="came after call 4, the backward pass of call 3: run it"
    ):
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


def test_saved_outputs_that_a_later_call_overwrites_are_found_by_a_guard() -> None:
    head = torch.ones(6, requires_grad=True)
    run = runner(double)
    with cgp.guard():
        loss = (run(rows(3)) * head).sum()
        run(rows(5))
        with pytest.raises(RuntimeError, match="uses what call 2 of its pool returned"):
            loss.backward()


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
    with pytest.raises(
        TypeError, match=r"gradient of shape \(5, 3\) holds a Tensor of layout"
    ):
        runner(embedding)(torch.tensor([1, 2]))


def test_weights_that_an_undefined_gradient_leads_to_get_none() -> None:
    """So that an optimizer leaves them alone."""
    net = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
    both = Made(lambda self, x: (self.net[0](x), self.net[1](x)), net=net)
    out, _ = runner(both, [4])(rows(4))
    out.sum().backward()
    assert net[0].weight.grad is not None
    assert net[1].weight.grad is None


def test_a_function_of_its_own_gradients() -> None:
    """torch.func refuses hooks on what is saved."""
    grad = torch.func.grad(lambda x: (x**2).sum())
    x = rows(4)
    assert tree_equal(runner(grad, [4])(x), grad(x))


def test_outputs_that_share_memory_are_returned_so() -> None:
    first, second, part = runner(lambda x: (y := x * 3, y, y[:, :2]), [4])(x := rows(4))
    first.mul_(2)
    assert tree_equal((second, part), (x * 6, x[:, :2] * 6))


def test_weights_that_lie_in_the_pool_get_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a model that was made by use_pool."""
    net = nn.Linear(6, 6)
    run = runner(net, [4])
    holds = run.captures.holds
    weights = {p.data_ptr() for p in net.parameters()}
    monkeypatch.setattr(run.captures, "holds", lambda x: x.data_ptr() in weights or holds(x))
    x = rows(4)
    run(x).square().sum().backward()
    found = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    net(x).square().sum().backward()
    for own, parameter in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(own, parameter.grad)


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
