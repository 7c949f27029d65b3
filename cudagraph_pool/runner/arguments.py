"""The arguments of a call: its tensors, and everything else as a key.

Calls with equal keys run the same Python code but for what tensors hold and how large they are.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

_PLAIN = frozenset((Tensor, nn.Parameter))
_CONSTANTS = (
    *(int, bool, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(enum.Enum, type, types.FunctionType, types.BuiltinFunctionType),
)
Parameters = Sequence[inspect.Parameter]


class Call(NamedTuple):
    """The arguments of one call.

    Attributes:
        tensors: In the order of :mod:`torch.utils._pytree`.
        way: What decides, of the arguments, which Python code the function runs.
        shapes: Equal for calls whose tensors are alike in all but what they hold.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: Sequence[Tensor]
    way: Hashable
    shapes: Hashable

    def with_tensors(self, tensors: Iterable[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments with other tensors."""
        rest = iter(tensors)
        leaves, tree = pytree.tree_flatten((self.args, self.kwargs))
        leaves = [next(rest) if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        return args, kwargs


def read_call(args: tuple[Any, ...], kwargs: dict[str, Any], parameters: Parameters) -> Call:
    """Reads a call. It runs before each replay, so it is short where all arguments are tensors.

    Arguments:
        parameters: Of the function, for errors.

    Raises:
        TypeError: An argument is neither a plain strided tensor nor a constant.
    """
    tensors: Sequence[Tensor] = (*args, *kwargs.values()) if kwargs else args
    constants: Hashable = ()
    if not _PLAIN.issuperset(map(type, tensors)):
        leaves, tree = pytree.tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        try:
            others = enumerate(leaves)
            constants = (
                _node(tree),
                *((n, _constant(x)) for n, x in others if not isinstance(x, Tensor)),
            )
        except _NotConstantError as error:
            found = error.args[0]
            names = named_leaves(parameters, args, kwargs)
            path = next((name.path for name, x in names if x is found), "an argument")
            raise TypeError(
                f"{path} holds a {type(found).__name__}, and what it stands for may change between "
                "calls: a GraphRunner takes tensors and constants, in tuples, lists, dicts or what "
                "is registered with torch.utils._pytree. Let the function find other objects itself"
            ) from None
    for x in tensors:
        if not is_plain(x):
            names = named_leaves(parameters, args, kwargs)
            require_plain(x, next(name.path for name, leaf in names if leaf is x))
    way = len(args), tuple(kwargs), constants, tuple([x.requires_grad for x in tensors])
    return Call(args, kwargs, tensors, way, tuple([(x.shape, x.dtype, x.device) for x in tensors]))


def is_plain(tensor: Tensor) -> bool:
    """Whether a graph can read it, or leave it, as it is."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def require_plain(tensor: Tensor, what: str) -> None:
    """Raises TypeError for a tensor that is not plain."""
    if is_plain(tensor):
        return
    kind = f"a {type(tensor).__name__}"
    if type(tensor) in _PLAIN:
        kind = "a nested tensor" if tensor.is_nested else f"of layout {tensor.layout}"
    raise TypeError(f"{what} is {kind}; a GraphRunner takes and returns plain strided tensors")


class _NotConstantError(Exception):
    pass


def _node(tree: pytree.TreeSpec) -> Hashable:
    """What a tree and its nodes hold beside leaves."""
    return tree.type, _constant(tree.context), *map(_node, tree.children())


def _constant(value: Any) -> Hashable:
    """Equal for constants that are alike: 1 == 1.0 == True, and 0.0 == -0.0, are not."""
    kind = type(value)
    if kind is float or kind is complex:
        return kind, repr(value)
    if isinstance(value, _CONSTANTS):
        return kind, value
    if isinstance(value, (list, tuple)):
        return kind, *map(_constant, value)
    if isinstance(value, dict):
        return kind, *((_constant(key), _constant(value[key])) for key in value)
    raise _NotConstantError(value)


def refuse_transforms(
    tensors: Sequence[Tensor], weights: Callable[[], list[Tensor]] = list
) -> None:
    """Raises RuntimeError where a replay would be lost on what looks at each operation.

    Arguments:
        tensors, weights: Which may have tangents.
    """
    is_one = torch._C._functorch.peek_interpreter_stack() is not None
    is_one = is_one or any(map(torch._C._functorch.is_legacy_batchedtensor, tensors))
    if forward_ad._current_level >= 0:
        tangents = (forward_ad.unpack_dual(x).tangent for x in (*tensors, *weights()))
        is_one = is_one or any(tangent is not None for tangent in tangents)
    if is_one or torch._C._get_tracing_state() is not None:
        raise RuntimeError(
            "a GraphRunner was called within a transform of torch.func, a trace or batched "
            "gradients, or with tensors that have forward-mode tangents: a graph has none of "
            "these. Transform the function, and let a GraphRunner run what comes of that"
        )


class Name(NamedTuple):
    """Of a leaf of a call."""

    parameter: str  # of the function; all of `*args` have the one
    path: str  # as an error names it: inputs['ids']


def named_leaves(
    parameters: Parameters, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[Name, Any]]:
    """The leaves of a call. `*args` gives args[0], args[1], ..., as does what has no signature."""
    names = [
        (p.name, p.name)
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    more = [(rest, f"{rest}[{n}]") for n in range(len(args) - len(names))]
    names = [*names[: len(args)], *more, *((name, name) for name in kwargs)]
    return [
        (Name(parameter, name + path), leaf)
        for (parameter, name), value in zip(names, (*args, *kwargs.values()), strict=True)
        for path, leaf in flatten_with_paths(value)
    ]


def flatten_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """Its leaves, each with where it is: ['ids'][0]. Numbers where a node does not say."""
    try:
        return [(pytree.keystr(path), x) for path, x in pytree.tree_flatten_with_path(tree)[0]]
    except ValueError:  # a node that was registered without names of what it holds
        return [(f"[{n}]", leaf) for n, leaf in enumerate(pytree.tree_leaves(tree))]


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """Those of forward of a module, also of a compiled one. None of what has no signature."""
    try:
        return list(inspect.signature(_signed(function)).parameters.values())
    except (TypeError, ValueError):
        return []


def _signed(function: Callable[..., Any]) -> Callable[..., Any]:
    """What has the signature: a module has it where its forward does, wrapped or not."""
    function = inspect.unwrap(function)
    if isinstance(function, functools.partial):
        return functools.partial(_signed(function.func), *function.args, **function.keywords)
    if isinstance(function, nn.Module):
        forward: Callable[..., Any] = getattr(function, "_orig_mod", function).forward
        return forward
    return function
