"""Replays recorded captures through the real core, on the host driver."""

import json
import time
from collections.abc import Iterator
from typing import Any, Final, TextIO

from tqdm import tqdm

from .. import _core
from .trace import MAX_LIVE_BYTES, Event, Graph, Order, Trace, minimum_bytes, replay_sequence

POOL: Final = (0, 1)


def replay(
    trace: Trace, order: Order = "recorded", seed: int = 0, placements: TextIO | None = None
) -> dict[str, Any]:
    """Replays a trace into one pool, one capture scope for each graph. Returns what it cost.

    The driver only counts. Sizes are bytes. ``placements`` gets, as JSON lines, the physical bytes
    of each block; the seconds are with that. Raises MemoryError if the driver runs out of pages,
    RuntimeError if the core refuses, which is a bug.
    """
    graphs = replay_sequence(trace, order, seed)
    pools, pages = new_pools(), 0
    start = time.perf_counter()
    for event, block in run(pools, graphs):
        if placements:
            placements.writelines(_lines(pools, event, block, pages))
            pages = pools.stats(POOL).pages
    seconds = time.perf_counter() - start
    stats = pools.stats(POOL)
    if placements:
        placements.write(f'{{"op": "end", "reserved_bytes": {stats.reserved_bytes}}}\n')
    minimum = minimum_bytes(graphs)
    return {
        "name": trace.name,
        "graphs": len(graphs),
        "order": order,
        "minimum_bytes": minimum,
        "reserved_bytes": stats.reserved_bytes,
        "ratio": stats.reserved_bytes / minimum,
        "stock_reserved_bytes": stock_bytes(trace, graphs),
        "ranges": stats.ranges,
        "page_mappings": stats.page_mappings,
        "ops": stats.allocations + stats.frees,
        "seconds": seconds,
    }


def new_pools() -> _core.PoolSet:
    """On a driver that has room for any trace."""
    return _core.PoolSet(_core.NumberDriver(physical_limit_bytes=4 * MAX_LIVE_BYTES))


def stock_bytes(trace: Trace, graphs: list[Graph]) -> int | None:
    """What stock reserved for them, which is known in the recorded order, and of real captures."""
    return (trace.stock_reserved_bytes or None) if graphs is trace.graphs else None


def run(pools: _core.PoolSet, graphs: list[Graph]) -> Iterator[tuple[Event, _core.Block | None]]:
    """Makes the calls, and yields each, with the block of an allocation, when it is made."""
    addresses: dict[int, int] = {}
    for graph in tqdm(graphs, unit="graph", delay=1, leave=False, disable=None):
        pools.begin_scope(POOL, _core.ScopeKind.CAPTURE)
        for event in graph.events:
            block = None
            if event.bytes:
                block = pools.allocate(POOL, event.bytes, event.stream)
                addresses[event.block] = block.address
            else:
                pools.free(addresses.pop(event.block))
            yield event, block
        pools.end_scope(POOL)


def _lines(
    pools: _core.PoolSet, event: Event, block: _core.Block | None, pages: int
) -> Iterator[str]:
    """What the core decided, for an outside validator that has been told of so many pages."""
    lines: list[dict[str, Any]] = [{"op": "free", "id": event.block}]
    if block is not None:
        stats = pools.stats(POOL)
        made = range(pages, stats.pages)  # numbered in the order in which they are made
        lines = [{"op": "page", "page": page, "bytes": stats.page_bytes} for page in made]
        place = {"va": block.address, "pages": pools.pieces(block.address)}
        lines += [{"op": "alloc", "id": event.block, "bytes": block.bytes, **place}]
    return (json.dumps(line) + "\n" for line in lines)
