"""The backward pass of a call: captured behind its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .arguments import Weights, is_plain
from .captures import Captures
from .inputs import Input


@dataclass(slots=True, eq=False)
class Backward:
    """The captured backward pass of a size."""

    graph: Any
    places: list[int]  # of the outputs that have gradients, among the leaves
    grad_outputs: list[tuple[Input, Tensor]]  # where the graph reads these
    parameters: list[tuple[dict[str, Any], str]]  # where the module keeps those that get gradients
    gradients: list[Tensor | None]  # what it leaves for inputs and parameters
    reached_from: list[set[int]]  # of each of these the places that it comes from


class SavedTensors:
    """What a backward pass reads of what autograd has saved. A tensor is noted when it is read,
    since branches that lead to no gradient save tensors as well.
    """

    def __init__(self, captures: Captures, inputs: Iterable[Tensor], weights: Iterable[Tensor]):
        self.addresses: set[int] = set()  # of the memory it lies in
        self.elsewhere: dict[tuple[int, int], Tensor] = {}  # neither in inputs nor in the pool
        self._captures = captures
        self._inputs = {address_of(tensor) for tensor in inputs}
        self._weights = {address_of(tensor) for tensor in weights if is_plain(tensor)}

    def noting(self) -> Any:
        """Notes what autograd saves within, once it is read. Without its history, or the hooks
        would keep that, and be kept by it.
        """
        return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, self._note)

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
    gradient_buffers: Callable[[int, Tensor], tuple[Input, Tensor]],
) -> Backward | None:
    """Captures the backward pass of what was captured last; None where nothing gets gradients.

    Arguments:
        leaves: What the function returned.
        found_before: What the outputs of warm-ups depended on, by id.
        gradient_buffers: Gives what it reads the gradient of a leaf from.
    """
    outputs = {n: x for n, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad}
    if not outputs or not torch.is_grad_enabled():
        return None
    reached = {n: {id(x) for x in find_leaves([output])} for n, output in outputs.items()}
    found_at = {id(x): (members, name) for members, name, x in weights.places()}
    parameters: list[Tensor] = []
    for leaf in find_leaves(outputs.values()):
        shape = tuple(leaf.shape)
        if id(leaf) in found_at:
            parameters.append(leaf)
            if leaf._backward_hooks:
                raise ValueError(
                    f"a parameter of shape {shape} has a hook, which would become part of the "
                    "graph and run a second time beside it: register hooks after the capture, or "
                    "with register_post_accumulate_grad_hook"
                )
        elif id(leaf) in found_before and not any(leaf is x for x in inputs):
            # What the function makes itself is another tensor each time.
            raise ValueError(
                f"the outputs depend on a tensor of shape {shape} that requires gradients and is "
                "neither an argument nor a parameter of the module: they would not reach it. Pass "
                "the module itself or a method of it to GraphRunner, pass the tensor as an "
                "argument, or call within torch.no_grad()"
            )
    sources = [*inputs, *parameters]
    wanted = [x for x in sources if x.requires_grad]
    if not wanted:
        return None
    grad_outputs = [gradient_buffers(n, output) for n, output in outputs.items()]
    grads = [static for _, static in grad_outputs]
    gradients: list[Tensor | None] = []

    def run() -> None:
        # As after the function's own autocast: a backward pass does not choose types anew.
        with torch.autocast(captures.device.type, enabled=False):
            found = torch.autograd.grad([*outputs.values()], wanted, grads, allow_unused=True)
        rest = iter(found)
        gradients.extend(next(rest) if x.requires_grad else None for x in sources)

    graph = captures.capture(run)
    reached_from = [{n for n in outputs if id(x) in reached[n]} for x in sources]
    places = [found_at[id(x)] for x in parameters]
    return Backward(graph, [*outputs], grad_outputs, places, gradients, reached_from)


def find_leaves(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The leaves whose gradients a backward pass accumulates, whether arguments or not."""
    leaves: list[Any] = []
    waiting: list[Any] = []
    for output in outputs:
        (leaves if output.grad_fn is None else waiting).append(output.grad_fn or output)
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
    """The address of the memory that a tensor lies in."""
    address: int = tensor.untyped_storage().data_ptr()
    return address
