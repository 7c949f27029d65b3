"""What captured graphs return: which part of it is a call's.

A graph's outputs do not keep their memory from the graphs captured after it: they are read before
another one is replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..sizes import Size
from .arguments import flatten_with_paths, require_plain
from .buckets import shown
from .inputs import Dims

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

    def __str__(self) -> str:
        """For an error."""
        return self.constant if self.shape is None else f"of shape {self.shape}"


def describe(result: Any, device_type: str) -> list[Output]:
    """The leaves of what a function returned.

    Raises:
        TypeError: One is neither a plain tensor of the device nor a constant.
    """
    outputs = []
    for path, leaf in flatten_with_paths(result):
        name = "output" + path
        if isinstance(leaf, Tensor):
            require_plain(leaf, name)
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
    ) -> None:
        here = outputs_at(size)
        self._first = size, here
        self.dims: list[Dims] = [()] * len(here)  # of each leaf
        for axis, candidates in enumerate(neighbours):
            neighbour, there = size, here
            if candidates:
                neighbour, there = _first_that_runs(outputs_at, candidates)
            _check_paths(here, there, size, neighbour)
            for leaf, (a, b) in enumerate(zip(here, there, strict=True)):
                self.dims[leaf] += (_follows(a, b, size, neighbour, axis),)

    def check(self, outputs: list[Output], size: Size) -> None:
        """Raises ValueError if the outputs of a size are not those of the first but for extents."""
        first, expected = self._first
        _check_paths(expected, outputs, first, size)
        for dims, a, b in zip(self.dims, expected, outputs, strict=True):
            extents = {dim: n for n, of_axis in zip(size, dims, strict=True) for dim in of_axis}
            shape = a.shape and tuple(extents.get(dim, n) for dim, n in enumerate(a.shape))
            if (b.shape, b.constant) != (shape, a.constant):
                raise ValueError(
                    f"{a.path} is {a} at size {shown(first)} and {b} at {shown(size)}: what a "
                    "padded call should return is unknown"
                )


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


def _follows(a: Output, b: Output, size: Size, neighbour: Size, axis: int) -> tuple[int, ...]:
    """The dimensions along which an output is as large as the size."""
    if a.shape is None or b.shape is None:
        if (a.shape, a.constant) != (b.shape, b.constant):
            raise ValueError(
                f"{a.path} is {a} at size {shown(size)} and {b} at {shown(neighbour)}: a value "
                "that Python computes from the padded size would be wrong; compute it from the "
                "call's arguments"
            )
        return ()
    extents = list(enumerate(zip(a.shape, b.shape, strict=False)))
    dims = tuple(dim for dim, (n, m) in extents if n != m)
    if len(a.shape) != len(b.shape) or any(
        extents[dim][1] != (size[axis], neighbour[axis]) for dim in dims
    ):
        raise ValueError(
            f"{a.path} has the shape {a.shape} at size {shown(size)} and {b.shape} at "
            f"{shown(neighbour)}: where its padding lies is unknown. Return it with the dynamic "
            "dimension apart, as in x.unflatten(0, (batch, -1))"
        )
    return dims
