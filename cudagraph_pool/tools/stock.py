"""What a pool of PyTorch's own allocator would reserve for recorded captures, as in torch 2.11.

It is too little for captures on several streams: a trace does not say who else used a block.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from .trace import GRANULE_BYTES, PAGE_BYTES, Event, Graph, minimum_bytes, round_up

# A careful user allocates one block in the pool before all others, and frees it. Nobody knows which
# size is best: these are tried, times the minimum.
PRIMED: Final = (1.0, 1.1, 1.25)

_SMALL: Final = 1 << 20  # blocks up to here lie in segments of their own, of a page
_LARGE: Final = 10 << 20  # blocks from here on get segments as long as they are
_SEGMENT: Final = 20 << 20  # what the others get, and by what an expandable segment grows

_Kind = tuple[int, bool]  # a stream, and whether blocks are small: what differs shares nothing


class StockPool:
    """A block gets the best fit of what is free, else a segment, which may be ``expandable``."""

    def __init__(self, expandable: bool = False) -> None:
        self.reserved = 0  # bytes
        self._expandable = expandable
        self._free: defaultdict[_Kind, list[tuple[int, int]]] = defaultdict(list)  # size, address
        self._begins: dict[int, int] = {}  # of what is free, by its end
        self._ends: dict[int, int] = {}
        self._tops: dict[_Kind, int] = {}  # the ends of expandable segments
        self._unused = 1  # no address from here on was used
        self._live: dict[int, tuple[_Kind, int, int]] = {}

    def run(self, events: Iterable[Event]) -> None:
        for event in events:
            if not event.bytes:
                self._give(*self._live.pop(event.block))
                continue
            size = round_up(event.bytes, GRANULE_BYTES)
            kind = event.stream, size <= _SMALL
            self._live[event.block] = kind, *self._allocate(kind, size)

    def _allocate(self, kind: _Kind, size: int) -> tuple[int, int]:
        free = self._free[kind]
        place = bisect.bisect_left(free, (size, 0))
        if place == len(free):
            self._grow(kind, size)
            place = bisect.bisect_left(free, (size, 0))
        elif place + 1 < len(free) and sum(free[place]) == self._tops.get(kind):
            place += 1  # what can grow counts as longer than all others
        length, begin = free.pop(place)
        end = begin + length
        del self._ends[begin], self._begins[end]
        if length - size < (GRANULE_BYTES if kind[1] or self._expandable else _SMALL + 1):
            return begin, end
        self._give(kind, begin + size, end)
        return begin, begin + size

    def _give(self, kind: _Kind, begin: int, end: int) -> None:
        """Makes it free, as one with its neighbours that are."""
        free = self._free[kind]
        if end in self._ends:
            end, middle = self._ends.pop(end), end
            del free[bisect.bisect_left(free, (end - middle, middle))]
        if begin in self._begins:
            begin, middle = self._begins.pop(begin), begin
            del free[bisect.bisect_left(free, (middle - begin, begin))]
        self._ends[begin], self._begins[end] = end, begin
        bisect.insort(free, (end - begin, begin))

    def _grow(self, kind: _Kind, size: int) -> None:
        step = PAGE_BYTES if kind[1] else _SEGMENT
        if self._expandable:
            begin = self._tops.get(kind, self._unused)
            end = begin + round_up(size - (begin - self._begins.get(begin, begin)), step)
            self._unused = max(self._unused, begin + (1 << 60))
            self._tops[kind] = end
        else:
            begin = self._unused
            end = begin + (round_up(size, PAGE_BYTES) if size >= _LARGE else step)
            self._unused = end + 1
        self.reserved += end - begin
        self._give(kind, begin, end)


def growth(graphs: Sequence[Graph], primed: int = 0, expandable: bool = False) -> list[int]:
    """What one pool holds after each, in which ``primed`` bytes were allocated and freed first."""
    pool = StockPool(expandable)
    stream = next(event.stream for graph in graphs for event in graph.events)
    if primed:
        pool.run([Event(-1, primed, stream), Event(-1, 0, 0)])
    held = []
    for graph in graphs:
        pool.run(graph.events)
        held.append(pool.reserved)
    return held


def primed_bytes(graphs: Sequence[Graph]) -> int:
    """What they take in a pool that was primed, by the best of three sizes."""
    minimum = minimum_bytes(list(graphs))
    return min(growth(graphs, primed=int(times * minimum))[-1] for times in PRIMED)
