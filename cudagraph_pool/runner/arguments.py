"""What a call depends on: its tensors, and as a key everything else, with the module's weights.

Calls with equal keys run the same Python code but for what tensors hold and how large they are.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from .._adapter import load_adapter

_PLAIN = frozenset((Tensor, nn.Parameter))
_CONSTANTS = (
    *(int, bool, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(enum.Enum, type, types.FunctionType, types.BuiltinFunctionType),
)
Parameters = Sequence[inspect.Parameter]


class Call(NamedTuple):
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: Sequence[Tensor]  # in the order of torch.utils._pytree
    variant: Hashable  # what decides which Python code the function runs
    shapes: Hashable  # equal for calls whose tensors are alike in all but what they hold

    def with_tensors(self, tensors: Iterable[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments with other tensors."""
        rest = iter(tensors)
        leaves, tree = pytree.tree_flatten((self.args, self.kwargs))
        leaves = [next(rest) if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        return args, kwargs


def read_call(args: tuple[Any, ...], kwargs: dict[str, Any], parameters: Parameters) -> Call:
    """Reads a call. It runs before each replay: it is short where all arguments are tensors.

    Raises:
        TypeError: An argument is neither a plain strided tensor nor a constant.
    """
    tensors: Sequence[Tensor] = (*args, *kwargs.values()) if kwargs else args
    constants: Hashable = ()
    if not _PLAIN.issuperset(map(type, tensors)):
        leaves, tree = pytree.tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        try:
            others = tuple(None if isinstance(x, Tensor) else _constant(x) for x in leaves)
            constants = _node(tree), others
        except _NotConstantError as error:
            found = error.args[0]
            raise TypeError(
                f"{_path_of(found, parameters, args, kwargs)} holds a {type(found).__name__}, and "
                "what it stands for may change between calls: a GraphRunner takes tensors and "
                "constants, in tuples, lists, dicts or what is registered with "
                "torch.utils._pytree. Let the function find other objects itself"
            ) from None
    for x in tensors:
        if not is_plain(x):
            require_plain(x, _path_of(x, parameters, args, kwargs))
    variant = len(args), tuple(kwargs), constants, tuple([x.requires_grad for x in tensors])
    return Call(
        args, kwargs, tensors, variant, tuple([(x.shape, x.dtype, x.device) for x in tensors])
    )


def is_plain(tensor: Tensor) -> bool:
    """Whether a graph can read it, or leave it, as it is."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def require_plain(tensor: Tensor, what: str) -> None:
    """Raises TypeError for a tensor that is not plain."""
    if not is_plain(tensor):
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
    tensors: Sequence[Tensor], weights: Callable[[], Iterable[Tensor]] = list
) -> None:
    """Raises RuntimeError where a replay would be lost on what looks at each operation."""
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
    """What a leaf of a call is called."""

    parameter: str  # of the function; all of `*args` have the one
    path: str  # as an error names it: inputs['ids']


def named_leaves(
    parameters: Parameters, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[Name, Any]]:
    """The leaves of a call. `*args` gives args[0], args[1], ..., as does what has no signature."""
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    values = [(name, name, value) for name, value in zip(names, args, strict=False)]
    values += [(rest, f"{rest}[{n}]", value) for n, value in enumerate(args[len(names) :])]
    values += [(name, name, value) for name, value in kwargs.items()]
    return [
        (Name(parameter, name + path), leaf)
        for parameter, name, value in values
        for path, leaf in flatten_with_paths(value)
    ]


def _path_of(leaf: Any, *call: Any) -> str:
    return next((name.path for name, x in named_leaves(*call) if x is leaf), "an argument")


def flatten_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree, each with its path: ['ids'][0]. A node without names has numbers."""
    try:
        return [(pytree.keystr(path), x) for path, x in pytree.tree_flatten_with_path(tree)[0]]
    except ValueError:  # a node that was registered without names of what it holds
        return [(f"[{n}]", leaf) for n, leaf in enumerate(pytree.tree_leaves(tree))]


def parameters_of(function: Any) -> Parameters:
    """The parameters of a callable: of a module those of forward. Without a signature, none."""
    function = inspect.unwrap(function)
    bound = function if isinstance(function, functools.partial) else functools.partial(function)
    function = getattr(bound.func, "_orig_mod", bound.func)
    function = function.forward if isinstance(function, nn.Module) else function
    try:
        signature = inspect.signature(functools.partial(function, *bound.args, **bound.keywords))
    except (TypeError, ValueError):
        return []
    return list(signature.parameters.values())


class Weights:
    """Where the parameters and buffers of a module are. It holds the dictionaries of the module's
    parts, and no tensors: whoever moves weights away gets their memory back.
    """

    def __init__(self, function: Any) -> None:
        while isinstance(function, functools.partial):
            function = function.func
        module = getattr(function, "__self__", function)  # that a method is of
        parts = list(module.modules()) if isinstance(module, nn.Module) else []
        both = [members for part in parts for members in (part._parameters, part._buffers)]
        self._members = [members for members in both if isinstance(members, dict)]  # no TorchScript
        self._attributes = [vars(part) for part in parts]
        self._read = load_adapter().read_weights

    def read(self) -> tuple[bytes, bytes]:
        """The addresses, and flags: types, who requires gradients, which parts are in training."""
        addresses, flags = self._read(self._members, self._attributes)
        return addresses, flags

    def places(self) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        """Each tensor, behind the dictionary and the name that keep it."""
        for members in self._members:
            yield from ((members, name, x) for name, x in members.items() if x is not None)

    def tensors(self) -> list[Tensor]:
        return [tensor for _, _, tensor in self.places()]
