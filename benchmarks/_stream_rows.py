"""Measures random programs under several allocators side by side, and says what is wrong."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from _team import Team, median, median_ratio, ratio
from stream_programs import Kind, by_name, generate

# So many captures are enough of a program that takes a third of a second.
_REPEATS_OF_LARGE = 3

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
