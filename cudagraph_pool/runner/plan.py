"""How calls of one shape are replayed, their backward passes included."""

from __future__ import annotations

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
    """What is decided once for all calls of a shape. The processor's cache holds few of them."""

    def __init__(self, program: Program, bucket: Size, size: Size) -> None:
        assert program.cuts is not None
        self.captured = captured = program.captured[bucket]
        self._what = f"of size {shown(size)} in the graph of {shown(bucket)}"
        self._captures = program.setup.captures
        self._copy = Tensor.clone if program.setup.clone_outputs else Tensor.detach
        count = len(program.inputs)
        self._copies = Copies(program.inputs, captured.written[:count], size)
        # A copy would be recorded where gradients are enabled, had it no backward pass of its own.
        requires_grad = any(given.requires_grad for given in program.inputs)
        self._records = captured.backward.places or (requires_grad and torch.is_grad_enabled())
        pairs = zip(captured.outputs, program.cuts.tensor_dims, strict=True)
        self._outputs = [cut(output, dims, size) for output, dims in pairs]
        if captured.backward.places:
            inputs = [program.grad_inputs[n] for n in captured.backward.places]
            self._gradient_copies = Copies(inputs, captured.written[count:], size)
            self._gradients = list(captured.backward.gradients)
            for n, given in enumerate(program.inputs):
                gradient = self._gradients[n]
                self._gradients[n] = None if gradient is None else cut(gradient, given.dims, size)

    def run(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Replays the graph for a call, and returns what of its outputs belongs to that."""
        if not self._records:
            return self.launch(tensors)[0]
        parameters = map(dict.__getitem__, *self.captured.backward.parameters)
        return tuple(_Graphed.apply(self, *tensors, *parameters))

    def assemble(self, outputs: Sequence[Tensor]) -> Any:
        if self.captured.tree.is_leaf():
            return (*outputs, *self.captured.leaves)[0]
        rest = iter(outputs)
        leaves = [next(rest) if x is ... else x for x in self.captured.leaves]
        return pytree.tree_unflatten(leaves, self.captured.tree)

    def launch(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], int]:
        """The forward pass; returns its outputs, and its number among the pool's replays."""
        captured, order = self.captured, self._captures.order
        with order.lock:
            self._captures.follow(captured.written, captured.streams)
            number = captured.last_used = order.begin(self._what)
            self._copies(tensors)
            order.overwrite(captured)
            captured.graphs[0].replay()
            outputs = [*map(self._copy, self._outputs)]
            if is_guarded():
                outputs = [mark_output(x, order) for x in outputs]
        return outputs, number

    def launch_backward(self, number: int, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """That call's backward pass: by gradients of outputs those of inputs and parameters."""
        backward, order = self.captured.backward, self._captures.order
        undefined = {n for n in backward.places if grads[n] is None}
        with order.lock:
            if order.number != number:
                raise RuntimeError(
                    f"the backward pass of call {number} of its pool, {self._what}, came after "
                    f"call {order.number}, {order.what}: run it once, and before the next call"
                )
            self._captures.follow(self.captured.written, self.captured.streams)
            order.begin(f"the backward pass of call {number}")
            given = ((grads[n], self._outputs[n]) for n in backward.places)
            self._gradient_copies([torch.zeros_like(y) if x is None else x for x, y in given])
            self.captured.graphs[1].replay()
            # Copies, since the next replay overwrites these. What only outputs without a gradient
            # lead to gets none either, as in eager.
            gradients = zip(self._gradients, backward.reached_from, strict=True)
            left = [None if reached <= undefined else x for x, reached in gradients]
            copies = [None if x is None else torch.empty_like(x) for x in left]
            if targets := [x for x in copies if x is not None]:
                torch._foreach_copy_(targets, [x for x in left if x is not None])
        return copies


class _Graphed(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        outputs, ctx.number = plan.launch(tensors)
        places = plan.captured.backward.places
        ctx.mark_non_differentiable(*(x for n, x in enumerate(outputs) if n not in places))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.plan.launch_backward(ctx.number, gradients))
