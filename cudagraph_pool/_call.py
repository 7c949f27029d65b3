"""What a call passes: its tensors, and everything else as one key.

Calls with equal keys run the same Python code but for what tensors hold and how large they are.
"""

from __future__ import annotations

import enum
import inspect
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ._function import parameters_of


class Structure(NamedTuple):
    """How leaves make up arguments. Where no argument holds others there is no tree."""

    positional: int
    keywords: tuple[str, ...]
    tree: pytree.TreeSpec | None

    def join(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.tree is not None:
            args, kwargs = pytree.tree_unflatten(leaves, self.tree)
            return args, kwargs
        return (
            tuple(leaves[: self.positional]),
            dict(zip(self.keywords, leaves[self.positional :], strict=True)),
        )


class Call(NamedTuple):
    """The arguments of one call, taken apart.

    Attributes:
        tensors: Those of the leaves that are.
        shapes: For each leaf what of it decides how the call is run: equal for equal calls.
    """

    structure: Structure
    leaves: Sequence[Any]
    tensors: list[Tensor]
    shapes: list[Hashable]

    def constants(self, grad_enabled: bool) -> tuple[Hashable, ...]:
        """What is no tensor, each in its place, and which tensors get gradients."""
        return tuple(
            grad_enabled and leaf.requires_grad if isinstance(leaf, Tensor) else shape
            for leaf, shape in zip(self.leaves, self.shapes, strict=True)
        )

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call with other tensors."""
        following = iter(tensors)
        return self.structure.join(
            [next(following) if isinstance(x, Tensor) else x for x in self.leaves]
        )


_SIMPLE = frozenset(
    (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
)


def take_apart(args: tuple[Any, ...], kwargs: Mapping[str, Any], sort_keywords: bool) -> Call:
    """Takes a call apart. It is asked of every call, and so does what most need first.

    Arguments:
        sort_keywords: Whether the function cannot see in which order they come.

    Raises:
        TypeError: An argument is of a type whose meaning may change while it stays the same.
    """
    keywords: tuple[str, ...] = ()
    leaves: Sequence[Any] = args
    if kwargs:
        keywords = tuple(sorted(kwargs) if sort_keywords else kwargs)
        leaves = [*args, *map(kwargs.__getitem__, keywords)]
    tree = None
    for leaf in leaves:
        if not isinstance(leaf, Tensor) and type(leaf) not in _SIMPLE:
            named = {name: kwargs[name] for name in keywords}
            leaves, tree = pytree.tree_flatten((args, named))
            break
    tensors: list[Tensor] = []
    shapes: list[Hashable] = []
    for x in leaves:
        if isinstance(x, Tensor):
            if x.layout is not torch.strided or x.is_nested:
                raise TypeError(f"an argument is a {x.layout} tensor; a graph's must be strided")
            tensors.append(x)
            shapes.append((x.shape, x.stride(), x.dtype, x.device, x.requires_grad))
        else:
            shapes.append(_constant(x))
    return Call(Structure(len(args), keywords, tree), leaves, tensors, shapes)


def _constant(leaf: Any) -> Hashable:
    """Equal for constants that are alike: 1 == 1.0 == True, and 0.0 == -0.0, are not."""
    kind = type(leaf)
    if kind is float or kind is complex:
        return kind, repr(leaf)
    if kind in _SIMPLE or isinstance(leaf, (enum.Enum, type, types.FunctionType)):
        return kind, leaf
    raise TypeError(
        f"an argument holds a {kind.__name__}, and what it stands for may change between calls: a "
        "GraphRunner takes tensors and constants, in tuples, lists, dicts or what is registered "
        "with torch.utils._pytree. Let the function find other objects itself"
    )


class Named(NamedTuple):
    """A tensor of a call."""

    parameter: str  # of the function
    path: str  # as an error names it: inputs['ids']


def name_tensors(function: Callable[..., Any], call: Call) -> list[Named]:
    """What the tensors of a call are called."""
    args, kwargs = call.structure.join(call.leaves)
    names = [*_positional_names(parameters_of(function), len(args)), *call.structure.keywords]
    values = [*args, *(kwargs[name] for name in call.structure.keywords)]
    named = []
    for name, value in zip(names, values, strict=True):
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, Tensor):
                named.append(Named(name, name + pytree.keystr(path)))
    return named


def _positional_names(parameters: Sequence[inspect.Parameter], count: int) -> list[str]:
    """A parameter `*args` gives args[0], args[1], ..., as does what has no signature."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in by_position][:count]
    rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), "args")
    return names + [f"{rest}[{n}]" for n in range(count - len(names))]
