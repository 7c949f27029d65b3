"""What cgp_quality printed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figures:
    """Of a trace in all its orders, or of many traces: reserved ÷ minimum, and mappings."""

    orders: int
    mean: float
    p99: float
    worst: float
    mappings: float
    nanoseconds: float  # of an operation


def read_quality(text: str) -> dict[str, Figures]:
    """The table's rows by their name: the traces, "large" (pools of 64 MiB and more) and "all"."""
    rows = {}
    for line in text.splitlines():
        cells = line.split()
        if len(cells) < 11 or cells[0] in ("trace", "BROKEN:"):
            continue
        name, orders, _, mean, p99, worst, mappings = cells[:7]
        rows[name] = Figures(int(orders), *map(float, (mean, p99, worst, mappings, cells[10])))
    return rows
