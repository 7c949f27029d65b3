"""Replays recorded captures through the real core, on the host driver."""

from __future__ import annotations

import json
import time
from typing import Final, Protocol, TextIO, TypedDict

from tqdm import tqdm

from .. import _core
from .trace import (
    MAX_LIVE_BYTES,
    Graph,
    Order,
    Trace,
    minimum_bytes,
    replay_sequence,
)

POOL: Final = (0, 1)


class Watcher(Protocol):
    """Is told what a replay does, as soon as it is done."""

    def allocated(self, block_id: int, block: _core.Block) -> None: ...
    def freed(self, block_id: int) -> None: ...


class ReplayResult(TypedDict):
    """What a replay cost. Sizes in bytes, time in seconds of the core's calls. What stock reserved
    is known of the order in which graphs were recorded only, and not of captures that were made up.
    """

    name: str
    graphs: int
    order: Order
    minimum_bytes: int
    reserved_bytes: int
    ratio: float
    stock_reserved_bytes: int | None
    ranges: int
    page_mappings: int
    ops: int
    seconds: float


def replay(
    trace: Trace, order: Order = "recorded", seed: int = 0, placements: TextIO | None = None
) -> ReplayResult:
    """Replays a trace into one pool, one capture scope for each graph.

    The driver only counts: a replay touches no memory, and the core decides the same.

    Args:
        trace: what :func:`cudagraph_pool._trace.read_trace` returned.
        order: of the graphs.
        seed: of ``order="shuffled"``.
        placements: where to write, as JSON lines, the physical bytes that each block got.

    Raises:
        MemoryError: if the driver runs out of pages.
        RuntimeError: if the core refuses, which is a bug.
    """
    graphs = replay_sequence(trace, order, seed)
    pools = new_pools()
    watcher = _Placements(pools, placements) if placements else None
    seconds = run(pools, graphs, watcher)
    if watcher:
        watcher.end()
    stats = pools.stats(POOL)
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
    """What stock reserved for the trace's graphs in this order, if that is known."""
    return (trace.stock_reserved_bytes or None) if graphs is trace.graphs else None


def run(pools: _core.PoolSet, graphs: list[Graph], watcher: Watcher | None) -> float:
    """Makes the calls; returns the time they took, without that of the watcher. Of what takes
    longer than a second a terminal shows how far it is.
    """
    addresses: dict[int, int] = {}
    watching = 0.0
    start = time.perf_counter()
    for graph in tqdm(graphs, unit="graph", delay=1, leave=False, disable=None):
        pools.begin_scope(POOL, _core.ScopeKind.CAPTURE)
        for event in graph.events:
            if event.bytes:
                block = pools.allocate(POOL, event.bytes, event.stream)
                addresses[event.block] = block.address
            else:
                pools.free(addresses.pop(event.block))
            if watcher:
                before = time.perf_counter()
                if event.bytes:
                    watcher.allocated(event.block, block)
                else:
                    watcher.freed(event.block)
                watching += time.perf_counter() - before
        pools.end_scope(POOL)
    return time.perf_counter() - start - watching


class _Placements:
    """Writes what the core decided, for an outside validator."""

    def __init__(self, pools: _core.PoolSet, file: TextIO) -> None:
        self._pools = pools
        self._file = file
        self._pages = 0

    def allocated(self, block_id: int, block: _core.Block) -> None:
        stats = self._pools.stats(POOL)
        while self._pages < stats.pages:  # pages are numbered in the order in which they are made
            self._write({"op": "page", "page": self._pages, "bytes": stats.page_bytes})
            self._pages += 1
        pieces = self._pools.pieces(block.address)
        self._write(
            {
                "op": "alloc",
                "id": block_id,
                "bytes": block.bytes,
                "va": block.address,
                "pages": pieces,
            }
        )

    def freed(self, block_id: int) -> None:
        self._write({"op": "free", "id": block_id})

    def end(self) -> None:
        self._write({"op": "end", "reserved_bytes": self._pools.stats(POOL).reserved_bytes})

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line) + "\n")
