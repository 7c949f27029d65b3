"""Replays recorded captures through the real core, on the host driver."""

import json
import time
from collections.abc import Callable
from typing import Any, Final, TextIO

from tqdm import tqdm

from .. import _core
from .trace import MAX_LIVE_BYTES, Event, Graph, Order, Trace, minimum_bytes, replay_sequence

POOL: Final = (0, 1)

# Is told what a replay has done, with the block of an allocation, as soon as it is done.
Watcher = Callable[[Event, _core.Block | None], None]


def replay(
    trace: Trace, order: Order = "recorded", seed: int = 0, placements: TextIO | None = None
) -> dict[str, Any]:
    """Replays a trace into one pool, one capture scope for each graph. Returns what it cost.

    The driver only counts. Sizes are bytes. ``placements`` gets, as JSON lines, the physical bytes
    of each block; the seconds are with that. Raises MemoryError if the driver runs out of pages,
    RuntimeError if the core refuses, which is a bug.
    """
    graphs = replay_sequence(trace, order, seed)
    pools = new_pools()
    seconds = run(pools, graphs, _writing(pools, placements) if placements else None)
    stats = pools.stats(POOL)
    if placements:
        _write(placements, {"op": "end", "reserved_bytes": stats.reserved_bytes})
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


def run(pools: _core.PoolSet, graphs: list[Graph], watcher: Watcher | None) -> float:
    """Makes the calls; returns the time that they and the watcher took."""
    addresses: dict[int, int] = {}
    start = time.perf_counter()
    for graph in tqdm(graphs, unit="graph", delay=1, leave=False, disable=None):
        pools.begin_scope(POOL, _core.ScopeKind.CAPTURE)
        for event in graph.events:
            block = pools.allocate(POOL, event.bytes, event.stream) if event.bytes else None
            if block:
                addresses[event.block] = block.address
            else:
                pools.free(addresses.pop(event.block))
            if watcher:
                watcher(event, block)
        pools.end_scope(POOL)
    return time.perf_counter() - start


def _writing(pools: _core.PoolSet, file: TextIO) -> Watcher:
    """Writes what the core decided, for an outside validator."""
    pages = 0

    def write(event: Event, block: _core.Block | None) -> None:
        nonlocal pages
        if block is None:
            _write(file, {"op": "free", "id": event.block})
            return
        stats = pools.stats(POOL)
        for page in range(pages, stats.pages):  # numbered in the order in which they are made
            _write(file, {"op": "page", "page": page, "bytes": stats.page_bytes})
        pages = stats.pages
        place = {"va": block.address, "pages": pools.pieces(block.address)}
        _write(file, {"op": "alloc", "id": event.block, "bytes": block.bytes, **place})

    return write


def _write(file: TextIO, line: dict[str, object]) -> None:
    file.write(json.dumps(line) + "\n")
