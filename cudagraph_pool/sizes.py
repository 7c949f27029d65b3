"""Sizes for :class:`cudagraph_pool.GraphRunner` to capture: ``cgp.sizes.vllm(512)``, say.

Each function returns a list, smallest first, whose last entry is ``largest``. Needs no torch.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Size = tuple[int, ...]  # one number for each dynamic dimension

__all__ = ["exact", "grid", "multiples", "padded", "powers_of_two", "vllm"]


def exact(largest: int) -> list[int]:
    r"""Return 1, 2, 3, ..., ``largest``: nothing is ever padded."""
    return list(range(1, _checked(largest) + 1))


def powers_of_two(largest: int) -> list[int]:
    r"""Return 1, 2, 4, ..., ``largest``: padding at most doubles a size."""
    powers = (1 << n for n in range(_checked(largest).bit_length()))
    return [*(power for power in powers if power < largest), largest]


def multiples(step: int, largest: int) -> list[int]:
    r"""Return ``step``, 2 × ``step``, ..., ``largest``: less than ``step`` is ever added."""
    return [*range(_checked(step, "step"), _checked(largest), step), largest]


def padded(padding: float, largest: int) -> list[int]:
    r"""Return the fewest sizes with one at most ``1 + padding`` times any up to ``largest``."""
    sizes = [rung(1, padding)]
    while sizes[-1] < _checked(largest):
        sizes.append(_next_rung(sizes[-1], padding))
    return [*sizes[:-1], largest]


def vllm(largest: int = 512) -> list[int]:
    r"""Return the sizes that vLLM captures: 1, 2, 4, from 8 on every 8, from 256 on every 16."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, _checked(largest), 16)]
    return [*(size for size in sizes if size < largest), largest]


def grid(*axes: Sequence[int]) -> list[tuple[int, ...]]:
    r"""Return every combination of sizes of several dimensions: batch × sequence, say."""
    if not axes or not all(isinstance(axis, Iterable) for axis in axes):
        raise TypeError("grid() takes the sizes of each dimension: grid([1, 2, 4], [64, 128])")
    return list(itertools.product(*([_checked(size, "a size") for size in axis] for axis in axes)))


def rung(size: int, padding: float) -> int:
    """The least size of the ladder of :func:`padded` that is not less than ``size``. A rung is as
    far above the one before as ``padding`` allows for a size one above that one.
    """
    if not isinstance(padding, (int, float)):
        raise TypeError(f"padding is {padding!r}, but must be a number: 0.25 adds up to a quarter")
    if not 0 <= padding < math.inf:
        raise ValueError(f"padding is {padding}, but must be 0 or more: 0.25 adds up to a quarter")
    # Every number whose padding is less than one element is a rung of its own.
    top = size if padding == 0 else max(0, min(size, int(1 / padding) - 1))
    while top < size:
        top = _next_rung(top, padding)
    return top


def _next_rung(top: int, padding: float) -> int:
    return int((top + 1) * (1 + padding))


def _checked(value: int, name: str = "largest") -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, but must be an integer") from None
    if number < 1:
        raise ValueError(f"{name} is {number}, but must be at least 1")
    return number


def sizes_of(sizes: Iterable[int | Iterable[int]]) -> list[Size]:
    """Sizes, as users list them. Raises ValueError for what is none, or of other dimensions."""
    try:
        listed = [*map(_size, sizes)]
    except TypeError as error:
        raise ValueError(
            f"sizes is {sizes!r}, but must be a sequence of integers or of tuples of them"
        ) from error
    if not any(listed):
        raise ValueError("sizes is empty: there is nothing to capture")
    if other := next((size for size in listed if len(size) != len(listed[0])), None):
        raise ValueError(
            f"sizes has {listed[0]} and {other}: all must have the same number of dimensions"
        )
    return listed


def _size(given: Any) -> Size:
    numbers = given if hasattr(given, "__iter__") else (given,)
    return tuple(_checked(number, "a size") for number in numbers)


def cost(size: Size) -> tuple[int, Size]:
    """Orders sizes by what a replay costs: about how many elements there are."""
    return math.prod(size), size


class Buckets:
    """The sizes that were listed; or, by ``"auto"``, those that come with the calls, where each
    dimension is padded by at most ``padding`` of itself.
    """

    def __init__(self, sizes: Iterable[int | Iterable[int]] | str, dim: Any, padding: float):
        self._padding = padding
        self.listed: list[Size] = []
        if isinstance(sizes, str) and sizes == "auto":
            rung(1, padding)  # refuses what is no padding
            self.axes = _axes_of(dim)
        elif isinstance(sizes, str):
            raise ValueError(f"sizes is {sizes!r}, but must be a sequence or 'auto'")
        else:
            self.listed = sizes_of(sizes)
            self.axes = len(self.listed[0])
        self._by_cost = sorted(self.listed, key=cost)
        for size, following in itertools.pairwise(self._by_cost):
            if size == following:
                raise ValueError(f"sizes has {shown(size)} twice")

    def fit(self, size: Size) -> Size | None:
        """The cheapest bucket that holds ``size``; None if it is larger than all."""
        if not self.listed:
            return tuple(rung(n, self._padding) for n in size)
        # What is cheaper than the size itself cannot hold it.
        first = bisect.bisect_left(self._by_cost, cost(size), key=cost)
        return next((b for b in self._by_cost[first:] if _holds(b, size)), None)

    def largest(self) -> str:
        """Those listed that no other one holds, for an error."""
        held = {s for s in self.listed if any(o != s and _holds(o, s) for o in self.listed)}
        return " or ".join(shown(size) for size in self.listed if size not in held)

    def neighbours(self, size: Size) -> list[list[Size]]:
        """For each axis sizes that differ along it only; none where no call is padded. The smallest
        comes first, since what a function does for one row only shows there; then, for a function
        that cannot run at it, the smallest that is listed, else half the size.
        """
        found: list[list[Size]] = []
        for axis, extent in enumerate(size):
            before, behind = rest = size[:axis], size[axis + 1 :]
            beside = [s for s in self.listed if s != size and (s[:axis], s[axis + 1 :]) == rest]
            least = 1 if extent > 1 else 2
            smallest, half = ((*before, n, *behind) for n in (least, extent // 2 or 2))
            is_padded = not self.listed or any(s[axis] > 1 for s in self.listed)
            found.append([smallest, min(beside, default=half)] if is_padded else [])
        return found


def shown(size: Size) -> str:
    """As users wrote it: 8, or 8 × 128."""
    return " × ".join(map(str, size))


def _holds(bucket: Size, size: Size) -> bool:
    return all(map(int.__le__, size, bucket))


def _axes_of(dim: Any) -> int:
    entries = dim.values() if isinstance(dim, Mapping) else [dim]
    pairs = [(entry,) if isinstance(entry, int) else entry for entry in entries]
    axes = {len(pair) if isinstance(pair, tuple) else 0 for pair in pairs if pair is not None}
    if len(axes) != 1 or 0 in axes:
        raise ValueError(
            f"dim is {dim!r}: with sizes='auto' it says how many dynamic dimensions there are, and "
            "says so for one tensor at least, and the same for all"
        )
    return axes.pop()
