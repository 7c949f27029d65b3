"""What multi_stream.py prints: tables, and what they come to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from _command import number

from cudagraph_pool._table import format_table

Row = dict[str, Any]

# Where the option already reserves hardly more than what is live, there is nothing to be below.
_OPTION_IS_GOOD = 1.05


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Geometric mean and worst of each ratio by allocator, and whether all is right."""
    allocators = list(rows[0]["allocators"]) if rows else []
    figures = {
        allocator: {
            figure: _spread([row["allocators"][allocator][figure] for row in rows])
            for figure in ("ratio", "capture_vs_stock", "replay_vs_stock")
        }
        for allocator in allocators
    }
    return {
        "figures": figures,
        "not_below_option": [_title(row) for row in rows if _is_not_below_option(row)],
        "wrong": [_title(row) for row in rows if _is_wrong(row)],
        "other_graphs": [_title(row) for row in rows if _is_other_graph(row)],
        "failed": [_title(row) for row in rows if _has_failed(row)],
        "good": bool(rows)
        and not any(_is_wrong(row) or _is_other_graph(row) or _has_failed(row) for row in rows),
    }


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {
        "mean": statistics.geometric_mean(known),
        "least": min(known),
        "worst": max(known),
        "programs": len(known),
    }


def _title(row: Row) -> str:
    return f"{row['configuration']} seed {row['seed']}"


def _is_not_below_option(row: Row) -> bool:
    if not {"option", "ours"} <= row["allocators"].keys():
        return False
    option, ours = row["allocators"]["option"]["ratio"], row["allocators"]["ours"]["ratio"]
    return option is not None and ours is not None and ours >= option > _OPTION_IS_GOOD


def _is_wrong(row: Row) -> bool:
    return any(measured["wrong_sums"] for measured in row["allocators"].values())


def _is_other_graph(row: Row) -> bool:
    """Whether our graph has other nodes or edges than stock's: reuse must add none."""
    measured = row["allocators"]
    if "ours" not in measured:
        return False
    return any(measured["ours"][what] != measured["stock"][what] for what in ("nodes", "edges"))


def _has_failed(row: Row) -> bool:
    return any(measured["error"] for measured in row["allocators"].values())


def table(rows: Sequence[Row]) -> str:
    """Sizes in MiB, reserved divided by the program's peak, times divided by stock's."""
    allocators = list(rows[0]["allocators"])
    others = [allocator for allocator in allocators if allocator != "stock"]
    head = ["program", "seed", "peak", *(f"{name}÷peak" for name in allocators)]
    for what in ("capture", "replay"):
        head += [f"{what}:{name}" for name in others]
    cells = [[*head, "capture_ms", "replay_ms", "nodes", "edges", "sums"]]
    for row in rows:
        measured = row["allocators"]
        stock = measured["stock"]
        cells.append(
            [
                row["configuration"],
                str(row["seed"]),
                f"{row['peak_bytes'] / (1 << 20):.1f}",
                *(number(measured[name]["ratio"], 1, ".3f") for name in allocators),
                *(number(measured[name]["capture_vs_stock"], 1, ".3f") for name in others),
                *(number(measured[name]["replay_vs_stock"], 1, ".3f") for name in others),
                number(stock["capture_seconds"], 1e3, ".1f"),
                number(stock["replay_seconds"], 1e3, ".2f"),
                _alike(measured, "nodes"),
                _alike(measured, "edges"),
                _sums(row),
            ]
        )
    return format_table(cells, left_columns=(0, len(cells[0]) - 1))


def _alike(measured: dict[str, Row], what: str) -> str:
    """One number if all have it, else each one's."""
    numbers = [number(of[what], 1, "d") for of in measured.values()]
    return numbers[0] if len(set(numbers)) == 1 else "/".join(numbers)


def _sums(row: Row) -> str:
    parts = []
    for allocator, measured in row["allocators"].items():
        if measured["error"]:
            parts.append(f"{allocator}: FAILED {measured['error']}")
        elif measured["wrong_sums"]:
            parts.append(f"{allocator}: {measured['wrong_sums']} WRONG")
    return "; ".join(parts) or "right"


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """What stands below the table."""
    lines = []
    for allocator, figures in summary["figures"].items():
        said = [
            f"{words} {spread['mean']:.3f} (worst {spread['worst']:.3f})"
            for figure, words in (
                ("ratio", "reserved÷peak"),
                ("capture_vs_stock", "capture÷stock"),
                ("replay_vs_stock", "replay÷stock"),
            )
            if (spread := figures[figure]) is not None
        ]
        lines.append(f"{allocator}, geometric mean: {', '.join(said) or 'nothing measured'}")
    for figure, words in (
        ("not_below_option", f"not below the option where it is above {_OPTION_IS_GOOD}"),
        ("wrong", "WRONG sums"),
        ("other_graphs", "OTHER nodes or edges than stock's"),
        ("failed", "FAILED"),
    ):
        if summary[figure]:
            lines.append(f"{words}: {', '.join(summary[figure])}")
    return lines


_LONG_HEAD = (
    "allocator seed nodes capture_s allocations_s q1_µs median_µs q3_µs p99_µs max_µs over_50µs "
    "mapping growth"
)
_LONG_TIMES = ("q1", "median", "q3", "p99", "max")


def long_table(rows: Sequence[Row]) -> str:
    """One line for each section; ``capture_s`` and ``allocations_s`` are of all up to its end."""
    cells = [_LONG_HEAD.split()]
    for row in rows:
        last = len(row["sections"]) - 1
        for place, section in enumerate(row["sections"]):
            cells.append(
                [
                    row["allocator"],
                    str(row["seed"]),
                    f"{section['nodes']:,}",
                    f"{section['seconds']:.3f}",
                    f"{section['allocation_seconds']:.3f}",
                    *(number(section[name], 1e6, ".2f") for name in _LONG_TIMES),
                    number(section["too_long"], 1, "d"),
                    str(section["mapping"]),
                    number(row["growth"], 1, ".3f") if place == last else "",
                ]
            )
    return format_table(cells)
