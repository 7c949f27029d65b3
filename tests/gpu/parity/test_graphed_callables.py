"""torch.cuda.make_graphed_callables."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ..work import PAGE, WIDTH, adapter, fresh, torch
from .captures import Expect
from .conftest import Side
from .memory import ids, reserved

Step = Callable[[torch.Tensor], torch.Tensor]

pytestmark = [
    # Of graph captures beside autograd, and of torch.compile: torch's own, and not of the pools.
    pytest.mark.filterwarnings("default"),
]


def perceptron(seed: int, hidden: int = 512) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, WIDTH)
    ).cuda()


def trained(step: Step, parameters: Sequence[torch.nn.Parameter], x: torch.Tensor) -> list[Any]:
    """The output of one forward and backward pass, and all gradients, the input's among them."""
    x = x.clone().requires_grad_()
    for parameter in parameters:
        parameter.grad = None
    y = step(x)
    y.float().square().sum().backward()
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    assert len(gradients) == len(parameters)
    assert x.grad is not None
    return [y.detach().clone(), x.grad.clone(), *gradients]


def assert_trains_alike(
    graphed: Step,
    graphed_parameters: Sequence[torch.nn.Parameter],
    eager: Step,
    eager_parameters: Sequence[torch.nn.Parameter],
    rows: int,
    steps: int = 4,
) -> None:
    for seed in range(steps):
        x = fresh(rows, seed=100 + seed)
        expected = trained(eager, eager_parameters, x)
        found = trained(graphed, graphed_parameters, x)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def sample(rows: int) -> tuple[torch.Tensor]:
    return (fresh(rows, seed=7).requires_grad_(),)


def test_several_at_once(side: Side) -> None:
    """All forward passes are captured, then all backward passes, in one pool."""
    models = [perceptron(seed, hidden) for seed, hidden in enumerate((128, 1024, 512))]
    eagers = copy.deepcopy(models)
    samples = (sample(64), sample(64), sample(64))
    with Expect(side, 6):
        graphed = torch.cuda.make_graphed_callables(tuple(models), samples)
    if side == "ours":
        assert len(ids()) == 1

    def through(parts: Sequence[Step]) -> Step:
        def run(x: torch.Tensor) -> torch.Tensor:
            for part in parts:
                x = part(x).relu()
            return x

        return run

    parameters, eager_parameters = (
        [p for model in each for p in model.parameters()] for each in (models, eagers)
    )
    assert_trains_alike(through(graphed), parameters, through(eagers), eager_parameters, 64)


def test_many_sizes_in_one_shared_pool(side: Side) -> None:
    """One model for several batch sizes, smallest first, one after the other at run time."""
    sizes = [8, 100, 512, 2048]
    eager = perceptron(0)
    models = {rows: copy.deepcopy(eager) for rows in sizes}
    handle = tuple(torch.cuda.graph_pool_handle())
    with Expect(side, 2 * len(sizes)):
        graphed = {
            rows: torch.cuda.make_graphed_callables(model, sample(rows), pool=handle)
            for rows, model in models.items()
        }
    if side == "ours":
        assert ids() == [handle]
        stats = adapter.stats(torch.cuda.current_device(), handle)
        assert stats["reserved_bytes"] <= stats["peak_allocated_bytes"] * 1.03 + 2 * PAGE
        assert reserved(handle) == stats["reserved_bytes"]
    for rows in (512, 8, 2048, 100, 8):
        assert_trains_alike(
            graphed[rows],
            list(models[rows].parameters()),
            eager,
            list(eager.parameters()),
            rows,
            steps=2,
        )
