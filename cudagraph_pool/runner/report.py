"""What the graphs of a :class:`GraphRunner` cost, and what they gain."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .._table import format_table
from ..sizes import Size, cost
from .buckets import shown
from .captures import Captures
from .program import Captured

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
    eager_seconds: float | None
    replay_seconds: float | None


class Report(list[SizeReport]):
    r"""A :class:`SizeReport` for each captured size, smallest first."""

    @classmethod
    def of(cls, captures: Captures, programs: Iterable[Mapping[Size, Captured]]) -> Report:
        """Of the sizes of some programs, one after the other."""
        rows = cls()
        for captured in programs:
            rows += (_row(captures, captured[size]) for size in sorted(captured, key=cost))
        return rows

    def __str__(self) -> str:
        head = ["size", "nodes", "peak", "pool", "driver", "capture", "eager", "replay"]
        rows = [head]
        for row in self:
            rows.append(
                [
                    shown(row.size),
                    str(row.nodes),
                    *(f"{n / _MIB:,.1f}" for n in (row.peak_bytes, row.pool_bytes)),
                    f"{row.driver_bytes / _MIB:,.1f}",
                    *(_ms(s) for s in (row.capture_seconds, row.eager_seconds, row.replay_seconds)),
                ]
            )
        return "sizes in MiB, times in ms\n" + format_table(rows)


def _row(captures: Captures, captured: Captured) -> SizeReport:
    graphs = [captured.forward]
    if captured.backward is not None:
        graphs.append(captured.backward.graph)
    samples = [captures.seconds(sample) for sample in captured.samples]
    return SizeReport(
        captured.size,
        sum(map(captures.count_nodes, graphs)),
        captured.peak_bytes,
        captured.pool_bytes,
        captured.driver_bytes,
        captured.seconds,
        None if captured.eager is None else captures.seconds(captured.eager),
        statistics.median(samples) if samples else None,
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.3f}"
