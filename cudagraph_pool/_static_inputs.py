"""The tensors that captured graphs read: where they lie, and how a call's tensors get there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._buckets import Size
from ._call import Named
from ._static_outputs import counting_changes

# For each axis of a size the dimensions of a tensor that it is the extent of.
Dims = tuple[tuple[int, ...], ...]

# Several tensors of one of these are copied by one launch. Of others torch 2.11 has no kernel that
# does.
_COPIED_TOGETHER = frozenset(
    (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )
)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor argument, as all captures of one program have it.

    Attributes:
        dims: Of each axis of a size.
        shape: Its extents; those of dynamic dimensions are -1.
        pad: What its padding is filled with.
    """

    name: Named
    dims: Dims
    shape: tuple[int, ...]
    pad: float
    dtype: torch.dtype
    memory_format: torch.memory_format
    requires_grad: bool

    @classmethod
    def of(cls, name: Named, tensor: Tensor, dims: Dims, pad: float) -> Input:
        """As ``tensor`` is.

        Raises:
            ValueError: It has not the dimensions that were said to be dynamic.
            TypeError: It is not strided.
        """
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise TypeError(
                f"{name.path} is a {type(tensor).__name__}; the function would be given a plain "
                "tensor: pass one, and make the other within the function"
            )
        dynamic = [dim for of_axis in dims for dim in of_axis]
        for dim in dynamic:
            if not -tensor.dim() <= dim < tensor.dim():
                raise ValueError(
                    f"{name.path} has the shape {tuple(tensor.shape)}, but its dimension {dim} "
                    "should be dynamic; say which ones are: dim={'name of the argument': ...}, "
                    "None for none"
                )
        dims = tuple(tuple(dim % tensor.dim() for dim in of_axis) for of_axis in dims)
        dynamic = [dim for of_axis in dims for dim in of_axis]
        if len(set(dynamic)) < len(dynamic):
            raise ValueError(f"dim names a dimension of {name.path} twice: {dims}")
        shape = tuple(-1 if dim in dynamic else n for dim, n in enumerate(tensor.shape))
        return cls(
            name,
            dims,
            shape,
            pad,
            tensor.dtype,
            _memory_format(tensor),
            requires_grad=tensor.requires_grad and torch.is_grad_enabled(),
        )

    def shape_at(self, size: Size) -> list[int]:
        """Its extents at a size."""
        shape = list(self.shape)
        for extent, of_axis in zip(size, self.dims, strict=True):
            for dim in of_axis:
                shape[dim] = extent
        return shape

    def cut(self, tensor: Tensor, size: Size) -> Tensor:
        """What of a tensor belongs to a size not above its own."""
        for extent, of_axis in zip(size, self.dims, strict=True):
            for dim in of_axis:
                tensor = tensor.narrow(dim, 0, extent)
        return tensor

    def check(self, tensor: Tensor, device: torch.device) -> None:
        """Raises ValueError if graphs that were captured for this input cannot read ``tensor``."""
        was = [
            ("dtype", self.dtype, tensor.dtype),
            ("device", device, tensor.device),
        ]
        for what, captured, given in was:
            if captured != given:
                raise ValueError(
                    f"{self.name.path} has {what} {given}, but was captured with {captured}"
                )
        if len(self.shape) != tensor.dim() or any(
            static not in (-1, n) for static, n in zip(self.shape, tensor.shape, strict=True)
        ):
            shape = ", ".join("any" if n == -1 else str(n) for n in self.shape)
            raise ValueError(
                f"{self.name.path} has the shape {tuple(tensor.shape)}, "
                f"but was captured with ({shape})"
            )
        if _memory_format(tensor) != self.memory_format and not tensor.is_contiguous(
            memory_format=self.memory_format
        ):
            raise ValueError(
                f"{self.name.path} has the strides {tensor.stride()}, but was captured as "
                f"{self.memory_format}; pass it .contiguous(memory_format={self.memory_format})"
            )


def size_of(inputs: Sequence[Input], tensors: Sequence[Tensor], axes: int) -> Size:
    """The size that a call has.

    Raises:
        ValueError: Two tensors do not agree about it, none has it, or it is 0.
    """
    size: list[int] = []
    for axis in range(axes):
        found: dict[str, int] = {}
        for given, tensor in zip(inputs, tensors, strict=True):
            for dim in given.dims[axis]:
                found[f"{given.name.path} along dimension {dim}"] = tensor.shape[dim]
        if not found:
            raise ValueError(
                "no argument has a dynamic dimension"
                + (f" of axis {axis} of the sizes" if axes > 1 else "")
                + ": dim says which tensors have which"
            )
        (first, extent), *others = found.items()
        for other, n in others:
            if n != extent:
                raise ValueError(f"{other} has {n}, but {first} has {extent}")
        if extent == 0:
            raise ValueError(f"{first} has no elements: there is nothing to replay for size 0")
        size.append(extent)
    return tuple(size)


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory that an input has at all sizes.

    Attributes:
        rows: How many of its first rows may hold something else than padding; None where rows lie
            elsewhere at each size.
    """

    memory: Tensor
    rows: int | None


class Static(NamedTuple):
    """The tensor that the graph of one size reads, in its buffer."""

    tensor: Tensor
    buffer: Buffer

    def will_change(self) -> None:
        """Something may be written to any of it."""
        if self.buffer.rows is not None:
            self.buffer.rows = max(self.buffer.rows, len(self.tensor))

    def bytes(self) -> Tensor:
        """What it holds."""
        return self.buffer.memory[: self.tensor.numel()].view(torch.uint8)


class StaticInputs:
    """One buffer for each input, of the largest size so far. Every size reads the beginning of it,
    as a dense tensor: only one is read at a time.

    Arguments:
        sizes: What the buffers are made for; a larger one makes larger buffers, and those before
            live on in the graphs that read them.
    """

    def __init__(
        self, inputs: Sequence[Input], device: torch.device, sizes: Sequence[Size]
    ) -> None:
        self._inputs = inputs
        self._device = device
        self._buffers = [
            self._new_buffer(given, max(math.prod(given.shape_at(size)) for size in sizes))
            for given in inputs
        ]

    def at(self, size: Size) -> list[Static]:
        """What a graph of this size reads: new tensors each time. A function may keep what it
        found out of one that it knows, which in a capture would be something of its warm-ups.
        """
        statics = []
        with counting_changes(), torch.no_grad():
            for place, given in enumerate(self._inputs):
                shape = given.shape_at(size)
                elements = math.prod(shape)
                if elements > self._buffers[place].memory.numel():
                    self._buffers[place] = self._new_buffer(given, elements)
                buffer = self._buffers[place]
                view = _dense(buffer.memory[:elements], shape, given.memory_format).detach()
                statics.append(Static(view.requires_grad_(given.requires_grad), buffer))
        return statics

    def _new_buffer(self, given: Input, elements: int) -> Buffer:
        with counting_changes():
            memory = torch.full((elements,), given.pad, dtype=given.dtype, device=self._device)
        dynamic = [dim for of_axis in given.dims for dim in of_axis]
        return Buffer(memory, rows=0 if dynamic == [0] else None)


class Padding(NamedTuple):
    """What of a static input a smaller call does not fill."""

    buffer: Buffer
    rows: int  # of the call
    static_rows: int
    parts: tuple[Tensor, ...]  # which do not overlap
    value: float

    def write(self) -> None:
        """Before the call is copied, so that ``buffer.rows`` holds even if that fails."""
        buffer = self.buffer
        if buffer.rows is None or buffer.rows > self.rows:
            for part in self.parts:
                part.fill_(self.value)
        if buffer.rows is not None and buffer.rows <= self.static_rows:
            buffer.rows = self.rows


class CopyIn:
    """How the tensors of calls of one size get to where a graph reads them.

    Arguments:
        statics: Of the bucket that serves them.
    """

    def __init__(self, inputs: Sequence[Input], statics: Sequence[Static], size: Size) -> None:
        self._paddings: list[Padding] = []
        targets: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
        for place, (given, (tensor, buffer)) in enumerate(zip(inputs, statics, strict=True)):
            target, parts = tensor.detach(), []
            for extent, of_axis in zip(size, given.dims, strict=True):
                for dim in of_axis:
                    if extent < target.shape[dim]:
                        parts.append(target.narrow(dim, extent, target.shape[dim] - extent))
                        target = target.narrow(dim, 0, extent)
            targets.setdefault(target.dtype, []).append((place, target))
            if parts or buffer.rows is not None:
                rows = (0, 0) if buffer.rows is None else (len(target), len(tensor))
                self._paddings.append(Padding(buffer, *rows, tuple(parts), given.pad))
        self._together = [
            tuple(zip(*alike, strict=True))
            for dtype, alike in targets.items()
            if dtype in _COPIED_TOGETHER and len(alike) > 1
        ]
        self._alone = [
            alone
            for dtype, alike in targets.items()
            if dtype not in _COPIED_TOGETHER or len(alike) == 1
            for alone in alike
        ]

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        for padding in self._paddings:
            padding.write()
        for place, target in self._alone:
            target.copy_(tensors[place])
        for places, targets in self._together:
            torch._foreach_copy_(targets, [tensors[place] for place in places])


def check_names(
    option: str, by_name: Any, names: Sequence[Named], parameters: Sequence[str]
) -> None:
    """Raises ValueError if a mapping names an argument that the function has not."""
    if not isinstance(by_name, Mapping):
        return
    known = {name.parameter for name in names} | {name.path for name in names}
    unknown = set(by_name) - known - set(parameters)
    if unknown:
        raise ValueError(
            f"{option} names {sorted(unknown)}, but the tensors passed are {sorted(known)}"
        )


def dims_of(dim: Any, name: Named, axes: int) -> Dims:
    """What ``dim`` of :class:`GraphRunner` says of one argument.

    Raises:
        ValueError: It says something of another number of axes than sizes have.
    """
    if isinstance(dim, Mapping):
        dim = dim.get(name.parameter, dim.get(name.path))
    if dim is None:
        return ((),) * axes
    entries = (dim,) if isinstance(dim, int) else dim
    if not isinstance(entries, tuple) or not all(map(_is_entry, entries)):
        raise ValueError(
            f"dim is {dim!r} for {name.path}, but must be an integer, None, or a tuple with one of "
            "these, or a tuple of integers, for each dimension of a size"
        )
    if len(entries) != axes:
        raise ValueError(
            f"dim is {dim!r} for {name.path}, but a size has {axes} number(s): "
            "dim has one entry for each"
        )
    return tuple(
        () if entry is None else (entry,) if isinstance(entry, int) else tuple(entry)
        for entry in entries
    )


def _is_entry(entry: Any) -> bool:
    if isinstance(entry, tuple):
        return all(isinstance(dim, int) for dim in entry)
    return entry is None or isinstance(entry, int)


def pad_of(pad: Any, name: Named) -> float:
    """What ``pad`` of :class:`GraphRunner` says of one argument."""
    if isinstance(pad, Mapping):
        pad = pad.get(name.parameter, pad.get(name.path, 0))
    if not isinstance(pad, (int, float)):
        raise ValueError(f"pad is {pad!r} for {name.path}, but must be a number")
    return pad


def _dense(memory: Tensor, shape: Sequence[int], memory_format: torch.memory_format) -> Tensor:
    """A tensor on all of the memory."""
    if memory_format == torch.contiguous_format:
        return memory.view(shape)
    strides = torch.empty(shape, device="meta", memory_format=memory_format).stride()
    return memory.as_strided(shape, strides)


def _memory_format(tensor: Tensor) -> torch.memory_format:
    """What a dense tensor is laid out in; contiguous for those that are neither."""
    last = _FORMATS.get(tensor.dim())
    if last is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last):
        return last
    return torch.contiguous_format
