"""How calls of one shape are replayed, their backward passes included."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from .._guard import is_guarded, mark_output
from ..sizes import Size, shown
from .padding import Copies, cut
from .program import Program


class Plan:
    """What is decided once for all calls of a shape."""

    def __init__(self, program: Program, bucket: Size, size: Size) -> None:
        assert program.cuts is not None
        self.captured = captured = program.captured[bucket]
        self.assemble = functools.partial(pytree.tree_unflatten, treespec=captured.tree)
        self._what = f"of size {shown(size)} in the graph of {shown(bucket)}"
        self._captures, self._clones = program.setup.captures, program.setup.clone_outputs
        self._written = [*captured.statics]
        self._copies = Copies(program.inputs, captured.statics, size)
        self._leaves = [
            cut(leaf, dims, size) if isinstance(leaf, Tensor) else leaf
            for leaf, dims in zip(captured.leaves, program.cuts.dims, strict=True)
        ]
        self._places = [n for n, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        if captured.backward is not None:
            statics = captured.backward.grad_outputs
            inputs = [program.grad_inputs[n] for n in captured.backward.places]
            self._written += statics
            self._gradient_copies = Copies(inputs, statics, size)
            self._gradients = list(captured.backward.gradients)
            for n, given in enumerate(program.inputs):
                gradient = self._gradients[n]
                self._gradients[n] = None if gradient is None else cut(gradient, given.dims, size)

    def run(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Replays the graph for a call, and returns the leaves of what belongs to it."""
        backward = self.captured.backward
        if backward is None:
            return self.launch(tensors)[0]
        parameters = (members[name] for members, name in backward.parameters)
        outputs = iter(_Graphed.apply(self, *tensors, *parameters))
        return [next(outputs) if isinstance(x, Tensor) else x for x in self._leaves]

    def launch(self, tensors: Sequence[Tensor]) -> tuple[list[Any], int]:
        """The forward pass; returns its leaves, and its number among the pool's replays."""
        order = self._captures.order
        leaves = list(self._leaves)
        with order.lock, torch.no_grad():
            self._captures.follow(self._written, self.captured.streams)
            number = order.begin(self._what)
            self._copies(tensors)
            order.overwrite()
            self.captured.forward.replay()
            for place in self._places:
                leaf = leaves[place].clone() if self._clones else leaves[place].detach()
                leaves[place] = mark_output(leaf, order) if is_guarded() else leaf
        return leaves, number

    def launch_backward(
        self, number: int, gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The backward pass of the call with that number; takes the gradients of all tensors that
        it returned, and returns those of inputs and parameters.

        Raises:
            RuntimeError: Something else has run since.
        """
        backward, order = self.captured.backward, self._captures.order
        assert backward is not None
        assert backward.graph is not None
        given = dict(zip(self._places, gradients, strict=True))
        undefined = {place for place in backward.places if given[place] is None}
        given |= {place: torch.zeros_like(self._leaves[place]) for place in undefined}
        with order.lock, torch.no_grad():
            if order.number != number:
                raise RuntimeError(
                    f"the backward pass of call {number} of its pool, {self._what}, came after "
                    f"call {order.number}, {order.what}, which has overwritten what it needs: run "
                    "it once, and before the next call"
                )
            self._captures.follow(self._written, self.captured.streams)
            order.begin(f"the backward pass of call {number}")
            self._gradient_copies([given[place] for place in backward.places])
            backward.graph.replay()
            # Copies, since the next replay overwrites these. What only outputs without a gradient
            # lead to gets none either, as in eager.
            results = [
                None if x is None or reached <= undefined else torch.empty_like(x)
                for x, reached in zip(self._gradients, backward.reached_from, strict=True)
            ]
            pairs = [(a, b) for a, b in zip(results, self._gradients, strict=True) if a is not None]
            if pairs:
                torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
        return results


class _Graphed(torch.autograd.Function):  # type: ignore[misc]
    """A call whose backward pass is a graph too."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        leaves, ctx.number = plan.launch(tensors)
        backward = plan.captured.backward
        assert backward is not None
        outputs = {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        ctx.mark_non_differentiable(*(outputs[n] for n in outputs.keys() - {*backward.places}))
        return tuple(outputs.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.plan.launch_backward(ctx.number, gradients))
