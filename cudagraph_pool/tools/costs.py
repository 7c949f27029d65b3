"""What a pool costs, of a running program or of a recorded one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from .._table import mib
from .memory_map import MemoryMap
from .replay import POOL, new_pools, run, stock_bytes
from .stock import growth, primed_bytes
from .trace import Order, Trace, minimum_bytes, most_live_bytes, replay_sequence, whole_pages


@dataclass(frozen=True, slots=True)
class GraphCost:
    """What one capture took, in bytes."""

    name: str  # its number, or what a trace calls it
    added: int  # what the pool got meanwhile
    needed: int  # the most that it had allocated at once, without what lived before
    numbers: range  # of its allocations in the pool

    @classmethod
    def of(cls, name: object, took: Mapping[str, int]) -> Self:
        """Of what the core or the adapter says that a capture took."""
        needed, first = took["peak_bytes"] - took["live_before_bytes"], took["first_allocation"]
        numbers = range(first, first + took["allocations"])
        return cls(str(name), took["added_bytes"], needed, numbers)


@dataclass(frozen=True, slots=True)
class PoolCost:
    """What a pool and its graphs take, in bytes; None is what is not known."""

    name: str
    kind: str  # of the pool; or "trace", or "snapshot"
    graphs: list[GraphCost]
    minimum: int  # no allocator with stable addresses could do with less
    reserved: int
    apart: int | None  # what the graphs would need at least if each had a pool of its own
    stock: int | None = None  # what PyTorch's own allocator took, or would take
    stock_growth: list[int] | None = None  # what it held after each graph
    expandable: int | None = None  # as stock, with expandable segments
    primed: int | None = None  # as stock, where one block comes first, of the best of three sizes
    execs: int | None = None  # how many executables the graphs share
    map: MemoryMap | None = None  # where everything lay
    order: str = ""  # of a trace's graphs
    source: str = ""  # on what a trace was recorded
    away: int = 0  # that it has given to the device until it wakes
    lendable: int = 0  # that it could lend now

    @property
    def saved(self) -> int | None:
        """What the pool takes less than PyTorch's own allocator; negative if it takes more."""
        return None if self.stock is None else self.stock - self.reserved

    def headline(self) -> str:
        """What all of it comes to, as a sentence."""
        count = len(self.graphs)
        graphs = f"{count:,} graph{'s' * (count != 1)}" if self.kind != "snapshot" else "its graphs"
        text = f"{self.name}: {graphs} in {mib(self.reserved)} MiB"
        if self.stock and self.saved and self.saved > 0:
            times = f"{self.stock / self.reserved:.1f} times less"
            return f"{text} instead of {mib(self.stock)} MiB: {mib(self.saved)} MiB saved, {times}"
        if self.stock is not None:
            return f"{text}, {mib(self.stock)} MiB with PyTorch's own allocator: nothing is saved"
        if self.apart is not None and self.apart > self.reserved:
            return f"{text}, where a pool for each would take {mib(self.apart)} MiB"
        return text

    def beside(self) -> list[str]:
        """What else can be said, in sentences."""
        said = []
        if len(self.graphs) > 1:
            largest = max(self.graphs, key=lambda graph: graph.needed)
            more = max(0, self.reserved - largest.needed)
            said.append(
                f"its largest graph ({largest.name}) needs {mib(largest.needed)} MiB alone; all "
                f"{len(self.graphs):,} together take {mib(more)} MiB more"
            )
        if self.away:
            said.append(f"it has given {mib(self.away)} MiB away until it wakes")
        elif self.lendable:
            said.append(f"it could lend {mib(self.lendable)} MiB now, or give them away in a sleep")
        return said

    def as_json(self) -> dict[str, Any]:
        """See docs/api.md."""
        held = ("stock", "expandable", "primed")
        sizes = ("minimum", "reserved", "stock_growth", "saved", "apart")
        graphs = [(graph.name, graph.needed, graph.added) for graph in self.graphs]
        of_graph = ("name", "needed_bytes", "added_bytes")
        return {
            **{name: getattr(self, name) for name in ("name", "kind", "execs")},
            "order": self.order or None,
            **{f"{name}_reserved_bytes": getattr(self, name) for name in held},
            **{f"{name}_bytes": getattr(self, name) for name in sizes},
            "graphs": [dict(zip(of_graph, graph, strict=True)) for graph in graphs],
        }


def of_trace(
    trace: Trace, order: Order = "recorded", seed: int = 0, maps: bool = False
) -> PoolCost:
    """What the graphs of a trace cost, by a replay. The core remembers ``MAX_GRAPHS`` captures."""
    graphs = replay_sequence(trace, order, seed)
    pools = new_pools()
    drawn = MemoryMap() if maps else None
    for event, block in run(pools, graphs):
        if drawn and block:
            drawn.allocate(event.block, pools.pieces(block.address))
        elif drawn:
            drawn.free(event.block)
    costs = []
    for number, (graph, took) in enumerate(zip(graphs, pools.captures(POOL), strict=True), 1):
        # ``record`` does not know what was captured, and writes bytes there.
        is_named = graph.key != most_live_bytes(graph.events)
        costs.append(GraphCost.of(graph.key if is_named else number, took))
    stock, expandable, primed = stock_bytes(trace, graphs), None, None
    held = [graph.stock_bytes for graph in graphs]
    stock_growth = [size for size in held if size is not None] if all(held) else None
    if len({event.stream for graph in graphs for event in graph.events if event.bytes}) == 1:
        stock_growth = stock_growth or growth(graphs)
        stock = stock or stock_growth[-1]
        expandable, primed = growth(graphs, expandable=True)[-1], primed_bytes(graphs)
    return PoolCost(
        trace.name,
        "trace" if trace.is_marked else "snapshot",
        costs,
        minimum_bytes(graphs),
        pools.stats(POOL).reserved_bytes,
        _apart(costs) if trace.is_marked else None,
        stock=stock,
        stock_growth=stock_growth if trace.is_marked else None,
        expandable=expandable,
        primed=primed,
        map=drawn,
        order=order,
        source=trace.source,
    )


def of_pool(pool: Mapping[str, Any], drawn: MemoryMap | None) -> PoolCost:
    """What a pool of this process costs, by what :func:`cudagraph_pool.stats` says of it."""
    costs = [GraphCost.of(number, took) for number, took in enumerate(pool["graphs"], 1)]
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
        away=pool.get("away_bytes", 0),
        lendable=pool.get("lendable_bytes", 0),
    )


def _apart(costs: Sequence[GraphCost]) -> int:
    return sum(whole_pages(cost.needed) for cost in costs)
