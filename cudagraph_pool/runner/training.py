"""The backward pass of a call: captured behind its forward pass, and replayed by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .arguments import is_plain, refuse_transforms
from .captures import Captures
from .inputs import Input, Static
from .weights import Weights

# Makes what a backward pass reads its gradients from: of the leaves with these numbers.
GradientBuffers = Callable[[Sequence[int], Sequence[Tensor]], list[tuple[Input, Static]]]


@dataclass(slots=True, eq=False)
class Backward:
    """The captured backward pass of a size.

    Attributes:
        places: The outputs that have gradients, as numbers of leaves.
        grad_outputs: Where the graph reads these.
        parameters: Where the module keeps its parameters that get gradients.
        gradients: What the graph leaves for inputs and parameters; None for one that gets none.
        reached_from: Of each of these the outputs that it comes from.
    """

    graph: Any
    places: list[int]
    grad_outputs: list[tuple[Input, Static]]
    parameters: list[tuple[dict[str, Tensor], str]]
    gradients: list[Tensor | None]
    reached_from: list[set[int]]


class SavedTensors:
    """What a backward pass reads of what autograd has saved for it. It is noted when it is read: a
    branch that leads to no gradient saves as well.
    """

    def __init__(self, captures: Captures, inputs: Iterable[Tensor], weights: Iterable[Tensor]):
        self.addresses: set[int] = set()  # of the memory it lies in
        self.elsewhere: dict[tuple[int, int], Tensor] = {}  # neither in inputs nor in the pool
        self._captures = captures
        self._inputs = {address_of(tensor) for tensor in inputs}
        self._weights = {address_of(tensor) for tensor in weights if is_plain(tensor)}

    def noting(self) -> AbstractContextManager[Any]:
        """Notes what autograd saves within, once it is read. Without its history, or the hooks
        would keep that, and be kept by it.
        """
        hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(
            Tensor.detach, self._note
        )
        return hooks

    def _note(self, tensor: Tensor) -> Tensor:
        if is_plain(tensor):
            address = address_of(tensor)
            self.addresses.add(address)
            is_weight = address in self._weights  # which may lie in the pool
            if is_weight or not (address in self._inputs or self._captures.holds(tensor)):
                # Tensors of one memory may count their changes apart.
                self.elsewhere.setdefault((tensor.data_ptr(), tensor.numel()), tensor)
        return tensor


def capture_backward(
    captures: Captures,
    weights: Weights,
    inputs: list[Tensor],
    leaves: list[Any],
    found_before: Mapping[int, Tensor],
    gradient_buffers: GradientBuffers,
) -> Backward | None:
    """Captures the backward pass of what was captured last; None where nothing gets gradients.

    Arguments:
        leaves: What the function returned.
        found_before: What the outputs of warm-ups depended on, by id.

    Raises:
        ValueError: Something that was not passed would get gradients, or a parameter has a hook.
    """
    places = [n for n, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    if not places or not torch.is_grad_enabled():
        return None
    reached = {n: {id(x) for x in find_leaves([leaves[n]])} for n in places}
    homes = weights.places()
    parameters: list[Tensor] = []
    for leaf in find_leaves([leaves[n] for n in places]):
        if id(leaf) in homes:
            parameters.append(leaf)
        elif not any(leaf is x for x in inputs) and found_before.get(id(leaf)) is leaf:
            raise ValueError(
                f"the outputs depend on a tensor of shape {tuple(leaf.shape)} that requires gradients "
                "and is neither an argument nor a parameter of the module: they would not reach "
                "it. Pass the module itself or a method of it to GraphRunner, pass the tensor as "
                "an argument, or call within torch.no_grad()"
            )
    for parameter in parameters:
        if parameter._backward_hooks:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} has a hook, which would become "
                "part of the graph and run a second time beside it: register hooks after the "
                "capture, or with register_post_accumulate_grad_hook"
            )
    sources = [*inputs, *parameters]
    wanted = [x for x in sources if x.requires_grad]
    if not wanted:
        return None
    outputs = [leaves[n] for n in places]
    grad_outputs = gradient_buffers(places, outputs)
    gradients: list[Tensor | None] = []

    def run() -> None:
        # As after the function's own autocast: a backward pass does not choose types anew.
        with torch.autocast(captures.device.type, enabled=False):
            grads = [static.tensor for _, static in grad_outputs]
            gradients.extend(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))

    graph = captures.capture(run)
    following = iter(gradients)
    return Backward(
        graph,
        places,
        grad_outputs,
        [homes[id(x)] for x in parameters],
        [next(following) if x.requires_grad else None for x in sources],
        [{n for n in places if id(x) in reached[n]} for x in sources],
    )


def find_leaves(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The leaves whose gradients a backward pass accumulates, whether arguments or not."""
    leaves = [output for output in outputs if output.grad_fn is None]
    waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return list({id(leaf): leaf for leaf in leaves}.values())


def address_of(tensor: Tensor) -> int:
    """Of the memory that it lies in."""
    address: int = tensor.untyped_storage().data_ptr()
    return address


class Graphed(torch.autograd.Function):  # type: ignore[misc]
    """A call whose backward pass is a graph too."""

    @staticmethod
    def forward(ctx: Any, plan: Any, clone: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        ctx.is_done = False
        leaves, ctx.number = plan.launch(tensors, clone)
        # Where a checkpoint runs the call again, what is unpacked is the number of that one.
        ctx.is_packed = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if ctx.is_packed:
            ctx.save_for_backward(torch.tensor(ctx.number, device="cpu"))
        outputs = {place: leaves[place] for place in plan.tensor_places}
        places = plan.captured.backward.places
        ctx.mark_non_differentiable(*(x for n, x in outputs.items() if n not in places))
        return tuple(outputs.values())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_transforms([x for x in gradients if x is not None])
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True asks for second derivatives, but the backward pass of a "
                "GraphRunner's call is a graph, which cannot be differentiated again: capture what "
                "needs them together with its gradients"
            )
        plan = ctx.plan
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
