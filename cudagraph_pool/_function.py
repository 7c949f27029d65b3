"""What is called: its module, whose tensors its graphs read, and its parameters."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ._adapter import load_adapter

if TYPE_CHECKING:
    from . import _torch


def watch(modules: Sequence[nn.Module]) -> _torch.WeightWatch:
    """Knows where the parameters and buffers of modules are: its flags are None if one has moved.

    They move when a module is converted or sent to another device, when a part of it, a parameter
    or the ``data`` of one is replaced, added or removed; not when they are trained.
    """
    parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
    homes = [home for part in parts for home in (part._parameters, part._buffers)]
    made: _torch.WeightWatch = load_adapter().WeightWatch(
        [_as_dict(part._modules) for part in parts],
        [_as_dict(home) for home in homes],
        [vars(part) for part in parts],
    )
    return made


def modules_of(function: Any) -> list[nn.Module]:
    """The module that a callable is or is a method of, or those that it refers to: in its closure,
    among its globals, its bound arguments or the attributes of its object. Also of one that is
    wrapped, as by ``torch.no_grad()`` or ``torch.compile``.
    """
    bound = getattr(function, "__self__", function)
    if isinstance(bound, nn.Module):
        return [bound]
    if isinstance(function, functools.partial):
        values = [*function.args, *function.keywords.values()]
        return modules_of(function.func) + [x for x in values if isinstance(x, nn.Module)]
    if hasattr(function, "__wrapped__"):
        return modules_of(function.__wrapped__)
    values = list(getattr(bound, "__dict__", {}).values())
    with contextlib.suppress(TypeError, ValueError):  # it is not of Python, or a cell is empty
        used = inspect.getclosurevars(function)
        values += [*used.nonlocals.values(), *used.globals.values()]
    return [x for x in values if isinstance(x, nn.Module)]


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a callable: those of forward of a module, also of a compiled one. None of
    what has no signature.
    """
    try:
        return list(inspect.signature(_signed(function)).parameters.values())
    except (TypeError, ValueError):
        return []


def _signed(function: Callable[..., Any]) -> Callable[..., Any]:
    """What has the signature: a module has it where its forward does."""
    if isinstance(function, functools.partial):
        return functools.partial(_signed(function.func), *function.args, **function.keywords)
    if isinstance(function, nn.Module):
        forward: Callable[..., Any] = getattr(function, "_orig_mod", function).forward
        return forward
    return function


def _as_dict(members: Any) -> dict[str, Any]:
    """Those of a module of TorchScript are no dictionary, and cannot be replaced."""
    return members if isinstance(members, dict) else dict(members.items())
