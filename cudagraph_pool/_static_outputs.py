"""What captured graphs return: which part of it is a call's, and whose memory it is.

A graph's outputs do not keep their memory from the graphs captured after it: they are read before
another one is replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ._buckets import Size, shown
from ._call import flatten_named

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Output(NamedTuple):
    """One leaf of what a function returns.

    Attributes:
        path: As an error names it: output['logits'].
        shape: Of a tensor; None for a constant.
        constant: The constant, as Python writes it.
    """

    path: str
    shape: tuple[int, ...] | None
    constant: str

    def told(self) -> str:
        """For an error."""
        return self.constant if self.shape is None else f"of shape {self.shape}"


def paths_of(result: Any) -> list[str]:
    """Of the leaves of what a function returned, as an error names them."""
    return ["output" + path for path, _ in flatten_named(result)]


def describe(leaves: Sequence[Any], paths: Sequence[str], device_type: str) -> list[Output]:
    """The leaves of what a function returned.

    Raises:
        TypeError: One is neither a strided tensor of the device nor a constant that cannot change.
    """
    outputs = []
    for name, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, Tensor):
            check_strided(leaf, name)
            if leaf.device.type != device_type:
                raise TypeError(
                    f"{name} is on {leaf.device}: a graph would leave it as its capture did. "
                    f"Return it on {device_type}, and let the caller copy it"
                )
            outputs.append(Output(name, tuple(leaf.shape), ""))
        elif isinstance(leaf, _CONSTANTS):
            outputs.append(Output(name, None, repr(leaf)))
        else:
            raise TypeError(
                f"{name} is a {type(leaf).__name__}; a GraphRunner's function returns tensors and "
                "constants, in tuples, lists, dicts or what torch.utils._pytree knows"
            )
    return outputs


class Cuts:
    """Which dimensions of the outputs are as large as the call.

    Found by running the function at sizes that differ along one axis, which shows what follows it:
    an extent that merely happens to equal a size does not change with it.

    Arguments:
        outputs_at: Returns what the function returns at a size.
        size: One that will be captured.
        neighbours: For each axis sizes that differ from ``size`` along it only, the first of which
            the function can run at is taken; none where every call is as large as its bucket.

    Raises:
        ValueError: What the function returns depends on the size in a way that cannot be cut.
    """

    def __init__(
        self,
        outputs_at: Callable[[Size], list[Output]],
        size: Size,
        neighbours: Sequence[Sequence[Size]],
        device_type: str,
    ) -> None:
        here = outputs_at(size)
        self._device_type = device_type
        self._captured_first = size, here
        self._tree: pytree.TreeSpec | None = None
        self._paths: list[str] = []  # of its leaves
        self._dims: list[list[tuple[int, int]]] = [[] for _ in here]  # of each: (axis, dimension)
        for axis, candidates in enumerate(neighbours):
            if not candidates:
                continue
            neighbour, there = _first_that_runs(outputs_at, candidates)
            _check_paths(here, there, size, neighbour)
            for dims, a, b in zip(self._dims, here, there, strict=True):
                dims += [(axis, dim) for dim in _follows(a, b, size, neighbour, axis)]

    def check(self, leaves: Sequence[Any], tree: pytree.TreeSpec, size: Size) -> None:
        """Raises ValueError if the outputs of a size are not those of the first but for extents."""
        first, expected = self._captured_first
        if tree != self._tree:
            self._tree, self._paths = tree, paths_of(pytree.tree_unflatten(leaves, tree))
        outputs = describe(leaves, self._paths, self._device_type)
        _check_paths(expected, outputs, first, size)
        for dims, a, b in zip(self._dims, expected, outputs, strict=True):
            shape = None if a.shape is None else list(a.shape)
            for axis, dim in dims:
                assert shape is not None
                shape[dim] = size[axis]
            there = None if b.shape is None else list(b.shape)
            if there != shape or a.constant != b.constant:
                raise ValueError(
                    f"{a.path} is {a.told()} at size {shown(first)} and {b.told()} at "
                    f"{shown(size)}: what a padded call should return is unknown"
                )

    def dims(self, leaf: int, axes: int) -> tuple[tuple[int, ...], ...]:
        """For each axis the dimensions of an output that follow it."""
        return tuple(
            tuple(dim for along, dim in self._dims[leaf] if along == axis) for axis in range(axes)
        )

    def cut(self, leaf: int, output: Tensor, size: Size) -> Tensor:
        """What of an output of a bucket is that of a call of ``size``."""
        for axis, dim in self._dims[leaf]:
            if size[axis] < output.shape[dim]:
                output = output.narrow(dim, 0, size[axis])
        return output


def _first_that_runs(
    outputs_at: Callable[[Size], list[Output]], candidates: Sequence[Size]
) -> tuple[Size, list[Output]]:
    for size in candidates[:-1]:
        with contextlib.suppress(Exception):
            return size, outputs_at(size)
    return candidates[-1], outputs_at(candidates[-1])


def _check_paths(a: list[Output], b: list[Output], size: Size, other: Size) -> None:
    if [output.path for output in a] != [output.path for output in b]:
        raise ValueError(
            f"the function returns {len(a)} value(s) at size {shown(size)} and {len(b)} at "
            f"{shown(other)}, or others: which of them a padded call should return is unknown"
        )


def _follows(a: Output, b: Output, size: Size, neighbour: Size, axis: int) -> list[int]:
    """The dimensions along which an output is as large as the size."""
    at = f"at size {shown(size)} and {{}} at {shown(neighbour)}"
    if a.shape is None or b.shape is None:
        if (a.shape, a.constant) != (b.shape, b.constant):
            raise ValueError(
                f"{a.path} is {a.told()} {at.format(b.told())}: a value that Python "
                "computes from the padded size would be wrong; compute it from the call's arguments"
            )
        return []
    dims = []
    for dim, extents in enumerate(zip(a.shape, b.shape, strict=False)):
        if extents[0] != extents[1]:
            if extents != (size[axis], neighbour[axis]):
                break
            dims.append(dim)
    else:
        if len(a.shape) == len(b.shape):
            return dims
    raise ValueError(
        f"{a.path} has the shape {a.shape} {at.format(b.shape)}: where its padding lies is "
        "unknown. Return it with the dynamic dimension apart, as in x.unflatten(0, (batch, -1))"
    )


def check_strided(tensor: Tensor, what: str) -> None:
    """Raises TypeError for a tensor whose memory a graph cannot leave to a call."""
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
        raise TypeError(f"{what} is {kind}; what a graph leaves must be strided")
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(
            f"{what} is a {type(tensor).__name__}; what a graph leaves must be a plain tensor: "
            "return those that it wraps"
        )


def counting_changes() -> AbstractContextManager[Any]:
    """Tensors that are made in inference mode count none, and cannot require gradients."""
    in_inference_mode = torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if in_inference_mode else nullcontext()


def lend(tensor: Tensor, owner: object) -> Tensor:
    """The same memory as a tensor that keeps ``owner`` alive, and not the block that it lies in.

    The storage's Python object lives as long as the storage does, and holds the owner. That must
    not hold the tensor in turn: nobody would find the circle.
    """
    if tensor.is_conj():
        return lend(tensor.conj(), owner).conj()
    if tensor.is_neg():
        return lend(tensor._neg_view(), owner)._neg_view()
    storage = tensor.untyped_storage()
    lent: Any = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    lent._owner = owner
    with counting_changes():
        empty = tensor.new_empty(0)
        return empty.set_(lent, tensor.storage_offset(), tensor.size(), tensor.stride())
