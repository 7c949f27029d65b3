"""Which captured size serves a call. Needs no torch."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from typing import Any

from ..sizes import Size, cost, rung, sizes_of


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
        twice = [a for a, b in zip(self._by_cost, self._by_cost[1:], strict=False) if a == b]
        if twice:
            raise ValueError(f"sizes has {shown(twice[0])} twice")

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
        """For each axis sizes that differ along it only; none where no call is padded.

        The smallest comes first, since what a function does for one row only shows there. For a
        function that cannot run at it: the smallest that is listed, else half the size.
        """
        found: list[list[Size]] = []
        for axis, extent in enumerate(size):
            before, behind = size[:axis], size[axis + 1 :]
            beside = [
                s
                for s in self.listed
                if s != size and (s[:axis], s[axis + 1 :]) == (before, behind)
            ]
            smallest, half = (
                (*before, n, *behind) for n in (1 if extent > 1 else 2, extent // 2 or 2)
            )
            is_padded = not self.listed or any(s[axis] > 1 for s in self.listed)
            found.append([smallest, min(beside, default=half)] if is_padded else [])
        return found


def shown(size: Size) -> str:
    """As users wrote it: 8, or 8 × 128."""
    return " × ".join(map(str, size))


def _holds(bucket: Size, size: Size) -> bool:
    return all(map(int.__le__, size, bucket))


def _axes_of(dim: Any) -> int:
    entries = list(dim.values()) if isinstance(dim, Mapping) else [dim]
    entries = [(entry,) if isinstance(entry, int) else entry for entry in entries]
    axes = {len(entry) if isinstance(entry, tuple) else 0 for entry in entries if entry is not None}
    if len(axes) != 1 or 0 in axes:
        raise ValueError(
            f"dim is {dim!r}: with sizes='auto' it says how many dynamic dimensions there are, and "
            "says so for one tensor at least, and the same for all"
        )
    return axes.pop()
