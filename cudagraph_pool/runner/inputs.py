"""The tensors that captured graphs read: where they lie, and how a call's tensors get there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._borrow import counting_changes
from ..sizes import Size
from .arguments import Name

Dims = tuple[tuple[int, ...], ...]  # for each axis of a size those of a tensor that follow it

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor argument, as all captures of one program have it."""

    name: Name
    dims: Dims
    shape: tuple[int, ...]  # -1 for dynamic dimensions
    pad: float
    dtype: torch.dtype
    memory_format: torch.memory_format
    requires_grad: bool

    @classmethod
    def of(cls, name: Name, tensor: Tensor, dims: Dims, pad: float) -> Input:
        """As ``tensor`` is.

        Raises:
            ValueError: It lacks a dimension that is said to be dynamic, or cannot hold the padding.
        """
        rank = tensor.dim()
        for dim in _flat(dims):
            if not -rank <= dim < rank:
                raise ValueError(
                    f"{name.path} has the shape {tuple(tensor.shape)}, but its dimension {dim} "
                    "should be dynamic; say which ones are: dim={'name of the argument': ...}, "
                    "None for none"
                )
        dims = tuple(tuple(dim % rank for dim in of_axis) for of_axis in dims)
        dynamic = _flat(dims)
        if len(set(dynamic)) < len(dynamic):
            raise ValueError(f"dim names a dimension of {name.path} twice: {dims}")
        pad = pad if dynamic else 0
        if is_integer(tensor.dtype):
            kind = torch.float64 if isinstance(pad, float) else torch.int64
            held = torch.tensor(pad, dtype=kind, device="cpu").to(tensor.dtype).item()
            if held != pad:
                raise ValueError(
                    f"pad is {pad} for {name.path}, of which {tensor.dtype} would make {held}; say "
                    "it for each: pad={'name of the argument': ...}, 0 for others"
                )
        shape = tuple(-1 if dim in dynamic else n for dim, n in enumerate(tensor.shape))
        form = _FORMATS.get(rank, torch.contiguous_format)
        if tensor.is_contiguous() or not tensor.is_contiguous(memory_format=form):
            form = torch.contiguous_format
        return cls(name, dims, shape, pad, tensor.dtype, form, tensor.requires_grad)

    def shape_at(self, size: Size) -> list[int]:
        """Its extents at a size."""
        extents = {dim: n for n, of_axis in zip(size, self.dims, strict=True) for dim in of_axis}
        return [extents.get(dim, n) for dim, n in enumerate(self.shape)]

    def check(self, tensor: Tensor, device: torch.device) -> None:
        """Raises ValueError if graphs that were captured for this input cannot read ``tensor``."""
        said = None
        if tensor.device != device:
            said = f"is on {tensor.device}, but the graphs are on {device}: pass it there"
        elif tensor.dtype != self.dtype:
            said = f"has dtype {tensor.dtype}, but was captured with {self.dtype}"
        elif len(self.shape) != tensor.dim() or any(
            own not in (-1, n) for own, n in zip(self.shape, tensor.shape, strict=True)
        ):
            shape = ", ".join("any" if n == -1 else str(n) for n in self.shape)
            said = f"has the shape {tuple(tensor.shape)}, but was captured with ({shape})"
        if said is not None:
            raise ValueError(f"{self.name.path} {said}")


def cut(tensor: Tensor, dims: Dims, size: Size) -> Tensor:
    """What of a tensor belongs to a size not above its own."""
    for extent, of_axis in zip(size, dims, strict=True):
        for dim in of_axis:
            if extent < tensor.shape[dim]:
                tensor = tensor.narrow(dim, 0, extent)
    return tensor


def size_of(inputs: Sequence[Input], tensors: Sequence[Tensor], axes: int) -> Size:
    """The size that a call has.

    Raises:
        ValueError: Two tensors do not agree about it, none has it, or it is 0.
    """
    if not inputs:
        raise ValueError("the call has no tensor argument, which would say how large it is")
    size: list[int] = []
    for axis in range(axes):
        found = {
            f"{given.name.path} along dimension {dim}": tensor.shape[dim]
            for given, tensor in zip(inputs, tensors, strict=True)
            for dim in given.dims[axis]
        }
        if not found:
            of_axis = f" of axis {axis} of the sizes" if axes > 1 else ""
            raise ValueError(
                f"no argument has a dynamic dimension{of_axis}: dim says which tensors have which"
            )
        (first, extent), *others = found.items()
        for other, n in others:
            if n != extent:
                raise ValueError(f"{other} has {n}, but {first} has {extent}")
        if extent == 0:
            raise ValueError(f"{first} has no elements: there is nothing to replay for size 0")
        size.append(extent)
    return tuple(size)


class StaticInputs:
    """One buffer for each input, of the largest size so far. Every size reads the beginning of it:
    only one is read at a time. A larger size makes larger buffers, and those before live on in the
    graphs that read them.
    """

    def __init__(self, inputs: Sequence[Input], device: torch.device, sizes: Iterable[Size]):
        self.inputs = inputs
        self._device = device
        largest = [max(math.prod(given.shape_at(size)) for size in sizes) for given in inputs]
        self._buffers = [*map(self._new_buffer, inputs, largest)]

    def at(self, size: Size) -> list[Tensor]:
        """What a graph of this size reads: new tensors each time. A function may keep what it
        found out of one that it knows, which in a capture would be something of its warm-ups.
        """
        statics = []
        with counting_changes():
            for place, given in enumerate(self.inputs):
                dense = torch.empty(
                    given.shape_at(size), device="meta", memory_format=given.memory_format
                )
                if dense.numel() > self._buffers[place].numel():
                    self._buffers[place] = self._new_buffer(given, dense.numel())
                static = self._buffers[place].as_strided(dense.shape, dense.stride()).detach()
                statics.append(static.requires_grad_(given.requires_grad))
        return statics

    def _new_buffer(self, given: Input, elements: int) -> Tensor:
        with counting_changes():
            return torch.empty(elements, dtype=given.dtype, device=self._device)


class Copies:
    """Copies the tensors of calls of one size to where a graph reads them, and pads the rest."""

    def __init__(self, inputs: Iterable[Input], statics: Iterable[Tensor], size: Size) -> None:
        self._targets = []
        self._fills = []
        for given, static in zip(inputs, statics, strict=True):
            target = static.detach()
            for extent, of_axis in zip(size, given.dims, strict=True):
                for dim in of_axis:
                    rest = target.narrow(dim, extent, target.shape[dim] - extent)
                    if rest.numel():
                        self._fills.append((rest, given.pad))
                    target = target.narrow(dim, 0, extent)
            self._targets.append(target)

    def __call__(self, tensors: Iterable[Tensor]) -> None:
        """Takes the first of the tensors, as many as there are inputs."""
        for rest, pad in self._fills:
            rest.fill_(pad)
        for target, tensor in zip(self._targets, tensors, strict=False):
            target.copy_(tensor)


def check_names(
    option: str, by_name: Any, names: Sequence[Name], parameters: Iterable[str]
) -> None:
    """Raises ValueError if a mapping names an argument that the function has not."""
    known = {name.parameter for name in names} | {name.path for name in names}
    unknown = set(by_name if isinstance(by_name, Mapping) else ()) - known - set(parameters)
    if unknown:
        raise ValueError(
            f"{option} names {sorted(unknown, key=str)}, but the arguments passed are "
            f"{sorted(known)}; pass None for one that is left out"
        )


def dims_of(dim: Any, name: Name, axes: int) -> Dims:
    """What ``dim`` of :class:`GraphRunner` says of one argument."""
    if isinstance(dim, Mapping):
        dim = dim.get(name.path, dim.get(name.parameter))
    if dim is None:
        return ((),) * axes
    entries = dim if isinstance(dim, tuple) else (dim,)
    dims = tuple(() if x is None else x if isinstance(x, tuple) else (x,) for x in entries)
    if len(dims) != axes or not all(isinstance(x, int) for x in _flat(dims)):
        raise ValueError(
            f"dim is {dim!r} for {name.path}, but must be an integer, None, or a tuple with an "
            f"entry for each of the {axes} number(s) of a size: an integer, None, or a tuple of "
            "integers"
        )
    return dims


def pad_of(pad: Any, name: Name) -> float:
    """What ``pad`` of :class:`GraphRunner` says of one argument."""
    if isinstance(pad, Mapping):
        pad = pad.get(name.path, pad.get(name.parameter, 0))
    if not isinstance(pad, float) and not (isinstance(pad, int) and abs(pad) < 1 << 63):
        raise ValueError(f"pad is {pad!r} for {name.path}, but must be a number of 64 bits")
    return pad


def is_integer(dtype: torch.dtype) -> bool:
    """Or a boolean: what an index may be."""
    return not (dtype.is_floating_point or dtype.is_complex)


def _flat(dims: Iterable[tuple[Any, ...]]) -> list[Any]:
    return [dim for of_axis in dims for dim in of_axis]
