"""What PyTorch's own allocator would reserve, worked out, is what it did reserve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_trace import TRACES

from cudagraph_pool.tools.stock import StockPool, growth, primed_bytes
from cudagraph_pool.tools.trace import Event, Order, read_trace, replay_sequence

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
    assert 0 <= trace.stock_reserved_bytes - growth(trace.graphs)[-1] <= 2 * MIB


# Of those the captures that were measured are the ones that were recorded.
@pytest.mark.parametrize("order", ["asc", "desc", "shuffled"])
@pytest.mark.parametrize("name", ["seed", "mlp", "llama"])
def test_as_measured(name: str, order: Order) -> None:
    graphs = replay_sequence(read_trace(ROOT / f"tests/traces/{name}_asc.json.gz"), order)
    worked_out = {
        "stock": growth(graphs)[-1],
        "expandable": growth(graphs, expandable=True)[-1],
        "primed": primed_bytes(graphs),
    }
    for row in MEASURED:
        if (row["workload"], row["order"]) == (name, order) and row["allocator"] != "ours":
            assert row["reserved_bytes"] == worked_out[row["allocator"]], row["allocator"]
