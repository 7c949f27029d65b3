"""How a call is padded to a size: what graphs read of it, and what of their outputs is returned."""

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..sizes import Size, shown
from .arguments import CONSTANTS, flatten_with_paths, is_plain, refuse

Dims = Mapping[int, int]  # of a tensor's dimensions that follow a size, which of its axes each does

# One launch copies several tensors of one of these types. Torch 2.11 has no kernel for others.
_COPIED_TOGETHER = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16),
    *(torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}
_FORMATS = torch.contiguous_format, torch.channels_last, torch.channels_last_3d


class Input:
    """A tensor argument, and the buffer that captures read: each the beginning, since one is read
    at a time. A larger size makes a larger one. Short padding is copied, from in front of it: who
    keeps the one, or records its streams, does of both.
    """

    def __init__(
        self, path: str, tensor: Tensor, dims: Dims, pad: float, sizes: Iterable[Size]
    ) -> None:
        """As ``tensor`` is, and large enough for ``sizes``. Raises ValueError if it cannot be."""
        rank = tensor.dim()
        for dim in dims:
            if not -rank <= dim < rank:
                raise ValueError(
                    f"{path} has the shape {tuple(tensor.shape)}, but its dimension {dim} should "
                    f"be dynamic; say which ones are: dim={{{path!r}: ...}}"
                )
        self.path = path
        self.dims = {dim % rank: axis for dim, axis in dims.items()}
        self.pad = pad if dims else 0
        self.is_integer = not (tensor.is_floating_point() or tensor.is_complex())  # or a boolean
        held = torch.tensor(self.pad, device="cpu").to(tensor.dtype).item()
        if self.is_integer and held != self.pad:
            said = f"pad is {pad} for {path}, which {tensor.dtype} would hold as {held}"
            raise ValueError(f"{said}; say it by name: pad={{{path!r}: ...}}")
        self.requires_grad = tensor.requires_grad
        self._shape = self._shape_of(tensor)
        self._type = tensor.dtype, tensor.device
        fitting = (form for form in _FORMATS if tensor.is_contiguous(memory_format=form))
        self.format = next(fitting, torch.contiguous_format)
        shapes = (_extents(self._shape, self.dims, size) for size in sizes)
        self._elements = max(map(math.prod, shapes), default=0)
        self._buffer: Tensor | None = None

    def check(self, tensor: Tensor) -> None:
        """Raises ValueError if graphs that were captured for this input cannot read ``tensor``."""
        dtype, device = self._type
        if (tensor.dtype, tensor.device) != self._type or self._shape_of(tensor) != self._shape:
            shape = ", ".join("any" if n == -1 else str(n) for n in self._shape)
            raise ValueError(
                f"{self.path} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}, "
                f"but was captured as {dtype} of shape ({shape}) on {device}: pass it so"
            )

    def _shape_of(self, tensor: Tensor) -> list[int]:
        return [-1 if dim in self.dims else n for dim, n in enumerate(tensor.shape)]

    def at(self, size: Size) -> Tensor:
        """A new one each time: a capture must not find what a function kept of it in a warm-up."""
        shape = _extents(self._shape, self.dims, size)
        dense = torch.empty(shape, device="meta", memory_format=self.format)
        dtype, device = self._type
        # A tensor that is made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False):
            if self._buffer is None or self._buffer.numel() < dense.numel():
                n = self._elements = max(self._elements, dense.numel())
                is_copied = self.dims and dtype in _COPIED_TOGETHER
                padding = min(-(-n // 512) * 512, 1 << 18) if is_copied else 0  # n are aligned
                memory = torch.empty(padding + n, dtype=dtype, device=device)
                memory[:padding] = self.pad
                self._buffer = memory[padding:]
            static = self._buffer.as_strided(dense.shape, dense.stride()).detach()
            return static.requires_grad_(self.requires_grad)


class Copies:
    """Copies the tensors of calls of one size to where a graph reads them, and pads the rest."""

    def __init__(self, inputs: Iterable[Input], statics: Iterable[Tensor], size: Size) -> None:
        self._fills = []
        # Of each launch the places of its tensors in a call; their targets and padding's; padding.
        self._launches: dict[Any, tuple[list[int], list[Tensor], list[Tensor]]] = {}
        for place, (given, static) in enumerate(zip(inputs, statics, strict=True)):
            kind = static.dtype if static.dtype in _COPIED_TOGETHER else place
            places, targets, padding = self._launches.setdefault(kind, ([], [], []))
            target = static.detach()
            for dim, axis in given.dims.items():
                rest = target.narrow(dim, size[axis], target.shape[dim] - size[axis])
                target = target.narrow(dim, 0, size[axis])
                is_dense = rest.is_contiguous(memory_format=given.format)
                if not is_dense or rest.numel() > static.storage_offset():
                    self._fills.append((rest, given.pad))
                elif rest.numel():
                    targets.append(rest)
                    padding.append(rest.as_strided(rest.shape, rest.stride(), 0))
            targets.insert(len(places), target)
            places.append(place)

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        for rest, pad in self._fills:
            rest.fill_(pad)
        for places, targets, padding in self._launches.values():
            if len(targets) == 1:
                targets[0].copy_(tensors[places[0]])
            else:
                torch._foreach_copy_(targets, [*map(tensors.__getitem__, places), *padding])


def cut(tensor: Tensor, dims: Dims, size: Size) -> Tensor:
    """What of a tensor belongs to a size not above its own."""
    for dim, axis in dims.items():
        tensor = tensor.narrow(dim, 0, size[axis])
    return tensor


def size_of(inputs: Sequence[Input], tensors: Sequence[Tensor], axes: int) -> Size:
    """The size of a call; raises ValueError if its tensors are not as captured, or disagree."""
    for given, tensor in zip(inputs, tensors, strict=True):
        given.check(tensor)
    size: list[int] = []
    for axis in range(axes):
        found = {
            f"{given.path} along dimension {dim}": tensor.shape[dim]
            for given, tensor in zip(inputs, tensors, strict=True)
            for dim, of in given.dims.items()
            if of == axis
        }
        extent, *others = {*found.values()} or {0}
        if extent == 0 or others:
            raise ValueError(
                f"axis {axis} of the size of a call must be one number above 0, but is "
                f"{found or 'that of no argument'}: dim says which argument has which"
            )
        size.append(extent)
    return tuple(size)


def check_names(
    option: str, by_name: Any, leaves: Iterable[tuple[str, Any]], parameters: Iterable[Any]
) -> None:
    """Raises ValueError if a mapping names an argument that the function has not."""
    if isinstance(by_name, Mapping):
        known = {name for path, _ in leaves for name in (path, _parameter(path))}
        others = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        if unknown := sorted(by_name.keys() - known - others, key=str):
            raise ValueError(f"{option} names {unknown}, but the arguments are {sorted(known)}")


def dims_of(dim: Any, path: str, axes: int) -> Dims:
    """What ``dim`` of :class:`GraphRunner` says of one argument."""
    dim = _said_of(dim, path, None)
    entries = dim if isinstance(dim, tuple) else (dim,) if dim is not None else (None,) * axes
    dims = {
        number: axis
        for axis, entry in enumerate(entries)
        for number in (entry if isinstance(entry, tuple) else (entry,))
        if number is not None
    }
    if len(entries) != axes or not all(isinstance(number, int) for number in dims):
        raise ValueError(
            f"dim is {dim!r} for {path}, but must be an integer or None, or a tuple with one for "
            f"each of the {axes} number(s) of a size, which may itself be a tuple of integers"
        )
    return dims


def pad_of(pad: Any, path: str) -> float:
    """What ``pad`` of :class:`GraphRunner` says of one argument."""
    pad = _said_of(pad, path, 0)
    if not isinstance(pad, float) and not (isinstance(pad, int) and abs(pad) < 1 << 63):
        raise ValueError(f"pad is {pad!r} for {path}, but must be a number of 64 bits")
    return pad


def _said_of(option: Any, path: str, default: Any) -> Any:
    is_mapping = isinstance(option, Mapping)
    return option.get(path, option.get(_parameter(path), default)) if is_mapping else option


def _parameter(path: str) -> str:
    """Of the function; all of `*args` have the one."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def _extents(shape: Sequence[int], dims: Dims, size: Size) -> tuple[int, ...]:
    return tuple(size[dims[dim]] if dim in dims else n for dim, n in enumerate(shape))


class Output(NamedTuple):
    path: str  # output['logits']
    shape: tuple[int, ...]
    constant: str  # empty for a tensor


def describe(result: Any, device: torch.device) -> list[Output]:
    """The leaves of what a function returned; raises TypeError for what no graph returns."""
    outputs: list[Output] = []
    for path, leaf in flatten_with_paths(result, "output"):
        if is_plain(leaf) and leaf.device == device:
            outputs.append(Output(path, tuple(leaf.shape), ""))
        elif isinstance(leaf, CONSTANTS):
            outputs.append(Output(path, (), repr(leaf)))
        else:
            refuse(leaf, path)
    return outputs


class Cuts:
    """Which dimensions of the outputs are as large as the call: those that change with its size."""

    def __init__(
        self, outputs_at: Callable[[Size], list[Output]], size: Size, beside: list[list[Size]]
    ) -> None:
        self._size, self._outputs = size, outputs_at(size)
        self.dims: list[dict[int, int]] = [{} for _ in self._outputs]  # of each leaf
        for axis, candidates in enumerate(beside):
            at, there = size, self._outputs
            for at in candidates:
                with contextlib.suppress(*([] if at == candidates[-1] else [Exception])):
                    there = outputs_at(at)
                    break
            for dims, a, b in zip(self.dims, self._outputs, there, strict=False):
                extents = enumerate(zip(a.shape, b.shape, strict=False))
                dims.update((dim, axis) for dim, (n, m) in extents if m != n == size[axis])
            self.check(there, at)
        pairs = zip(self.dims, self._outputs, strict=True)
        self.tensor_dims = [dims for dims, output in pairs if not output.constant]

    def check(self, outputs: list[Output], size: Size) -> None:
        """Raises ValueError if the outputs of a size are not those of the first but for extents."""
        here, there = f"at size {shown(self._size)}", f"at size {shown(size)}"
        if [x.path for x in outputs] != [x.path for x in self._outputs]:
            raise ValueError(
                f"the function returns {len(self._outputs)} value(s) {here} and {len(outputs)} "
                f"{there}, or others: return the same ones at all sizes"
            )
        for dims, own, other in zip(self.dims, self._outputs, outputs, strict=True):
            if other != own._replace(shape=_extents(own.shape, dims, size)):
                found = f"{own.constant or own.shape} {here} and {other.constant or other.shape}"
                raise ValueError(
                    f"{own.path} is {found} {there}: what of it belongs to a padded call is "
                    "unknown. Return the dynamic dimension apart, as in "
                    "x.unflatten(0, (batch, -1)), and constants that are equal at all sizes"
                )
