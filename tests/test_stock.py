"""What PyTorch's own allocator would reserve, worked out, is what it did reserve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_trace import TRACES

from cudagraph_pool.tools.costs import of_trace
from cudagraph_pool.tools.stock import StockPool, primed_bytes, reserved_bytes
from cudagraph_pool.tools.trace import Event, Graph, Order, Trace, read_trace, replay_sequence

ROOT = Path(__file__).parent.parent
MIB = 1 << 20
MEASURED = json.loads((ROOT / "benchmarks/results/const_memory.json").read_text())["rows"]


def reserved(*blocks: int, expandable: bool = False) -> int:
    """MiB of a pool for what is allocated, or if negative freed, of so many bytes."""
    pool, live = StockPool(expandable), dict[int, int]()
    for number, size in enumerate(blocks):
        if size > 0:
            live[size] = number
            pool.run([Event(number, size, 1)])
        else:
            pool.run([Event(live.pop(-size), 0, 0)])
    return pool.reserved // MIB


@pytest.mark.parametrize("path", [*TRACES, *TRACES[0].parent.glob("models/*h100*")], ids=str)
def test_as_recorded(path: Path) -> None:
    """But for a page of small blocks, which whoever recorded it took too."""
    trace = read_trace(path)
    assert 0 <= trace.stock_reserved_bytes - reserved_bytes(trace.graphs) <= 2 * MIB


# Of those the captures that were measured are the ones that were recorded.
@pytest.mark.parametrize("order", ["asc", "desc", "shuffled"])
@pytest.mark.parametrize("name", ["seed", "mlp", "llama"])
def test_as_measured(name: str, order: Order) -> None:
    graphs = replay_sequence(read_trace(ROOT / f"tests/traces/{name}_asc.json.gz"), order)
    worked_out = {
        "stock": reserved_bytes(graphs),
        "expandable": reserved_bytes(graphs, expandable=True),
        "primed": primed_bytes(graphs),
    }
    for row in MEASURED:
        if (row["workload"], row["order"]) == (name, order) and row["allocator"] != "ours":
            assert row["reserved_bytes"] == worked_out[row["allocator"]], row["allocator"]


def test_segments() -> None:
    assert reserved(512, MIB, MIB - 512) == 2, "small blocks share segments of a page"
    assert reserved(512, MIB, MIB) == 2 + 2
    assert reserved(MIB + 1, 9 * MIB) == 20
    assert reserved(11 * MIB + 1) == 12
    assert reserved(12 * MIB, -12 * MIB, 11 * MIB, MIB + 1) == 12 + 20, "a rest of 1 MiB is lost"
    assert reserved(14 * MIB, -14 * MIB, 11 * MIB, 3 * MIB) == 14
    assert reserved(30 * MIB, -30 * MIB, 10 * MIB, 20 * MIB, -10 * MIB, -20 * MIB, 30 * MIB) == 30
    assert reserved(30 * MIB, 20 * MIB, -30 * MIB, -20 * MIB, 19 * MIB, 28 * MIB) == 50, "best fit"


def test_expandable_segments_grow() -> None:
    assert reserved(11 * MIB, -11 * MIB, 31 * MIB, expandable=True) == 40
    assert reserved(512, 30 * MIB, expandable=True) == 2 + 40
    # What can grow is taken last, though it would fit best.
    blocks = (5 * MIB, MIB + 512, 12 * MIB, -5 * MIB, 3 * MIB // 2)
    assert reserved(*blocks, 21 * MIB, expandable=True) == 40


def test_a_primed_pool() -> None:
    """Each graph needs a block that is longer than the last one's."""
    sizes = [size * MIB for size in (20, 24, 28, 32)]
    graphs = [Graph(n, [Event(n, size, 7), Event(n, 0, 0)]) for n, size in enumerate(sizes)]
    assert reserved_bytes(graphs) == sum(sizes)
    assert primed_bytes(graphs) == reserved_bytes(graphs, primed=32 * MIB) == 32 * MIB


def test_of_several_streams_nothing_is_said() -> None:
    trace = Trace("", "two", 0, [Graph(1, [Event(1, MIB, 1), Event(2, MIB, 2)])])
    cost = of_trace(trace)
    assert (cost.stock, cost.expandable, cost.primed) == (None, None, None)
