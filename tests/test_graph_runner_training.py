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
    is_captured,
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


def test_an_output_without_a_gradient() -> None:
    net = model()
    run = runner(Made(lambda self, x: (self.net(x), x * 3), net=net))
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
    with pytest.raises(RuntimeError, match="came after call 8, of size 3"):
        y.sum().backward()


def test_gradients_that_are_asked_for_are_the_callers() -> None:
    net = Made(lambda self, x: x * self.w, w=weight(6))
    run = runner(net)
    (first,) = torch.autograd.grad(run(torch.ones(3, 6)).sum(), net.w)
    torch.autograd.grad(run(torch.full((3, 6), 5.0)).sum(), net.w)
    assert tree_equal(first, torch.full((6,), 3.0))


def test_what_the_backward_pass_reads_must_stay() -> None:
    net = Made(lambda self, x: (x.exp(), x * self.scale), scale=weight(6))
    run = runner(net)
    x = rows(3, requires_grad=True)
    y, _ = run(x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place or replaced before the backward"):
        y.sum().backward()
    _, z = run(x)
    with torch.no_grad():
        net.scale.add_(1)
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


def test_a_backward_pass_has_the_types_of_its_forward_pass() -> None:
    def work(self: Made, x: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return (x @ self.first) @ self.second

    net = Made(work, first=weight(1, 1), second=weight(1, 1, value=1.001))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = runner(net)(torch.ones(1, 1))
    y.sum().backward()
    assert net.first.grad.item() == pytest.approx(1.001)


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


def test_a_loss_is_returned() -> None:
    """It has no dimension that could follow the size; nor has its gradient."""
    net = model()

    def loss(x: Tensor) -> Any:
        return net(x).square().mean()

    run = runner(Made(lambda self, x: (loss(x), self.net(x)), net=net), sizes=[8])
    x = rows(8)
    for scale in (1.0, 3.0):
        net.zero_grad()
        value, _ = run(x)
        (value * scale).backward()
        found = [parameter.grad.clone() for parameter in net.parameters()]
        net.zero_grad()
        (loss(x) * scale).backward()
        for own, parameter in zip(found, net.parameters(), strict=True):
            torch.testing.assert_close(own, parameter.grad)


def test_hooks_of_the_caller_are_not_part_of_a_capture() -> None:
    """Nor of one without gradients, whose function asks for some itself."""
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(is_captured())
        return tensor

    def forces(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (found,) = torch.autograd.grad((x**3).sum(), x)
        return found

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    for get_gradients in (False, True):
        with torch.set_grad_enabled(get_gradients), hooks:
            runner(forces)(rows(8))
    assert not any(packed)


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


def test_buffers_that_a_call_changes_are_seen_to_change() -> None:
    """By what saved them for a backward pass before, of eager work and of another runner."""
    net = nn.BatchNorm1d(6)
    run, other = runner(net, sizes=[4]), runner(lambda x: x * net.num_batches_tracked, sizes=[4])
    x = rows(4).requires_grad_()
    for _ in range(5):  # settled ones too
        with torch.no_grad():
            run(x)
    reads: list[Any] = [other, lambda x: x * net.num_batches_tracked]
    for read in reads:
        run(x)
        late = read(x)
        before = net.num_batches_tracked.item()
        with torch.no_grad():
            run(x)
        assert net.num_batches_tracked == before + 1
        with pytest.raises(RuntimeError, match=r"modified by an inplace|was changed in place"):
            late.sum().backward()
        read(x).sum().backward()


def test_a_guard_leaves_changes_of_outputs_to_be_found() -> None:
    net = Made(lambda self, x: (x * self.m).exp(), m=weight(6))
    run = runner(net, [4])
    with cgp.guard():
        out = run(torch.ones(4, 6))
        with torch.no_grad():
            out.mul_(5)
        with pytest.raises(RuntimeError, match="was changed in place"):
            out.sum().backward()
        run(torch.ones(4, 6)).sum().backward()
    torch.testing.assert_close(net.m.grad, torch.full((6,), 4 * torch.e))


def test_gradients_that_are_not_strided() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    with pytest.raises(TypeError, match=r"the gradient of .* \(5, 3\) is of layout torch.sparse"):
        runner(embedding)(torch.tensor([1, 2]))


def test_weights_of_one_memory_count_their_changes_apart() -> None:
    """As those that are parts of one buffer for all of a layer's."""
    flat = torch.arange(12.0) + 1
    net = Made(lambda self, x: x * self.a * self.b, a=weight(6), b=weight(6))
    net.a.data, net.b.data = flat[:6], flat[6:]
    out = runner(net, [4])(rows(4, requires_grad=True))
    with torch.no_grad():
        net.b.mul_(10)
    with pytest.raises(RuntimeError, match="was changed in place"):
        out.sum().backward()


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


def test_captures_run_backward_passes_in_their_own_thread() -> None:
    """In autograd's for the device there may be one that waits for the capture to end."""

    def work(x: Tensor) -> Tensor:
        assert not torch._C._is_multithreading_enabled()
        return x * 2

    runner(work)(rows(3, requires_grad=True)).sum().backward()
    assert torch._C._is_multithreading_enabled()


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
