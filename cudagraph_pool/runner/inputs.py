"""The tensors that captured graphs read: where they lie, and how a call's tensors get there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._borrow import counting_changes
from ..sizes import Size
from .arguments import Name

Dims = tuple[tuple[int, ...], ...]  # for each axis of a size those of a tensor that follow it

# Several tensors of one of these are copied by one launch. Torch 2.11 has no kernel for others.
_COPIED_TOGETHER = frozenset(
    (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex64, torch.complex128),
    )
)
# Padding of up to so many bytes is copied, together with the call: a launch of its own would cost
# the CPU more. A buffer has a constant of no more than that for it.
_COPIED_PADDING = 1 << 20
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


class Static(NamedTuple):
    """The tensor that the graph of one size reads.

    Attributes:
        padding: A constant, copied to the part that a call does not fill. It is of the same
            storage, so that a stream which uses one is known to use the other.
    """

    tensor: Tensor
    padding: Tensor


class StaticInputs:
    """One buffer for each input, of the largest size so far. Every size reads the beginning of it:
    only one is read at a time.

    Arguments:
        sizes: What the buffers are made for. A larger one makes larger buffers, and those before
            live on in the graphs that read them.
    """

    def __init__(self, inputs: Sequence[Input], device: torch.device, sizes: Iterable[Size]):
        self.inputs = inputs
        self._device = device
        largest = [max(math.prod(given.shape_at(size)) for size in sizes) for given in inputs]
        self._buffers = [*map(self._new_buffer, inputs, largest)]

    def at(self, size: Size) -> list[Static]:
        """What a graph of this size reads: new tensors each time. A function may keep what it
        found out of one that it knows, which in a capture would be something of its warm-ups.
        """
        statics = []
        with counting_changes():
            for place, given in enumerate(self.inputs):
                shape = given.shape_at(size)
                if math.prod(shape) > len(self._buffers[place].tensor):
                    self._buffers[place] = self._new_buffer(given, math.prod(shape))
                memory, padding = self._buffers[place]
                view = _dense(memory, shape, given.memory_format).detach()
                statics.append(Static(view.requires_grad_(given.requires_grad), padding))
        return statics

    def _new_buffer(self, given: Input, elements: int) -> Static:
        most = _COPIED_PADDING // given.dtype.itemsize
        padding = min(elements, most) if any(given.dims) and given.dtype in _COPIED_TOGETHER else 0
        size = (elements + padding,)
        with counting_changes():
            both = torch.full(size, given.pad, dtype=given.dtype, device=self._device)
            return Static(both[:elements], both[elements:])


class Copies:
    """Copies the tensors of calls of one size to where a graph reads them, padding to the rest.

    Arguments:
        statics: Of the bucket that serves them.
    """

    def __init__(self, inputs: Iterable[Input], statics: Iterable[Static], size: Size) -> None:
        self._fills: list[tuple[Tensor, float]] = []
        # Copied by one launch each: the places of tensors, and their targets; then padding.
        self._groups: dict[Any, tuple[list[int], list[Tensor], list[Tensor]]] = {}
        padded = []
        for place, (given, static) in enumerate(zip(inputs, statics, strict=True)):
            key = given.dtype if given.dtype in _COPIED_TOGETHER else place
            places, targets, _ = self._groups.setdefault(key, ([], [], []))
            target = static.tensor.detach()
            for extent, of_axis in zip(size, given.dims, strict=True):
                for dim in of_axis:
                    part = target.narrow(dim, extent, target.shape[dim] - extent)
                    target = target.narrow(dim, 0, extent)
                    dense = part.is_contiguous(memory_format=given.memory_format)
                    if dense and 0 < part.numel() <= len(static.padding):
                        source = _dense(static.padding, part.shape, given.memory_format)
                        padded.append((key, part, source))
                    elif part.numel():
                        self._fills.append((part, given.pad))
            places.append(place)
            targets.append(target)
        for key, part, source in padded:
            self._groups[key][1].append(part)
            self._groups[key][2].append(source)

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        for part, value in self._fills:
            part.fill_(value)
        for places, targets, padding in self._groups.values():
            if len(targets) == 1:
                targets[0].copy_(tensors[places[0]])
            else:
                torch._foreach_copy_(targets, [*map(tensors.__getitem__, places), *padding])


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


def _dense(memory: Tensor, shape: Sequence[int], memory_format: torch.memory_format) -> Tensor:
    """A tensor on the beginning of the memory."""
    strides = torch.empty(shape, device="meta", memory_format=memory_format).stride()
    return memory.as_strided(shape, strides)
