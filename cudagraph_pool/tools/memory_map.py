"""The memory map of a pool: which graph had which of its bytes, and when, counted in operations."""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .trace import GRANULE_BYTES, PAGE_BYTES, round_up

Piece = tuple[int, int, int]  # of physical memory: a page, and in it an offset and a length
Stretch = tuple[int, int]  # physical bytes [begin, end) of a pool, by the numbers of its pages


class Operation(NamedTuple):
    """An allocation; with ``size == 0`` the free of what lies at ``address``."""

    address: int
    size: int


@dataclass(slots=True)
class Placed:
    born: int  # the operation that allocated it
    stretches: list[Stretch]  # several if it was stitched
    died: int | None = None  # the operation that freed it; None if it lives


@dataclass(slots=True)
class MemoryMap:
    """What was placed, in the order of allocation, up to now."""

    placed: list[Placed] = field(default_factory=list)
    operations: int = 0
    first_allocation: int = 0  # how many allocations the pool had made before
    _live: dict[int, Placed] = field(default_factory=dict)  # by what names a block

    def allocate(self, block: int, pieces: Iterable[Piece], page_bytes: int = PAGE_BYTES) -> None:
        stretches = joined((page * page_bytes + at, length) for page, at, length in pieces)
        self._live[block] = Placed(self.operations, stretches)
        self.placed.append(self._live[block])
        self.operations += 1

    def free(self, block: int) -> None:
        """Blocks that it does not know are of other pools."""
        if block in self._live:
            self._live.pop(block).died = self.operations
            self.operations += 1


def map_of_history(operations: Iterable[Operation], snapshot: Mapping[str, Any]) -> MemoryMap:
    """The map of a pool that the adapter made the snapshot of, by what was done in any pools."""
    page_bytes = snapshot["stats"]["page_bytes"]
    ranges = sorted((entry["address"], entry["pages"]) for entry in snapshot["ranges"])
    begins = [address for address, _ in ranges]
    result = MemoryMap()
    for operation in operations:
        if not operation.size:
            result.free(operation.address)
            continue
        place = bisect.bisect_right(begins, operation.address) - 1
        address, pages = ranges[place] if place >= 0 else (0, [])
        begin = operation.address - address
        end = begin + round_up(operation.size, GRANULE_BYTES)
        if end <= len(pages) * page_bytes:
            result.allocate(operation.address, _pieces(pages, page_bytes, begin, end), page_bytes)
    result.first_allocation = snapshot["stats"]["allocations"] - len(result.placed)
    return result


def operation_of(entry: Mapping[str, Any]) -> Operation | None:
    """What an entry of torch's memory history says of a block, if it does."""
    if entry["action"] == "alloc":
        return Operation(entry["addr"], entry["size"])
    return Operation(entry["addr"], 0) if entry["action"] == "free_requested" else None


def _pieces(pages: Sequence[int], page_bytes: int, begin: int, end: int) -> Iterable[Piece]:
    """What is behind [begin, end) of a range."""
    while begin < end:
        offset = begin % page_bytes
        length = min(page_bytes - offset, end - begin)
        yield pages[begin // page_bytes], offset, length
        begin += length


def joined(pieces: Iterable[tuple[int, int]]) -> list[Stretch]:
    """Pieces, each a begin and a length, with those as one that follow one another."""
    stretches: list[Stretch] = []
    for begin, length in pieces:
        if stretches and stretches[-1][1] == begin:
            stretches[-1] = (stretches[-1][0], begin + length)
        else:
            stretches.append((begin, begin + length))
    return stretches
