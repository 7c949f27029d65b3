"""What a call passes: its tensors, and everything else as one key.

Calls with equal keys run the same Python code but for what tensors hold and how large they are.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from ._adapter import load_adapter
from ._function import parameters_of, tensors_of


class Structure(NamedTuple):
    """How leaves make up arguments. Where no argument holds others there is no tree."""

    positional: int
    keywords: tuple[str, ...]
    tree: pytree.TreeSpec | None

    def join(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.tree is not None:
            args, kwargs = pytree.tree_unflatten(leaves, self.tree)
            return args, kwargs
        if not self.keywords:
            return tuple(leaves), {}
        return (
            tuple(leaves[: self.positional]),
            dict(zip(self.keywords, leaves[self.positional :], strict=True)),
        )


class Call(NamedTuple):
    """The arguments of one call, taken apart.

    Attributes:
        tensors: Those of the leaves that are.
        shapes: Equal for calls whose tensors are alike in all but what they hold.
        constants: What is no tensor, each with its place.
    """

    structure: Structure
    leaves: Sequence[Any]
    tensors: list[Tensor]
    shapes: bytes
    constants: tuple[Hashable, ...]

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call with other tensors."""
        if len(tensors) == len(self.leaves):
            return self.structure.join(tensors)
        following = iter(tensors)
        return self.structure.join(
            [next(following) if isinstance(x, Tensor) else x for x in self.leaves]
        )


_SIMPLE = frozenset(
    (
        *(int, float, complex, bool, str, bytes, type(None)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)
_FIXED = (enum.Enum, type, types.FunctionType, types.BuiltinFunctionType)


def take_apart(args: tuple[Any, ...], kwargs: Mapping[str, Any], sort_keywords: bool) -> Call:
    """Takes a call apart.

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
    constants: tuple[Hashable, ...] = ()
    tensors, shapes = _shapes_of()(leaves)
    if len(tensors) < len(leaves):
        if any(not isinstance(x, Tensor) and type(x) not in _SIMPLE for x in leaves):
            named = {name: kwargs[name] for name in keywords}
            leaves, tree = pytree.tree_flatten((args, named))
            tensors, shapes = _shapes_of()(leaves)
            constants = _contexts(tree)
        constants += tuple(
            (place, _constant(x)) for place, x in enumerate(leaves) if not isinstance(x, Tensor)
        )
    return Call(Structure(len(args), keywords, tree), leaves, tensors, shapes, constants)


@functools.cache
def _shapes_of() -> Callable[[Sequence[Any]], tuple[list[Tensor], bytes]]:
    shapes_of: Callable[[Sequence[Any]], tuple[list[Tensor], bytes]] = load_adapter().shapes_of
    return shapes_of


def _contexts(tree: pytree.TreeSpec) -> tuple[Hashable, ...]:
    """Of all nodes: what they hold beside their children, as the keys of a dict."""
    below = (context for child in tree.children() for context in _contexts(child))
    return _context(tree.context), *below


def _context(context: Any) -> Hashable:
    if isinstance(context, (list, tuple)):
        return type(context), *map(_context, context)
    if isinstance(context, dict):
        return type(context), *((_context(key), _context(context[key])) for key in context)
    return _constant(context)


def _constant(leaf: Any) -> Hashable:
    """Equal for constants that are alike: 1 == 1.0 == True, and 0.0 == -0.0, are not."""
    kind = type(leaf)
    if kind is float or kind is complex:
        return kind, repr(leaf)
    if kind in _SIMPLE or isinstance(leaf, _FIXED):
        return kind, leaf
    raise TypeError(
        f"an argument holds a {kind.__name__}, and what it stands for may change between calls: a "
        "GraphRunner takes tensors and constants, in tuples, lists, dicts or what is registered "
        "with torch.utils._pytree. Let the function find other objects itself"
    )


def refuse_transforms(tensors: Sequence[Tensor], modules: Sequence[nn.Module]) -> None:
    """Raises RuntimeError where a replay would be lost on what looks at each operation.

    Arguments:
        tensors, modules: Which may have tangents.
    """
    has_tangents = forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in (*tensors, *tensors_of(modules))
    )
    in_transform = torch._C._functorch.peek_interpreter_stack() is not None or any(
        map(torch._C._functorch.is_legacy_batchedtensor, tensors)
    )
    if in_transform or has_tangents or torch.jit.is_tracing():
        raise RuntimeError(
            "a GraphRunner was called within a transform of torch.func, a trace or batched "
            "gradients, or with tensors that have forward-mode tangents: a graph has none of "
            "these. Transform the function, and let a GraphRunner run what comes of that"
        )


class Named(NamedTuple):
    """A leaf of a call."""

    parameter: str  # of the function; all of `*args` have the one
    path: str  # as an error names it: inputs['ids']


def name_leaves(function: Callable[..., Any], call: Call) -> list[Named]:
    """What the leaves of a call are called."""
    args, kwargs = call.structure.join(call.leaves)
    keywords = ((name, name) for name in call.structure.keywords)
    names = [*_positional_names(parameters_of(function), len(args)), *keywords]
    values = [*args, *(kwargs[name] for name in call.structure.keywords)]
    return [
        Named(parameter, name + path)
        for (parameter, name), value in zip(names, values, strict=True)
        for path, _ in flatten_named(value)
    ]


def flatten_named(tree: Any) -> list[tuple[str, Any]]:
    """Its leaves, each with where it is: ['ids'][0]. Numbers where a node does not say."""
    try:
        return [(pytree.keystr(path), x) for path, x in pytree.tree_flatten_with_path(tree)[0]]
    except ValueError:  # a node that was registered without names of what it holds
        return [(f"[{n}]", leaf) for n, leaf in enumerate(pytree.tree_leaves(tree))]


def _positional_names(parameters: Sequence[inspect.Parameter], count: int) -> list[tuple[str, str]]:
    """The parameter of each, and its own name: a parameter `*args` gives args[0], args[1], ..., as
    does what has no signature.
    """
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in by_position][:count]
    rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), "args")
    more = [(rest, f"{rest}[{n}]") for n in range(count - len(names))]
    return [(name, name) for name in names] + more
