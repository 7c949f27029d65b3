"""What multi_stream.py finds wrong, and the table of its long capture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from _command import number

from cudagraph_pool._table import format_table

Row = dict[str, Any]

# Where the option already reserves hardly more than what is live, there is nothing to be below.
_OPTION_IS_GOOD = 1.05


def summarise(rows: Sequence[Row]) -> dict[str, list[str]]:
    """What failed or is wrong, and the programs for which ours is not below the option."""
    return {
        "problems": [f"{_title(row)}, {problem}" for row in rows for problem in _problems(row)],
        "not_below_option": [_title(row) for row in rows if _is_not_below_option(row)],
    }


def _title(row: Row) -> str:
    return f"{row['configuration']} seed {row['seed']}"


def _problems(row: Row) -> Iterator[str]:
    for name, measured in row["allocators"].items():
        if measured["error"]:
            yield f"{name}: FAILED {measured['error']}"
        elif measured["wrong_sums"]:
            yield f"{name}: {measured['wrong_sums']} WRONG sums"
    # Reuse must add no node and no edge.
    stock, ours = row["allocators"]["stock"], row["allocators"].get("ours")
    for what in ("nodes", "edges"):
        if ours and ours[what] != stock[what]:
            yield f"ours: OTHER {what} than stock's: {ours[what]}, {stock[what]}"


def _is_not_below_option(row: Row) -> bool:
    if not {"option", "ours"} <= row["allocators"].keys():
        return False
    option, ours = row["allocators"]["option"]["ratio"], row["allocators"]["ours"]["ratio"]
    return option is not None and ours is not None and ours >= option > _OPTION_IS_GOOD


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
