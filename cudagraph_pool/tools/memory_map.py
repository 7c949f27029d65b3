"""The memory map of a pool: which graph had which of its bytes, and when, counted in operations."""

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import _core
from .trace import GRANULE_BYTES, PAGE_BYTES, Event, round_up

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

    def allocate(self, block: int, pieces: Iterable[tuple[int, int]]) -> None:
        """The pieces are a begin and a length each."""
        self._live[block] = Placed(self.operations, joined(pieces))
        self.placed.append(self._live[block])
        self.operations += 1

    def free(self, block: int) -> None:
        """Blocks that it does not know are of other pools."""
        if block in self._live:
            self._live.pop(block).died = self.operations
            self.operations += 1


def drawing(pools: _core.PoolSet, drawn: MemoryMap) -> Callable[[Event, _core.Block | None], None]:
    """A :class:`cudagraph_pool.tools.replay.Watcher` that draws the map of a replay."""

    def draw(event: Event, block: _core.Block | None) -> None:
        if block is None:
            drawn.free(event.block)
        else:
            pieces = pools.pieces(block.address)
            drawn.allocate(event.block, ((page * PAGE_BYTES + at, n) for page, at, n in pieces))

    return draw


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
            result.allocate(operation.address, _pieces(pages, page_bytes, begin, end))
    result.first_allocation = snapshot["stats"]["allocations"] - len(result.placed)
    return result


def operation_of(entry: Mapping[str, Any]) -> Operation | None:
    """What an entry of torch's memory history says of a block, if it does."""
    if entry["action"] == "alloc":
        return Operation(entry["addr"], entry["size"])
    return Operation(entry["addr"], 0) if entry["action"] == "free_requested" else None


def _pieces(pages: Sequence[int], page_bytes: int, begin: int, end: int) -> Iterable[Stretch]:
    """The physical bytes, and their number, behind [begin, end) of a range."""
    while begin < end:
        offset = begin % page_bytes
        length = min(page_bytes - offset, end - begin)
        yield pages[begin // page_bytes] * page_bytes + offset, length
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
