"""GraphRunner against eager: made-up programs, called and changed in random order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("hypothesis")

import torch
from cpu_captures import CpuCaptures, CpuRunner
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from cudagraph_pool import sizes

# None mixes rows or positions: padding must not show.
UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.exp,
    torch.sin,
    torch.relu,
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    lambda x: x.cumsum(2),
    lambda x: x * 1,
    lambda x: x,
    lambda x: x[:, :, :1].expand_as(x),
    lambda x: x - x.mean(2, keepdim=True),
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    torch.mul,
    lambda x, y: torch.where(x > 0, y, -y),
    lambda x, y: x * y.sum(2, keepdim=True),
]
OPTIONS: list[dict[str, Any]] = [
    {"sizes": sizes.grid([1, 3, 6], [2, 5])},
    {"sizes": [(2, 5), (6, 1), (6, 5)], "lazy": True},
    {"sizes": "auto", "padding": 0.5},
    {"sizes": [(6, 5)], "clone_outputs": True},
    {"sizes": "auto", "max_graphs": 1},
    {"sizes": sizes.grid([3, 6], [5]), "lazy": True, "max_graphs": 2},
]
PICK = st.integers(0, 99)
STEP = st.tuples(st.sampled_from(UNARY), st.sampled_from(BINARY), PICK, PICK)


class Program(nn.Module):  # type: ignore[misc]
    """A function of two tensors, batch × length × 4, and of its weights."""

    def __init__(self, steps: list[Any], returned: list[int], nested: bool) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 4))
        self.bias = nn.Parameter(torch.randn(4))
        self.register_buffer("count", torch.zeros(()))
        self._made = steps, returned, nested

    def forward(self, x: Tensor, y: Tensor, *, scale: float) -> Any:
        steps, returned, nested = self._made
        self.count += 1
        values = [x, y @ self.matrix, (x + self.bias) * scale]
        for unary, binary, first, second in steps:
            a, b = values[first % len(values)], values[second % len(values)]
            values.append(torch.tanh(binary(unary(a), b)))
        results = [values[n % len(values)] for n in returned]
        if self.training:
            results.append(values[-1] * 2)
        return {"all": tuple(results), "scale": scale} if nested else results


def outcome(call: Any, leaves: list[Tensor], x: Tensor, y: Tensor, scale: float) -> Any:
    """What a call returns, and the gradients that a loss of it gives."""
    for leaf in leaves:
        leaf.grad = None
    result = call(x, y, scale=scale)
    values = tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, result)
    outputs = [v for v in tree_leaves(result) if isinstance(v, Tensor) and v.requires_grad]
    if outputs and torch.is_grad_enabled():
        sum((v * (place + 1)).square().mean() for place, v in enumerate(outputs)).backward()
    return values, [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]


class Runs(RuleBasedStateMachine):  # type: ignore[misc]
    """Two programs whose runners share a pool, and which run eagerly beside them."""

    @initialize(
        steps=st.lists(STEP, min_size=1, max_size=5),
        returned=st.lists(PICK, min_size=1, max_size=3),
        nested=st.booleans(),
        options=st.lists(st.sampled_from(OPTIONS), min_size=2, max_size=2),
    )
    def begin(self, steps: Any, returned: Any, nested: bool, options: Any) -> None:
        torch.manual_seed(0)
        pool: Any = CpuCaptures()
        self.programs = [Program(steps, returned, nested), Program(steps[::-1], returned, False)]
        self.runners = [
            CpuRunner(p, dim=(0, 1), pool=pool, progress=False, warmup=1, **chosen)
            for p, chosen in zip(self.programs, options, strict=True)
        ]

    @rule(
        which=st.integers(0, 1),
        batch=st.integers(1, 6),
        length=st.integers(1, 5),
        scale=st.sampled_from([0.5, 2.0]),
        wants_grad=st.booleans(),
        within=st.sampled_from([torch.enable_grad, torch.no_grad, torch.inference_mode]),
    )
    def call(
        self, which: int, batch: int, length: int, scale: float, wants_grad: bool, within: Any
    ) -> None:
        program, run = self.programs[which], self.runners[which]
        x = torch.randn(batch, length, 4, requires_grad=wants_grad)
        y = torch.randn(batch, 4, length).transpose(1, 2)  # of other strides
        leaves = [leaf for leaf in (x, *program.parameters()) if leaf.requires_grad]
        with within():
            expected = outcome(program, leaves, x, y, scale)
            found = outcome(run, leaves, x, y, scale)
        for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            if isinstance(b, Tensor) and a is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
            else:
                assert a == b or (a is None and not b.any())

    @rule(which=st.integers(0, 1), way=st.integers(0, 4))
    def change_weights(self, which: int, way: int) -> None:
        """In place, moved by ``data``, replaced while the old ones live, sent away, or all new."""
        program = self.programs[which]
        if way == 0:
            program.matrix.data.mul_(0.9)
        elif way == 1:
            program.matrix.data = program.matrix.data * 0.9
        elif way == 2:
            self.held = program.bias
            program.bias = nn.Parameter(torch.randn(4), program.bias.requires_grad)
        elif way == 3:
            program.to(torch.float64).to(torch.float32)
        else:
            program.load_state_dict(copy.deepcopy(program.state_dict()), assign=True)

    @rule(which=st.integers(0, 1), way=st.integers(0, 2))
    def change_modes(self, which: int, way: int) -> None:
        program = self.programs[which]
        if way == 0:
            program.train(not program.training)
        elif way == 1:
            program.bias.requires_grad_(not program.bias.requires_grad)
        else:
            self.runners[which].reset()

    @rule(which=st.integers(0, 1))
    def call_with_what_cannot_be(self, which: int) -> None:
        for shape in ((2, 2, 5), (3, 2, 4)):
            with pytest.raises((ValueError, RuntimeError)):
                self.runners[which](torch.randn(2, 2, 4), torch.randn(shape), scale=1.0)


TestRuns = Runs.TestCase
TestRuns.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, derandomize=True, database=None
)
