"""Measures random programs under several allocators side by side, and says what is wrong."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from _command import number
from _team import Team, median, median_ratio, ratio
from stream_programs import LONG, Kind, Program, by_name, generate

from cudagraph_pool._table import format_table

# So many captures are enough of a program that takes a third of a second.
_REPEATS_OF_LARGE = 3

# Where the long capture is looked at, in nodes; and how often it is timed. An allocation counts
# with its shortest time: what an interrupt of the machine made longer once is not the allocator's.
_SECTION_ENDS = (12_500, 25_000, 50_000, 100_000)
_SPANS_REPEATS = 3

# No allocation that maps nothing may take longer.
LONGEST_SECONDS = 50e-6

# Where the option already reserves hardly more than what is live, there is nothing to be below.
_OPTION_IS_GOOD = 1.05

Row = dict[str, Any]


def measure_row(
    team: Team, key: int, name: str, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One object with what all have in common and, under ``allocators``, one for each."""
    configuration = by_name(name)
    repeats = options.repeats
    if configuration.operations >= 10_000:
        repeats = min(repeats, _REPEATS_OF_LARGE)
    shapes = team.at_once("shape", key=key)
    costs = team.in_turn(repeats, "capture", order=[key])
    rounds = team.in_turn(options.rounds, "replay", times=team.replay_passes())
    wrong = team.at_once("wrong_sums", key=key, times=options.checks)
    team.at_once("release")

    program = generate(configuration, seed)
    peak = program.peak_bytes()
    return {
        "configuration": name,
        "seed": seed,
        "streams": configuration.streams,
        "operations": configuration.operations,
        "alloc": configuration.alloc,
        "free": configuration.free,
        "tensors": len(program.elements),
        "waits": program.count(Kind.WAIT),
        "nodes": program.nodes,
        "peak_bytes": peak,
        "allocators": {
            allocator: {
                "error": team.errors.get(allocator),
                **shapes.get(allocator, {"nodes": None, "edges": None}),
                **_memory(costs[allocator], peak),
                **_times(costs[allocator], costs["stock"], rounds[allocator], rounds["stock"]),
                "checks": options.checks,
                "wrong_sums": wrong.get(allocator),
            }
            for allocator in team.names
        },
    }


def _memory(costs: Sequence[dict[str, Any]], peak: int) -> dict[str, Any]:
    reserved = max((cost["reserved_bytes"] for cost in costs), default=None)
    return {"reserved_bytes": reserved, "ratio": ratio(reserved, peak)}


def _times(
    costs: Sequence[dict[str, Any]],
    stock_costs: Sequence[dict[str, Any]],
    rounds: Sequence[float],
    stock_rounds: Sequence[float],
) -> dict[str, Any]:
    captures = [cost["seconds"] for cost in costs]
    driver = [cost["driver_seconds"] for cost in costs if cost["driver_seconds"] is not None]
    return {
        "capture_seconds": median(captures),
        "captures": len(captures),
        "capture_vs_stock": median_ratio(captures, [cost["seconds"] for cost in stock_costs]),
        "driver_seconds": median(driver),
        "replay_seconds": median(rounds),
        "replay_rounds": len(rounds),
        "replay_vs_stock": median_ratio(rounds, stock_rounds),
    }


def long_rows(team: Team, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The capture of 100,000 nodes: one object for each seed and allocator that lived."""
    rows = []
    for key, seed in enumerate(seeds):
        program = generate(LONG, seed)
        mapping = team.at_once("mapping", key=key)
        spans = team.in_turn(_SPANS_REPEATS, "spans", key=key)
        rows += [
            {
                "seed": seed,
                "allocator": allocator,
                "nodes": program.nodes,
                "allocations": len(program.elements),
                **sections(program, spans[allocator], mapping[allocator]),
            }
            for allocator in team.names
            if allocator in team
        ]
    return rows


def sections(
    program: Program, spans: Sequence[Sequence[tuple[int, int]]], maps: Sequence[bool]
) -> dict[str, Any]:
    """How the time of allocations grows with the graph.

    Args:
        program: what was captured.
        spans: of each capture, begin and end of each allocation in nanoseconds.
        maps: which allocations asked the driver for memory; they are left out of all but sums.
    """
    nodes, at = 0, []
    for op in program.ops:
        nodes += op.is_node
        if op.kind == Kind.ALLOC:
            at.append(nodes)
    shortest = [min(end - begin for begin, end in same) for same in zip(*spans, strict=True)]
    result = []
    first = 0
    for end in _SECTION_ENDS:
        last = sum(node <= end for node in at)
        if last <= first:
            break
        times = [shortest[i] for i in range(first, last) if not maps[i]]
        result.append(
            {
                "nodes": end,
                # Of the whole capture until here, Python and all other calls included.
                "seconds": min((run[last - 1][1] - run[0][0]) * 1e-9 for run in spans),
                "allocation_seconds": sum(shortest[:last]) * 1e-9,
                "mapping": sum(maps[first:last]),
                **_spread(times),
            }
        )
        first = last
    growth = None
    if len(result) > 1:
        steps = result[-1]["nodes"] / result[0]["nodes"]
        growth = result[-1]["seconds"] / result[0]["seconds"] / steps
    return {"sections": result, "growth": growth}


def _spread(nanoseconds: Sequence[int]) -> dict[str, Any]:
    """Of the allocations of one section, in seconds."""
    seconds = [time * 1e-9 for time in nanoseconds]
    if len(seconds) < 2:
        return dict.fromkeys(("q1", "median", "q3", "p99", "max", "too_long"))
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {
        "q1": cuts[24],
        "median": cuts[49],
        "q3": cuts[74],
        "p99": cuts[98],
        "max": max(seconds),
        "too_long": sum(time > LONGEST_SECONDS for time in seconds),
    }


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
