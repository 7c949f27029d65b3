"""Which captured size serves a call. Needs no torch."""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Iterable
from typing import Protocol

from .sizes import rung

Size = tuple[int, ...]  # one number for each dynamic dimension


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
        fitting = (b for b in self._cheapest_first[first:] if all(map(int.__le__, size, b)))
        return next(fitting, None)

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


def sizes_of(sizes: Iterable[int | Iterable[int]]) -> list[Size]:
    """Sizes, as users list them.

    Raises:
        ValueError: There are none, or one is no size, or has another number of dimensions than the
            first.
    """
    try:
        listed = [_size(size) for size in sizes]
    except TypeError as error:
        raise ValueError(
            f"sizes is {sizes!r}, but must be a sequence of integers or of tuples of them"
        ) from error
    if not listed:
        raise ValueError("sizes is empty: there is nothing to capture")
    for size in listed:
        if len(size) != len(listed[0]):
            raise ValueError(
                f"sizes has {listed[0]} and {size}: all must have the same number of dimensions"
            )
    return listed


def _size(given: int | Iterable[int]) -> Size:
    numbers = given if hasattr(given, "__iter__") else (given,)
    size = []
    for number in numbers:
        try:
            size.append(operator.index(number))
        except TypeError:
            size.append(0)
    if not size or min(size) < 1:
        raise ValueError(f"sizes has {given!r}, but a size is an integer of at least 1")
    return tuple(size)


def cost(size: Size) -> tuple[int, Size]:
    """Orders sizes by what a replay costs: about how many elements there are."""
    return math.prod(size), size


def shown(size: Size) -> str:
    """As users wrote it: 8, or 8 × 128."""
    return " × ".join(map(str, size))
