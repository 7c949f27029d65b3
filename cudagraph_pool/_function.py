"""What is called: its module, whose tensors its graphs read, and its parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from ._adapter import load_adapter

if TYPE_CHECKING:
    from . import _torch


def watch(module: nn.Module | None) -> _torch.WeightWatch:
    """Knows where the parameters and buffers of a module are: its flags are None if one has moved.

    They move when a module is converted or sent to another device, when a part of it, a parameter
    or the ``data`` of one is replaced, added or removed; not when they are trained.
    """
    parts = [] if module is None else list(module.modules())
    made: _torch.WeightWatch = load_adapter().WeightWatch(
        [part._modules for part in parts],
        [home for part in parts for home in (part._parameters, part._buffers)],
        [vars(part) for part in parts],
    )
    return made


def module_of(function: Callable[..., Any]) -> nn.Module | None:
    """The module that a callable is, is a method of, or passes arguments to."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        return function
    bound = getattr(function, "__self__", None)
    return bound if isinstance(bound, nn.Module) else None


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a callable: those of forward of a module, also of a compiled one. None of
    what has no signature.
    """
    if isinstance(function, nn.Module):
        function = getattr(function, "_orig_mod", function).forward
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
