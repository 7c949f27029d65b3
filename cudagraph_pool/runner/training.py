"""The backward pass of a call: captured behind its forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .arguments import Weights, is_plain, require_plain
from .captures import Captures
from .report import Measured


@dataclass(slots=True, eq=False)
class Backward:
    """The captured backward pass of a size."""

    graph: Measured
    places: list[int]  # of the outputs that have gradients, among the leaves
    grad_outputs: list[Tensor]  # where the graph reads these
    parameters: list[tuple[dict[str, Any], str]]  # where the module keeps those that get gradients
    gradients: list[Tensor | None]  # what it leaves for inputs and parameters
    reached_from: list[set[int]]  # of each of these the places that it comes from


class BackwardPass:
    """What follows a run of a function that returned ``leaves``. It is empty where nothing that an
    output depends on gets gradients: neither an input nor a parameter.
    """

    def __init__(self, leaves: Sequence[Any], inputs: Sequence[Tensor], weights: Weights) -> None:
        outputs = {n: x for n, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad}
        reached = {n: _leaves_behind(x) for n, x in outputs.items()}
        found = {key: x for each in reached.values() for key, x in each.items()}
        places = {id(x): (members, name) for members, name, x in weights.places() if id(x) in found}
        self.parameters = [*places.values()]
        self.sources = [*inputs, *map(found.__getitem__, places)]
        self.reached_from = [{n for n in reached if id(x) in reached[n]} for x in self.sources]
        is_used = torch.is_grad_enabled() and any(self.reached_from)
        self.outputs = outputs if is_used else {}
        known = set(map(id, self.sources))
        self._others = [x for key, x in found.items() if key not in known]
        self._memory = {address_of(x) for _, _, x in weights.places() if is_plain(x)}
        self._memory.update(map(address_of, inputs))

    def run(self, grad_outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the inputs and parameters."""
        wanted = [x for x, reached in zip(self.sources, self.reached_from, strict=True) if reached]
        outputs = [*self.outputs.values()]
        # As after the function's own autocast: a backward pass does not choose types anew.
        with torch.autocast(outputs[0].device.type, enabled=False):
            found = torch.autograd.grad(outputs, wanted, grad_outputs, allow_unused=True)
        for x, gradient in zip(wanted, found, strict=True):
            if gradient is not None:
                require_plain(gradient, f"the gradient of a tensor of shape {(*x.shape,)}")
        rest = iter(found)
        return [next(rest) if reached else None for reached in self.reached_from]

    def refuse_others(self, captures: Captures) -> None:
        """Raises ValueError for a tensor that requires gradients, and would not get them. What the
        function makes itself, or detaches from an input or a weight, is none of these.
        """
        for x in self._others if torch.is_grad_enabled() else ():
            if not is_plain(x) or not (address_of(x) in self._memory or captures.holds(x)):
                raise ValueError(
                    f"the outputs depend on a tensor of shape {(*x.shape,)} that requires "
                    "gradients and is neither an argument nor a parameter of the module: they "
                    "would not reach it. Pass the module itself or a method of it to GraphRunner, "
                    "pass the tensor as an argument, or call within torch.no_grad()"
                )


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
