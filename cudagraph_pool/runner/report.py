"""What the graphs of a :class:`GraphRunner` cost, and what they gain."""

from __future__ import annotations

from dataclasses import dataclass

from .._table import format_table
from ..sizes import Size, shown

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class SizeReport:
    r"""What one size cost.

    Attributes:
        size (tuple): The size.
        nodes (int): Of its graphs, that of the backward pass included.
        peak_bytes (int): The most that was allocated in the pool at once in its capture.
        pool_bytes (int): What the pool holds since its capture and did not before.
        driver_bytes (int): What the device has less since executables were made for it, at its
            capture or its first replay. Other processes' work shows in it.
        capture_seconds (float): What its capture took.
        eager_seconds (float or None): What the function took eagerly in a row of warm-ups, the
            backward pass included; None without one.
        replay_seconds (float or None): What its replays took on the device, without the backward
            pass: the median of the first; None before the first.
    """

    size: Size
    nodes: int
    peak_bytes: int
    pool_bytes: int
    driver_bytes: int
    capture_seconds: float
    eager_seconds: float | None = None
    replay_seconds: float | None = None


class Report(list[SizeReport]):
    r"""A :class:`SizeReport` for each captured size, smallest first."""

    def __str__(self) -> str:
        rows = [["size", "nodes", "peak", "pool", "driver", "capture", "eager", "replay"]]
        for row in self:
            sizes = row.peak_bytes, row.pool_bytes, row.driver_bytes
            times = row.capture_seconds, row.eager_seconds, row.replay_seconds
            cells = [shown(row.size), str(row.nodes), *(f"{n / _MIB:,.1f}" for n in sizes)]
            rows.append([*cells, *("-" if s is None else f"{s * 1e3:,.3f}" for s in times)])
        return "sizes in MiB, times in ms\n" + format_table(rows)
