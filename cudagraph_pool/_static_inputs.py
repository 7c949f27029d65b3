"""The tensors that captured graphs read: where they lie, and how a call's tensors get there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ._adapter import load_adapter
from ._buckets import Size
from ._call import Named
from ._static_outputs import counting_changes

if TYPE_CHECKING:
    from . import _torch

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
# Padding of up to so many bytes is copied, together with the call: a launch for itself would take
# the CPU longer. A buffer has a constant for it, of no more than that.
_COPIED_PADDING = 1 << 20
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
            ValueError: It has not the dimensions that were said to be dynamic, or cannot hold the
                padding.
        """
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
        pad = pad if dynamic else 0
        if is_integer(tensor.dtype):
            kind = torch.float64 if isinstance(pad, float) else torch.int64
            held = torch.tensor(pad, dtype=kind, device="cpu").to(tensor.dtype).item()
            if held != pad:
                raise ValueError(
                    f"pad is {pad} for {name.path}, of which {tensor.dtype} would make {held}; say "
                    "it for each: pad={'name of the argument': ...}, 0 for others"
                )
        return cls(
            name,
            dims,
            shape,
            pad,
            tensor.dtype,
            _memory_format(tensor),
            tensor.requires_grad,
        )

    @property
    def is_nested(self) -> bool:
        """Whether each size is the beginning of the larger ones, as it lies in memory."""
        return self.dims in (((),), ((0,),))

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
        if tensor.device != device:
            raise ValueError(
                f"{self.name.path} is on {tensor.device}, but the graphs are on {device}: pass it "
                "there"
            )
        if tensor.dtype != self.dtype:
            raise ValueError(
                f"{self.name.path} has dtype {tensor.dtype}, but was captured with {self.dtype}"
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
        if not inputs:
            raise ValueError("the call has no tensor argument, which would say how large it is")
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


class Buffer(NamedTuple):
    """Memory that an input has at all sizes, and padding, both as one dimension.

    Attributes:
        padding: Of the same storage, so that whatever stream uses it uses that.
    """

    given: Input
    memory: Tensor
    padding: Tensor

    @classmethod
    def of(cls, given: Input, elements: int, device: torch.device) -> Buffer:
        """One for sizes with so many elements."""
        most = _COPIED_PADDING // given.dtype.itemsize
        padding = min(elements, most) if any(given.dims) and given.dtype in _COPIED_TOGETHER else 0
        with counting_changes():
            both = torch.full((elements + padding,), given.pad, dtype=given.dtype, device=device)
            return cls(given, both[:elements], both[elements:])

    def at(self, shape: Sequence[int]) -> Tensor:
        """The input of a shape: the beginning of the memory, as a dense tensor."""
        return _dense(self.memory, shape, self.given.memory_format)

    def padding_for(self, part: Tensor) -> Tensor | None:
        """Padding to be copied to a part of the input; None where to fill that is better."""
        dense = part.is_contiguous(memory_format=self.given.memory_format)
        if not dense or part.numel() > self.padding.numel():
            return None
        return _dense(self.padding, part.shape, self.given.memory_format)


class Static(NamedTuple):
    """The tensor that the graph of one size reads, and the buffer that it lies in."""

    tensor: Tensor
    buffer: Buffer

    def bytes(self) -> Tensor:
        """What it holds."""
        return self.buffer.memory[: self.tensor.numel()].view(torch.uint8)


class StaticInputs:
    """One buffer for each input, of the largest size so far. Every size reads the beginning of it:
    only one is read at a time.

    Arguments:
        sizes: What the buffers are made for; a larger one makes larger buffers, and those before
            live on in the graphs that read them.
    """

    def __init__(
        self, inputs: Sequence[Input], device: torch.device, sizes: Sequence[Size]
    ) -> None:
        self._device = device
        largest = [max(sizes)] if len(sizes[0]) == 1 else sizes  # of one axis one holds all
        self._buffers = [
            Buffer.of(given, max(math.prod(given.shape_at(size)) for size in largest), device)
            for given in inputs
        ]
        self._views: dict[Size, list[Static]] = {}

    def at(self, size: Size) -> list[Static]:
        """What a graph of this size reads: new tensors each time. A function may keep what it
        found out of one that it knows, which in a capture would be something of its warm-ups.
        """
        with counting_changes():
            if size not in self._views:
                self._views[size] = self._view(size)
            return [
                Static(view.detach().requires_grad_(buffer.given.requires_grad), buffer)
                for view, buffer in self._views[size]
            ]

    def _view(self, size: Size) -> list[Static]:
        statics = []
        for place, buffer in enumerate(self._buffers):
            shape = buffer.given.shape_at(size)
            if math.prod(shape) > buffer.memory.numel():
                buffer = Buffer.of(buffer.given, math.prod(shape), self._device)
                self._buffers[place] = buffer
                self._views.clear()  # all sizes read the same buffer
            statics.append(Static(buffer.at(shape), buffer))
        return statics


def copies(inputs: Sequence[Input], statics: Sequence[Static], size: Size) -> _torch.Copies:
    """Copies the tensors of calls of one size to where a graph reads them, padding to the rest.

    Arguments:
        statics: Of the bucket that serves them.
    """
    filled: list[tuple[Tensor, Tensor]] = []
    targets: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
    paddings: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for place, (given, (tensor, buffer)) in enumerate(zip(inputs, statics, strict=True)):
        target = tensor.detach()
        for extent, of_axis in zip(size, given.dims, strict=True):
            for dim in of_axis:
                if extent == target.shape[dim]:
                    continue
                part = target.narrow(dim, extent, target.shape[dim] - extent)
                padding = buffer.padding_for(part)
                if padding is None:
                    value = torch.full((), given.pad, dtype=part.dtype, device="cpu")
                    filled.append((part, value))
                else:
                    paddings.setdefault(part.dtype, []).append((part, padding))
                target = target.narrow(dim, 0, extent)
        targets.setdefault(target.dtype, []).append((place, target))
    alone: list[tuple[int, Tensor]] = []
    together: list[tuple[list[int], list[Tensor], list[Tensor]]] = []
    for dtype, alike in targets.items():
        padded = paddings.get(dtype, [])
        if dtype in _COPIED_TOGETHER and len(alike) + len(padded) > 1:
            places, to = map(list, zip(*alike, strict=True))
            to += [part for part, _ in padded]
            together.append((places, to, [padding for _, padding in padded]))
        else:
            alone += alike
    made: _torch.Copies = load_adapter().Copies(filled, alone, together)
    return made


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
            f"{option} names {sorted(unknown, key=str)}, but the arguments passed are "
            f"{sorted(known)}; pass None for one that is left out"
        )


def dims_of(dim: Any, name: Named, axes: int) -> Dims:
    """What ``dim`` of :class:`GraphRunner` says of one argument.

    Raises:
        ValueError: It says something of another number of axes than sizes have.
    """
    if isinstance(dim, Mapping):
        dim = dim.get(name.path, dim.get(name.parameter))
    if dim is None:
        return ((),) * axes
    entries = (dim,) if isinstance(dim, int) else dim
    if not isinstance(entries, tuple) or not all(map(_is_entry, entries)):
        raise ValueError(
            f"dim is {dim!r} for {name.path}, but must be an integer, None, or a tuple with an "
            "entry for each dimension of a size: an integer, None, or a tuple of integers"
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


def is_integer(dtype: torch.dtype) -> bool:
    """Or a boolean: what an index may be."""
    return not (dtype.is_floating_point or dtype.is_complex)


def pad_of(pad: Any, name: Named) -> float:
    """What ``pad`` of :class:`GraphRunner` says of one argument."""
    if isinstance(pad, Mapping):
        pad = pad.get(name.path, pad.get(name.parameter, 0))
    if not isinstance(pad, float) and not (isinstance(pad, int) and abs(pad) < 1 << 63):
        raise ValueError(f"pad is {pad!r} for {name.path}, but must be a number of 64 bits")
    return pad


def _dense(memory: Tensor, shape: Sequence[int], memory_format: torch.memory_format) -> Tensor:
    """A tensor on the beginning of the memory."""
    if memory_format == torch.contiguous_format:
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    else:
        strides = torch.empty(shape, device="meta", memory_format=memory_format).stride()
    return memory.as_strided(shape, strides)


def _memory_format(tensor: Tensor) -> torch.memory_format:
    """What a dense tensor is laid out in; contiguous for those that are neither."""
    last = _FORMATS.get(tensor.dim())
    if last is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last):
        return last
    return torch.contiguous_format
