"""GraphRunner against eager: made-up programs, called at random sizes, their gradients included."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from cpu_captures import CpuCaptures, CpuRunner
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from cudagraph_pool import sizes

# None mixes rows or positions: padding must not show.
UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.exp,
    torch.tanh,
    torch.sin,
    torch.relu,
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    lambda x: x.cumsum(2),
    lambda x: x.flip(2),
    lambda x: x * 1,
    lambda x: x,
    lambda x: x[:, :, :1].expand_as(x),
    lambda x: x - x.mean(2, keepdim=True),
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    torch.mul,
    lambda x, y: torch.where(x > 0, y, -y),
    lambda x, y: torch.maximum(x, y),
    lambda x, y: x * y.sum(2, keepdim=True),
]


class Program:
    """A function of two tensors, batch × length × 4, and of two weights."""

    def __init__(self, chance: random.Random) -> None:
        self.weights = [
            torch.randn(4, 4, requires_grad=True),
            torch.randn(4, requires_grad=chance.random() < 0.5),
        ]
        self.steps = [
            (chance.choice(UNARY), chance.choice(BINARY), chance.random(), chance.random())
            for _ in range(chance.randint(1, 6))
        ]
        self.returned = [chance.random() for _ in range(chance.randint(1, 3))]
        self.nested = chance.random() < 0.5

    def __call__(self, x: Tensor, y: Tensor, *, scale: float) -> Any:
        values = [x, y @ self.weights[0], (x + self.weights[1]) * scale]
        for unary, binary, first, second in self.steps:
            a, b = (values[int(place * len(values))] for place in (first, second))
            values.append(torch.tanh(binary(unary(a), b)))
        results = [values[int(place * len(values))] for place in self.returned]
        return {"all": tuple(results), "scale": scale} if self.nested else results


def outcome(call: Callable[..., Any], leaves: list[Tensor], x: Tensor, y: Tensor, s: float) -> Any:
    """What a call returns, and the gradients that a loss of it gives."""
    for leaf in leaves:
        leaf.grad = None
    result = call(x, y, scale=s)
    values = tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, result)
    outputs = [v for v in tree_leaves(result) if isinstance(v, Tensor) and v.requires_grad]
    if outputs and torch.is_grad_enabled():
        sum((v * (place + 1)).square().mean() for place, v in enumerate(outputs)).backward()
    return values, [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]


@pytest.mark.parametrize("seed", range(30))
def test_equal_to_eager(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    pool: Any = CpuCaptures()
    options: list[dict[str, Any]] = [
        {"sizes": sizes.grid([1, 3, 6], [2, 5])},
        {"sizes": [(2, 5), (6, 1), (6, 5)], "lazy": True},
        {"sizes": "auto", "padding": 0.5},
        {"sizes": [(6, 5)], "clone_outputs": True},
        {"sizes": "auto", "max_graphs": 1},
    ]
    programs = [Program(chance) for _ in range(2)]
    runners = [
        CpuRunner(p, dim=(0, 1), pool=pool, progress=False, warmup=1, **chance.choice(options))
        for p in programs
    ]
    for _ in range(10):
        which = chance.randrange(2)
        program, run = programs[which], runners[which]
        shape = chance.randint(1, 6), chance.randint(1, 5), 4
        x = torch.randn(shape, requires_grad=chance.random() < 0.5)
        y = torch.randn(shape[0], 4, shape[1]).transpose(1, 2)  # of other strides
        leaves = [leaf for leaf in (x, *program.weights) if leaf.requires_grad]
        scale = chance.choice([0.5, 2.0])
        if chance.random() < 0.2:
            program.weights[0].data.mul_(0.9)
        with torch.set_grad_enabled(chance.random() < 0.7):
            expected = outcome(program, leaves, x, y, scale)
            found = outcome(run, leaves, x, y, scale)
        for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            if not isinstance(b, Tensor) or a is None:
                assert a == b or (a is None and not b.any())
            else:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
