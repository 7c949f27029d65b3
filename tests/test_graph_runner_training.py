"""GraphRunner with gradients, on graphs that the CPU records and replays (cpu_captures.py)."""

from __future__ import annotations

from contextlib import nullcontext
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


def test_calls_that_a_checkpoint_runs_again() -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.GELU())
    run = runner(net)

    def twice(layer: Any) -> Any:
        def block(x: Tensor) -> Tensor:
            y: Tensor = layer(x)
            return y.sin()

        return lambda x: checkpoint(
            layer, checkpoint(block, x, use_reentrant=False), use_reentrant=False
        )

    x = rows(3, requires_grad=True)
    found = gradients(twice(run), net, x)
    net.zero_grad()
    for a, b in zip(found, gradients(twice(net), net, x), strict=True):
        torch.testing.assert_close(a, b)


def test_a_checkpoint_whose_graph_is_gone() -> None:
    run = runner(lambda x: x.exp(), lazy=True, max_graphs=1)
    x = rows(3, requires_grad=True)
    y = checkpoint(run, x, use_reentrant=False)
    run(rows(8, requires_grad=True))
    with pytest.raises(RuntimeError, match="has overwritten what it needs"):
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


def test_hooks_run_once() -> None:
    net = Made(lambda self, x: x * self.w, w=weight(6))
    run = runner(net)
    run(torch.ones(3, 6))
    net.w.register_hook(lambda gradient: gradient * 2)
    run(torch.ones(3, 6)).sum().backward()
    assert tree_equal(net.w.grad, torch.full((6,), 6.0))
    with pytest.raises(ValueError, match=r"a parameter of shape \(6,\) has a hook, which would"):
        runner(net)(torch.ones(3, 6))


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
    with pytest.raises(RuntimeError, match="create_graph=True asks for second derivatives"):
        torch.autograd.grad(run(x).sum(), x, create_graph=True)
    assert tree_equal(torch.autograd.grad(run(x).sum(), x)[0], torch.full((4, 2), 2.0))


def test_whatever_the_backward_pass_reads_must_stay() -> None:
    """Weights, buffers, what the function finds, and what moves: not the copies that it returns."""
    found, net = torch.full((6,), 4.0), nn.BatchNorm1d(6).eval()

    def work(self: Made, x: Tensor) -> Any:
        return net(x) * self.frozen * found

    frozen = nn.Parameter(torch.full((6,), 3.0), requires_grad=False)
    whole = Made(work, frozen=frozen, net=net)
    run = runner(whole, [4])
    changes: list[Any] = [
        *(lambda x=x: x.mul_(10) for x in (net.running_var, frozen, found)),
        lambda: setattr(frozen, "data", frozen * 2),
    ]
    for change in changes:
        x = rows(4, requires_grad=True)
        out = run(x)
        with torch.no_grad():
            change()
        with pytest.raises(RuntimeError, match="a buffer or another tensor that the function"):
            out.sum().backward()
        x = rows(4, requires_grad=True)
        gradients = [torch.autograd.grad(f(x).sum(), x)[0] for f in (run, whole)]
        assert tree_equal(*gradients), "a change before the call is no mistake"
    y = runner(lambda x: x.exp(), clone_outputs=True)(x)
    (y * 1).sum().backward(retain_graph=True)


def test_gradients_that_are_not_strided() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    with pytest.raises(TypeError, match=r"the gradient of .* \(5, 3\) is of layout torch.sparse"):
        runner(embedding)(torch.tensor([1, 2]))


def test_what_no_gradient_needs_may_change() -> None:
    average = torch.ones(6)

    def step(self: Made, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * self.w
        return y, (y * average).sum().detach()

    out, _ = runner(Made(step, w=weight(6)), [4])(rows(4, requires_grad=True))
    average.mul_(0.9)
    out.mul_(2).sum().backward()


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


def test_outputs_that_the_backward_pass_reads_must_stay() -> None:
    run = runner(lambda x: (x.exp(), x * 3))
    x = rows(3, requires_grad=True)
    for within in (nullcontext, cgp.guard):
        with within():
            y, z = run(x)
            y.mul_(2)
            with pytest.raises(RuntimeError, match="was changed in place or replaced before the"):
                y.sum().backward()
            x.grad = None
            _, z = run(x)
            z.mul_(3).sum().backward()  # which nothing reads
            assert tree_equal(x.grad, torch.full((3, 6), 9.0))


def test_buffers_that_a_call_changes_are_seen_to_change() -> None:
    net, x = nn.BatchNorm1d(6), rows(4).requires_grad_()
    run = runner(net, sizes=[4])
    run(x)
    run(x)
    late, before = x * net.num_batches_tracked, net.num_batches_tracked.item()
    run(x)
    assert net.num_batches_tracked == before + 1
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        late.sum().backward()


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
