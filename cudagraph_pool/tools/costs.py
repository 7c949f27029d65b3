"""What a pool costs, of a running program or of a recorded one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .memory_map import MapOfReplay, MemoryMap
from .replay import POOL, new_pools, run, stock_bytes
from .stock import primed_bytes, reserved_bytes
from .trace import (
    Graph,
    Order,
    Trace,
    minimum_bytes,
    most_live_bytes,
    replay_sequence,
    whole_pages,
)


@dataclass(frozen=True, slots=True)
class GraphCost:
    """What one capture took, in bytes.

    Attributes:
        name: Its number, or what a trace calls it.
        added: What the pool got meanwhile.
        needed: The most that it had allocated at once, without what lived before.
        numbers: Of its allocations in the pool.
    """

    name: str
    added: int
    needed: int
    numbers: range

    @classmethod
    def of(cls, name: object, took: Mapping[str, int]) -> GraphCost:
        """Of what the core or the adapter says that a capture took."""
        first = took["first_allocation"]
        return cls(
            str(name),
            took["added_bytes"],
            took["peak_bytes"] - took["live_before_bytes"],
            range(first, first + took["allocations"]),
        )


@dataclass(frozen=True, slots=True)
class PoolCost:
    """What a pool and its graphs take, in bytes.

    Attributes:
        kind: Of the pool; of a trace, the order of its graphs.
        minimum: What no allocator with stable addresses could do with less of.
        apart: What the graphs would need at least if each had a pool of its own.
        stock: What PyTorch's own allocator took, or would take, where that is known.
        expandable: The same with expandable segments.
        primed: The same where one block comes first, of the best of three sizes.
        execs: How many executables the graphs share, where that is known.
        map: Where everything lay, where that is known.
    """

    name: str
    kind: str
    graphs: list[GraphCost]
    minimum: int
    reserved: int
    apart: int
    stock: int | None = None
    expandable: int | None = None
    primed: int | None = None
    execs: int | None = None
    map: MemoryMap | None = None


def of_trace(
    trace: Trace, order: Order = "recorded", seed: int = 0, maps: bool = False
) -> PoolCost:
    """What the graphs of a trace cost, by a replay. The core remembers all: there are at most
    ``MAX_GRAPHS``.
    """
    graphs = replay_sequence(trace, order, seed)
    pools = new_pools()
    watcher = MapOfReplay(pools) if maps else None
    run(pools, graphs, watcher)
    taken = pools.captures(POOL)
    costs = list(map(GraphCost.of, map(_name, itertools.count(1), graphs), taken))
    stock, expandable, primed = stock_bytes(trace, graphs), None, None
    if len({event.stream for graph in graphs for event in graph.events if event.bytes}) == 1:
        stock = stock or reserved_bytes(graphs)
        expandable, primed = reserved_bytes(graphs, expandable=True), primed_bytes(graphs)
    return PoolCost(
        trace.name,
        order,
        costs,
        minimum_bytes(graphs),
        pools.stats(POOL).reserved_bytes,
        _apart(costs),
        stock=stock,
        expandable=expandable,
        primed=primed,
        map=watcher.map if watcher else None,
    )


def _name(number: int, graph: Graph) -> int:
    """What was captured; in a trace of ``record``, which has bytes there, which one it is."""
    return number if graph.key == most_live_bytes(graph.events) else graph.key


def of_pool(pool: Mapping[str, Any], drawn: MemoryMap | None) -> PoolCost:
    """What a pool of this process costs, by what :func:`cudagraph_pool.stats` says of it."""
    costs = list(map(GraphCost.of, itertools.count(1), pool["graphs"]))
    first, second = pool["id"]
    is_torchs = first < 2**63  # of the others there is one, which its kind names
    return PoolCost(
        f"cuda:{pool['device']}" + f" ({first}, {second})" * is_torchs,
        pool["kind"],
        costs,
        whole_pages(pool["peak_allocated_bytes"]),
        pool["reserved_bytes"],
        _apart(costs),
        execs=pool.get("execs") or None,
        map=drawn,
    )


def _apart(costs: Sequence[GraphCost]) -> int:
    return sum(whole_pages(cost.needed) for cost in costs)
