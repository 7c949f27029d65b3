"""The parameters and buffers of the module that a runner captures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .._adapter import load_adapter


class Weights:
    """Where the weights of a module are. It holds the dictionaries of the module's parts, and none
    of the tensors: whoever moves weights away gets their memory back.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        while isinstance(function, functools.partial):
            function = function.func
        owner = getattr(function, "__self__", function)  # that a method is of
        self._module = owner if isinstance(owner, nn.Module) else None
        parts = [] if self._module is None else list(self._module.modules())
        homes = (home for part in parts for home in (part._parameters, part._buffers))
        self._homes = [home for home in homes if isinstance(home, dict)]  # not TorchScript's
        self._attributes = [vars(part) for part in parts]
        self._read = load_adapter().read_weights

    def read(self) -> tuple[bytes, bytes]:
        """The addresses of all, and flags: which require gradients, which parts are in training."""
        addresses, flags = self._read(self._homes, self._attributes)
        return addresses, flags

    def tensors(self) -> list[Tensor]:
        return [x for home in self._homes for x in home.values() if x is not None]

    def places(self) -> dict[int, tuple[dict[str, Any], str]]:
        """Where each is kept, by its id."""
        return {id(x): (home, name) for home in self._homes for name, x in home.items()}
