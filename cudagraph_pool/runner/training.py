"""The backward pass of a call: captured behind its forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .arguments import Weights, is_plain, require_plain
from .captures import Captures, Graph


class Backward:
    """The backward pass of a run, which may be a capture. It holds no weights.

    Attributes:
        places: Of the outputs that have gradients, among the leaves of what the function returned;
            none where these would reach neither an input nor a parameter.
        parameters: Where the module keeps those that get gradients: a dictionary, and the name.
        reached_from: For each input and parameter, the places that it gets a gradient from.
        graph: Of a capture.
        grad_outputs: What the graph reads.
        gradients: What the graph leaves for each input and parameter.
    """

    graph: Graph
    grad_outputs: Sequence[Tensor] = ()
    gradients: Sequence[Tensor | None] = ()

    def __init__(self, leaves: Sequence[Any], inputs: Sequence[Tensor], weights: Weights) -> None:
        outputs = {n: x for n, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad}
        reached = {n: _leaves_behind(x) for n, x in outputs.items() if torch.is_grad_enabled()}
        found = {key: x for each in reached.values() for key, x in each.items()}
        places = {id(x): (members, name) for members, name, x in weights.places() if id(x) in found}
        keys = [*map(id, inputs), *places]
        self.parameters = [*places.values()]
        self.reached_from = [{n for n in reached if key in reached[n]} for key in keys]
        self.places = [*reached] if any(self.reached_from) else []
        self._others = [x for key, x in found.items() if key not in keys]

    def refuse_others(self, inputs: Sequence[Tensor], weights: Weights, captures: Captures) -> None:
        """Raises ValueError for a tensor that should get gradients of a capture, and would not."""
        others, self._others = self._others, []
        memory = {address_of(x) for _, _, x in weights.places() if is_plain(x)}
        memory.update(map(address_of, inputs))
        for x in others:
            # What the function makes, or detaches from an input or a weight, is its own.
            if not is_plain(x) or not (address_of(x) in memory or captures.holds(x)):
                raise ValueError(
                    f"the outputs depend on a tensor of shape {(*x.shape,)} that requires "
                    "gradients and is neither an argument nor a parameter of the module. Pass the "
                    "module itself, a method of it, or the tensor; or call within torch.no_grad()"
                )

    def run(
        self, leaves: Sequence[Any], inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor]
    ) -> None:
        """Leaves the gradients of the inputs and parameters."""
        sources = [*inputs, *(members[name] for members, name in self.parameters)]
        wanted = [x for x, reached in zip(sources, self.reached_from, strict=True) if reached]
        found: Sequence[Tensor | None] = ()
        if wanted:
            outputs = [leaves[n] for n in self.places]
            # As after the function's own autocast: a backward pass does not choose types anew.
            with torch.autocast(outputs[0].device.type, enabled=False):
                found = torch.autograd.grad(outputs, wanted, grad_outputs, allow_unused=True)
        for x, gradient in zip(wanted, found, strict=True):
            if gradient is not None:
                require_plain(gradient, f"the gradient of shape {(*x.shape,)}", x.device)
        rest = iter(found)
        self.gradients = [next(rest) if reached else None for reached in self.reached_from]


def _leaves_behind(output: Tensor) -> dict[int, Tensor]:
    """The leaves whose gradients a backward pass accumulates, by id."""
    if output.grad_fn is None:
        return {id(output): output}
    leaves: dict[int, Tensor] = {}
    waiting, seen = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            leaves[id(node.variable)] = node.variable
        waiting += [following for following, _ in node.next_functions if following is not None]
    return leaves


def address_of(tensor: Tensor) -> int:
    """The address of the memory that a tensor lies in."""
    address: int = tensor.untyped_storage().data_ptr()
    return address
