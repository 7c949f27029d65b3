"""What captured graphs return: which part of it is a call's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..sizes import Size, shown
from .arguments import flatten_with_paths, require_plain
from .inputs import Dims

# Of one leaf: where it is, as output['logits'], and the shape of a tensor or a constant as text.
Output = tuple[str, tuple[int, ...] | str]

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def describe(result: Any, device_type: str) -> list[Output]:
    """The leaves of what a function returned.

    Raises:
        TypeError: One is neither a plain tensor of the device nor a constant.
    """
    outputs: list[Output] = []
    for path, leaf in flatten_with_paths(result):
        name = "output" + path
        if isinstance(leaf, Tensor):
            require_plain(leaf, name)
            if leaf.device.type != device_type:
                raise TypeError(
                    f"{name} is on {leaf.device}: a graph would leave it as its capture did. "
                    f"Return it on {device_type}, and let the caller copy it"
                )
        elif not isinstance(leaf, _CONSTANTS):
            raise TypeError(
                f"{name} is a {type(leaf).__name__}; a GraphRunner's function returns tensors and "
                "constants, in tuples, lists, dicts or what torch.utils._pytree knows"
            )
        outputs.append((name, tuple(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf)))
    return outputs


class Cuts:
    """Which dimensions of the outputs are as large as the call.

    Found by running the function at sizes that differ along one axis, which shows what follows it:
    an extent that merely happens to equal a size does not change with it. Of the neighbours of an
    axis the first is taken that the function can run at.

    Raises:
        ValueError: What the function returns depends on the size in a way that cannot be cut.
    """

    def __init__(
        self,
        outputs_at: Callable[[Size], list[Output]],
        size: Size,
        neighbours: Sequence[Sequence[Size]],
    ) -> None:
        self._size, self._outputs = size, outputs_at(size)
        self.dims: list[Dims] = [()] * len(self._outputs)  # of each leaf
        for extent, candidates in zip(size, neighbours, strict=True):
            at, there = size, self._outputs
            for at in candidates:
                is_last = at == candidates[-1]
                with contextlib.nullcontext() if is_last else contextlib.suppress(Exception):
                    there = outputs_at(at)
                    break
            pairs = zip(self._outputs, there, strict=False)
            for leaf, ((_, a), (_, b)) in enumerate(pairs):
                extents = enumerate(zip(a, b, strict=False)) if isinstance(a, tuple) else ()
                self.dims[leaf] += (tuple(dim for dim, (n, m) in extents if m != n == extent),)
            self.check(there, at)

    def check(self, outputs: list[Output], size: Size) -> None:
        """Raises ValueError if the outputs of a size are not those of the first but for extents."""
        at = f"at size {shown(self._size)} and {{}} at {shown(size)}"
        if [path for path, _ in outputs] != [path for path, _ in self._outputs]:
            raise ValueError(
                f"the function returns {len(self._outputs)} value(s) {at.format(len(outputs))}, or "
                "others: which of them a padded call should return is unknown"
            )
        for dims, (path, here), (_, there) in zip(self.dims, self._outputs, outputs, strict=True):
            expected = here
            if isinstance(here, tuple):
                extents = {dim: n for n, of in zip(size, dims, strict=False) for dim in of}
                expected = tuple(extents.get(dim, n) for dim, n in enumerate(here))
            if there != expected:
                why = "a value that Python computes from the padded size would be wrong"
                if isinstance(here, tuple):
                    why = (
                        "where its padding lies is unknown. Return it with the dynamic dimension "
                        "apart, as in x.unflatten(0, (batch, -1))"
                    )
                raise ValueError(f"{path} is {here} {at.format(there)}: {why}")
