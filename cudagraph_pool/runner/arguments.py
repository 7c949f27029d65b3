"""What a call depends on: its tensors, and as a key everything else, with the module's weights."""

import enum
import functools
import inspect
import operator
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._adapter import load_adapter

_PLAIN = frozenset((Tensor, nn.Parameter))
_KIND = operator.attrgetter("requires_grad", "dtype", "device", "layout", "is_nested")
_SHAPE = operator.attrgetter("shape")
CONSTANTS = (
    *(int, bool, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(enum.Enum, type, types.FunctionType, types.BuiltinFunctionType),
)


class Call(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: Sequence[Tensor]  # in the order of torch.utils._pytree
    variant: Hashable  # what decides which Python code the function runs
    key: Hashable  # equal for calls that one graph runs alike

    def with_tensors(self, tensors: Iterable[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rest = iter(tensors)
        args, kwargs = pytree.tree_map_only(Tensor, lambda _: next(rest), (self.args, self.kwargs))
        return args, kwargs


class Signature:
    """What a function takes, and where its module's parameters and buffers are. It holds
    dictionaries, and no tensors: whoever moves weights away frees memory.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self.function = function
        self.parameters = _parameters_of(function)
        self._device_type = device.type
        kinds = {parameter.kind for parameter in self.parameters}
        self._sees_order = inspect.Parameter.VAR_KEYWORD in kinds or not kinds  # of keywords
        while isinstance(function, functools.partial):
            function = function.func
        module = getattr(function, "__self__", function)  # that a method is of
        parts = list(module.modules()) if isinstance(module, nn.Module) else []
        both = [members for part in parts for members in (part._parameters, part._buffers)]
        self._members = [members for members in both if isinstance(members, dict)]  # no TorchScript
        read = load_adapter().read_weights
        self._read_weights = functools.partial(read, self._members, [*map(vars, parts)])
        self._weights = b"", b""
        self._state: Any = None

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Before each replay. Raises TypeError for what is no plain tensor and no constant."""
        if kwargs and not self._sees_order:
            kwargs = dict(sorted(kwargs.items()))
        tensors: Sequence[Tensor] = (*args, *kwargs.values()) if kwargs else args
        constants: Hashable = ()
        if not _PLAIN.issuperset(map(type, tensors)):
            tensors, constants = self._flatten(args, kwargs)
        casts = torch.is_autocast_enabled(self._device_type)
        self._weights = addresses, flags = self._read_weights(self._weights)
        # Of weights types, who requires gradients, and which parts are in training are the flags.
        state = (
            *(len(args), tuple(kwargs), constants, flags, torch.is_grad_enabled()),
            casts and torch.get_autocast_dtype(self._device_type),
            *(addresses, *map(_KIND, tensors)),
        )
        # One object for all shapes: hundreds of keys would not stay in the processor's cache.
        if state != self._state:
            self._flatten(args, kwargs)  # looks closely at tensors
            self._variant = *state[:6], *(x.requires_grad for x in tensors)
            self._state = state
        return Call(args, kwargs, tensors, self._variant, (self._state, *map(_SHAPE, tensors)))

    def _flatten(self, args: Any, kwargs: dict[str, Any]) -> tuple[list[Tensor], Hashable]:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        try:
            others = [None if is_plain(x) else _constant(x, "an argument") for x in leaves]
            return [x for x in leaves if is_plain(x)], (_node(tree), *others)
        except TypeError:
            for path, leaf in self.named_leaves(args, kwargs):
                if not is_plain(leaf):
                    _constant(leaf, path)  # raises the error with the name
            raise

    def addresses(self) -> bytes:
        """Of the weights."""
        return bytes(self._read_weights(self._weights)[0])

    def weights(self) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        """Each weight, behind the dictionary and the name that keep it."""
        return ((own, name, x) for own in self._members for name, x in own.items() if x is not None)

    def named_leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        """The leaves of a call with their paths, as errors and options name them: inputs['ids']."""
        names = [p.name for p in self.parameters if p.kind < p.VAR_POSITIONAL]
        rest = next((p.name for p in self.parameters if p.kind is p.VAR_POSITIONAL), "args")
        names += [f"{rest}[{n}]" for n in range(len(args) - len(names))]
        values = [*zip(names, args, strict=False), *kwargs.items()]
        return [leaf for name, value in values for leaf in flatten_with_paths(value, name)]


def is_plain(value: Any) -> bool:
    """Whether it is a tensor that a graph can read, or leave, as it is."""
    return type(value) in _PLAIN and value.layout is torch.strided and not value.is_nested


def refuse(value: Any, path: str) -> NoReturn:
    """Raises TypeError for what is neither a plain tensor of the right device nor a constant."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        kind = f"{'nested ' * value.is_nested}{kind} of layout {value.layout} on {value.device}"
    raise TypeError(
        f"{path} holds a {kind}; a GraphRunner takes and returns plain strided tensors on "
        "the device of its pool, and constants"
    )


def flatten_with_paths(tree: Any, name: str) -> list[tuple[str, Any]]:
    """The leaves of what has a name, with their paths. A node without names has numbers."""
    try:
        paths = pytree.tree_flatten_with_path(tree)[0]
        return [(name + pytree.keystr(path), leaf) for path, leaf in paths]
    except ValueError:  # a node that was registered without names of what it holds
        return [(f"{name}[{n}]", leaf) for n, leaf in enumerate(pytree.tree_leaves(tree))]


def _node(tree: pytree.TreeSpec) -> Hashable:
    """What a tree and its nodes hold beside leaves."""
    return tree.type, _constant(tree.context, "an argument"), *map(_node, tree.children())


def _constant(value: Any, path: str) -> Hashable:
    """Equal for constants that are alike: 1 == 1.0 == True, and 0.0 == -0.0, are not."""
    kind = type(value)
    if kind is float or kind is complex:
        return kind, repr(value)
    if isinstance(value, CONSTANTS):
        return kind, value
    if isinstance(value, (list, tuple)):
        return kind, *(_constant(x, path) for x in value)
    if isinstance(value, dict):
        return kind, *(_constant(item, path) for item in value.items())
    refuse(value, path)


def _parameters_of(function: Any) -> list[inspect.Parameter]:
    """The parameters of a callable: of a module those of forward. Without a signature, none."""
    function = inspect.unwrap(function)
    bound = function if isinstance(function, functools.partial) else functools.partial(function)
    function = getattr(bound.func, "_orig_mod", bound.func)
    function = function.forward if isinstance(function, nn.Module) else function
    function = functools.partial(function, *bound.args, **bound.keywords)
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
