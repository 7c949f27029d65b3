"""Which captured size serves a call. Needs no torch."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Protocol

from ..sizes import Size, cost, rung, sizes_of


class Buckets(Protocol):
    """The sizes there are, or may be.

    Attributes:
        axes (int): How many numbers a size has.
    """

    axes: int

    def fit(self, size: Size) -> Size | None:
        """The cheapest bucket that holds ``size``; None if it is larger than all."""

    def listed(self) -> tuple[Size, ...]:
        """All of them, as they were given; none if they come with the calls."""


class ListedBuckets:
    """Sizes that were listed.

    Raises:
        ValueError: As :func:`sizes_of`, or one is given twice.
    """

    def __init__(self, sizes: Iterable[int | Iterable[int]]) -> None:
        listed = sizes_of(sizes)
        self.axes = len(listed[0])
        if len(set(listed)) < len(listed):
            twice = next(size for n, size in enumerate(listed) if size in listed[:n])
            raise ValueError(f"sizes has {shown(twice)} twice")
        self._given = tuple(listed)
        self._cheapest_first = sorted(listed, key=cost)

    def fit(self, size: Size) -> Size | None:
        # What is cheaper than the size itself cannot hold it.
        first = bisect.bisect_left(self._cheapest_first, cost(size), key=cost)
        return next((b for b in self._cheapest_first[first:] if holds(b, size)), None)

    def listed(self) -> tuple[Size, ...]:
        return self._given


class LadderBuckets:
    """Sizes that come with the calls: each dimension is padded by at most ``padding`` of itself."""

    def __init__(self, axes: int, padding: float) -> None:
        rung(1, padding)  # refuses what is no padding
        self.axes = axes
        self._padding = padding

    def fit(self, size: Size) -> Size:
        return tuple(rung(n, self._padding) for n in size)

    def listed(self) -> tuple[Size, ...]:
        return ()


def holds(bucket: Size, size: Size) -> bool:
    """Whether no dimension of the size is larger than that of the bucket."""
    return all(map(int.__le__, size, bucket))


def largest_of(buckets: Buckets) -> str:
    """The sizes that no other one holds, for an error."""
    listed = buckets.listed()
    largest = (size for size in listed if not any(o != size and holds(o, size) for o in listed))
    return " or ".join(map(shown, largest))


def neighbours_of(size: Size, buckets: Buckets) -> list[list[Size]]:
    """For each axis sizes that differ along it only, the best first; none where no call is padded.

    The smallest comes first, since what a function does for one row only shows there. A function
    that cannot run at it is tried at the smallest that is listed, or at half the size.
    """
    listed = buckets.listed()
    found: list[list[Size]] = []
    for axis, extent in enumerate(size):
        before, behind = size[:axis], size[axis + 1 :]
        beside = [n for n in listed if n != size and (n[:axis], n[axis + 1 :]) == (before, behind)]
        smallest, half = ((*before, n, *behind) for n in (1 if extent > 1 else 2, extent // 2 or 2))
        never_padded = bool(listed) and all(other[axis] == 1 for other in listed)
        found.append([] if never_padded else [smallest, min(beside, default=half)])
    return found


def shown(size: Size) -> str:
    """As users wrote it: 8, or 8 × 128."""
    return " × ".join(map(str, size))
