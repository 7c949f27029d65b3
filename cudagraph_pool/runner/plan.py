"""How calls of one shape are replayed, their backward passes included."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._guard import is_guarded, mark_output
from ..sizes import Size, shown
from .arguments import refuse_transforms
from .captures import Span
from .inputs import Copies, cut
from .program import Captured, Program

_SAMPLES = 3  # replays that are timed, for each size


class Plan:
    """What is decided once for all calls of a shape."""

    def __init__(self, program: Program, captured: Captured, size: Size) -> None:
        assert program.cuts is not None
        self.captured = captured
        self.what = f"of size {shown(size)} in the graph of {shown(captured.cost.size)}"
        self.assemble = functools.partial(pytree.tree_unflatten, treespec=captured.tree)
        self._captures = program.setup.captures
        self._weights = program.setup.weights
        self._written = [*captured.statics]
        self._copies = Copies(program.inputs, captured.statics, size)
        self._leaves = [
            cut(leaf, dims, size) if isinstance(leaf, Tensor) else leaf
            for leaf, dims in zip(captured.leaves, program.cuts.dims, strict=True)
        ]
        self.tensor_places = [n for n, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        if captured.backward is not None:
            inputs, statics = zip(*captured.backward.grad_outputs, strict=True)
            self._written += statics
            self._gradient_copies = Copies(inputs, statics, size)
            self._gradients = list(captured.backward.gradients)
            for n, given in enumerate(program.inputs):
                gradient = self._gradients[n]
                self._gradients[n] = None if gradient is None else cut(gradient, given.dims, size)

    def run(self, tensors: Sequence[Tensor], clone: bool) -> list[Any]:
        """Replays the graph for a call, and returns the leaves of what belongs to it."""
        backward = self.captured.backward
        if backward is None:
            return self.launch(tensors, clone)[0]
        parameters = (members[name] for members, name in backward.parameters)
        outputs = iter(_Graphed.apply(self, clone, *tensors, *parameters))
        return [next(outputs) if isinstance(x, Tensor) else x for x in self._leaves]

    def launch(self, tensors: Sequence[Tensor], clone: bool) -> tuple[list[Any], int]:
        """The forward pass; returns its leaves, and its number among the pool's replays."""
        captured, order = self.captured, self._captures.order
        leaves = list(self._leaves)
        with order.lock, torch.no_grad():
            self._captures.follow(self._written, captured.streams)
            number = order.begin(self.what)
            self._copies(tensors)
            order.overwrite(captured.owner)
            torch._C._increment_version(captured.changed)
            if len(captured.samples) < _SAMPLES:
                captured.samples.append(self._replay_noted(captured.forward))
            else:
                captured.forward.replay()
            for place in self.tensor_places:
                leaf = leaves[place].clone() if clone else leaves[place].detach()
                leaves[place] = mark_output(leaf, order, number) if is_guarded() else leaf
            captured.read_then = [x._version for x in captured.read]
        return leaves, number

    def launch_backward(
        self, number: int, by_place: Mapping[int, Tensor | None]
    ) -> list[Tensor | None]:
        """The backward pass of the call with that number; returns the gradients of inputs and
        parameters.

        Raises:
            RuntimeError: There were other calls since, or what it reads was changed.
        """
        captured, order, backward = self.captured, self._captures.order, self.captured.backward
        assert backward is not None
        with order.lock, torch.no_grad():
            if order.number != number or not order.left(captured.owner):
                raise RuntimeError(
                    f"the backward pass of call {number} of its pool, {self.what}, came after "
                    f"call {order.number}, {order.what}, which has overwritten what it needs: "
                    "run it before the next call"
                )
            versions = [x._version for x in captured.read]
            if versions != captured.read_then or captured.addresses != self._weights.read()[0]:
                raise RuntimeError(
                    f"an output of call {number}, {self.what}, or a parameter, a buffer or "
                    "another tensor that the function reads was changed in place or replaced "
                    "before the backward pass, which reads it: change it after that. Outputs of a "
                    "GraphRunner with clone_outputs=True may be changed at once"
                )
            self._captures.follow(self._written, captured.streams)
            given = {place: by_place[place] for place in backward.places}
            undefined = {place for place, x in given.items() if x is None}
            zeros = {place: torch.zeros_like(self._leaves[place]) for place in undefined}
            self._gradient_copies([*(given | zeros).values()])
            if backward.graph in captured.replayed:
                backward.graph.replay()
            else:
                self._replay_noted(backward.graph)
            # What only outputs without a gradient lead to gets none either, as in eager.
            left = zip(self._gradients, backward.reached_from, strict=True)
            return _copies([None if reached <= undefined else x for x, reached in left])

    def _replay_noted(self, graph: Any) -> Span:
        """Replays a graph between marks. At its first replay the driver makes an executable, whose
        memory is noted.
        """
        captured, captures = self.captured, self._captures
        used = None if graph in captured.replayed else captures.device_bytes()
        began = captures.mark()
        graph.replay()
        ended = captures.mark()
        if used is not None:
            more = max(0, captures.device_bytes() - used)
            captured.cost = replace(captured.cost, driver_bytes=captured.cost.driver_bytes + more)
            captured.replayed.append(graph)
        return began, ended


def _copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copies of gradients, which the next replay overwrites: whoever gets them may keep them."""
    copies = [None if tensor is None else torch.empty_like(tensor) for tensor in tensors]
    targets = [copy for copy in copies if copy is not None]
    if targets:
        torch._foreach_copy_(targets, [tensor for tensor in tensors if tensor is not None])
    return copies


class _Graphed(torch.autograd.Function):  # type: ignore[misc]
    """A call whose backward pass is a graph too."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, clone: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        ctx.is_done = False
        leaves, ctx.number = plan.launch(tensors, clone)
        # Where a checkpoint runs the call again, what is unpacked is the number of that one.
        ctx.is_packed = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if ctx.is_packed:
            ctx.save_for_backward(torch.tensor(ctx.number, device="cpu"))
        backward = plan.captured.backward
        assert backward is not None
        outputs = {place: leaves[place] for place in plan.tensor_places}
        others = outputs.keys() - set(backward.places)
        ctx.mark_non_differentiable(*(outputs[place] for place in others))
        return tuple(outputs.values())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_transforms([x for x in gradients if x is not None])
        plan: Plan = ctx.plan
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True asks for second derivatives, but the backward pass of a "
                "GraphRunner's call is a graph, which cannot be differentiated again: capture what "
                "needs them together with its gradients"
            )
        if ctx.is_done:
            raise RuntimeError(
                f"the backward pass of call {ctx.number}, {plan.what}, has run already, and has "
                "overwritten what it needs: it runs once, also with retain_graph=True"
            )
        number = int(ctx.saved_tensors[0]) if ctx.is_packed else ctx.number
        by_place = dict(zip(plan.tensor_places, gradients, strict=True))
        launched = plan.launch_backward(number, by_place)
        ctx.is_done = True
        return (None, None, *launched)
