"""What is called: its module, whose tensors its graphs read, and its parameters."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ._adapter import load_adapter

if TYPE_CHECKING:
    from . import _torch


# What modules may be found in; and in the attributes of other objects.
_CONTAINERS = (list, tuple, dict)
_FOLLOWED = (
    *(nn.Module, Tensor, *_CONTAINERS, functools.partial),
    *(types.FunctionType, types.MethodType),
)


def watch(modules: Sequence[nn.Module]) -> _torch.WeightWatch:
    """Knows where the parameters and buffers of modules are: its flags are None if one has moved.

    They move when a module is converted or sent to another device, when a part of it, a parameter
    or the ``data`` of one is replaced, added or removed; not when they are trained. The memory of
    what wraps other tensors, as quantized and distributed ones do, is theirs.
    """
    parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
    homes = [_as_dict(home) for part in parts for home in (part._parameters, part._buffers)]
    made: _torch.WeightWatch = load_adapter().WeightWatch(
        [_as_dict(part._modules) for part in parts],
        [*homes, *_wrapped_in(tensor for home in homes for tensor in home.values())],
        [vars(part) for part in parts],
    )
    return made


def scripted(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Parts of TorchScript, which keeps out of Python's sight whether they are in training; of
    those that are frozen nobody asks.
    """
    parts = (part for module in modules for part in module.modules())
    kind = torch.jit.ScriptModule
    return [part for part in parts if isinstance(part, kind) and hasattr(part, "training")]


def tensors_of(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Parameters and buffers, each once."""
    found = (x for module in modules for x in (*module.parameters(), *module.buffers()))
    return list(dict.fromkeys(found))


def _wrapped_in(tensors: Iterable[Any]) -> list[dict[str, Any]]:
    """Where those that wrap others keep them, and these likewise; of one with slots what they are
    now.
    """
    found: list[dict[str, Any]] = []
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            own = vars(tensor)
            inner = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
            found += [own if own.keys() >= inner.keys() else inner, *_wrapped_in(inner.values())]
    return found


def unwrapped(tensor: Tensor) -> list[Tensor]:
    """The tensor, or those that it wraps, and these likewise."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [part for x in inner for part in unwrapped(x)]


def modules_of(function: Any) -> list[nn.Module]:
    """The module that a callable is or is a method of, or those that it refers to: in its closure,
    its defaults, among its globals, its bound arguments or the attributes of its object; in lists
    and the like of these, by an attribute that its code names, or by a function of its file. Also
    of one that is wrapped, as by ``torch.no_grad()`` or ``torch.compile``; and those that modules
    refer to without torch's knowing: in their forward and hooks, by an attribute or in a list to
    hide them. Tensors that functions refer to are buffers of one module more: not those of objects,
    which replace them, and would be kept from letting go of them.
    """
    found: list[nn.Module] = []
    tensors: list[Tensor] = []
    # Each with the names in the code that refers to it, of the callable and its object any; and
    # whether it is a function that does.
    waiting: list[tuple[Any, frozenset[str] | None, bool]] = [(function, None, False)]
    seen: set[tuple[int, frozenset[str] | None, bool]] = set()
    while waiting:
        value, names, of_function = waiting.pop()
        if (id(value), names, of_function) in seen:
            continue
        seen.add((id(value), names, of_function))
        held: list[Any] = []
        if isinstance(value, Tensor):
            if of_function and value.layout == torch.strided and not value.is_nested:
                tensors.append(value)
        elif isinstance(value, nn.Module):
            found.append(value)
            for part in value.modules():
                held.append(getattr(type(part), "forward", None))
                own = vars(part).items()
                held += (x for name, x in own if name != "_modules" and isinstance(x, _FOLLOWED))
            names = frozenset()
        elif inspect.ismethod(value):
            waiting += [(value.__func__, None, False), (value.__self__, None, False)]
        elif inspect.isfunction(value):
            there, names = value.__globals__, frozenset(_names_in(value.__code__))
            if not there.get("__name__", "").startswith("torch."):  # which wraps others
                used = (there[name] for name in names & there.keys())
                held += (x for x in used if not inspect.isfunction(x) or x.__globals__ is there)
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # it is empty
                    held.append(cell.cell_contents)
            held += [value.__defaults__, value.__kwdefaults__]
        elif isinstance(value, functools.partial):
            held += [value.func, value.args, value.keywords]
        elif isinstance(value, _CONTAINERS):
            values = value.values() if isinstance(value, dict) else value
            held += (x for x in values if isinstance(x, _FOLLOWED))  # there may be many others
        elif not isinstance(value, type):
            own = _attributes(value)
            used = (own[name] for name in (own if names is None else names & own.keys()))
            held += (x for x in used if not inspect.isfunction(x))
            if names is None:
                held.append(type(value).__call__)
            names = names or frozenset()
        if not isinstance(value, _CONTAINERS):
            of_function = isinstance(value, (types.FunctionType, functools.partial))
        waiting += [(x, names, of_function) for x in held]
    known = {id(x) for x in tensors_of(found)}
    more = nn.Module()
    for tensor in tensors:
        if id(tensor) not in known:
            more.register_buffer(f"{id(tensor)}", tensor)
    return [*{id(module): module for module in found}.values(), more]


def _attributes(value: Any) -> dict[str, Any]:
    """Those that an object has itself, in slots too."""
    own = dict(getattr(value, "__dict__", ()))
    for part in type(value).__mro__:
        slots = (name for name, member in vars(part).items() if inspect.ismemberdescriptor(member))
        own |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return own


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Of globals and attributes, by functions within it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a callable: those of forward of a module, also of a compiled one. None of
    what has no signature.
    """
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


def _as_dict(members: Any) -> dict[str, Any]:
    """Those of a module of TorchScript are no dictionary, and cannot be replaced."""
    return members if isinstance(members, dict) else dict(members.items())
