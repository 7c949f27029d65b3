"""Measures random programs under several allocators side by side, and says what is wrong."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from _team import Team, ratio, times
from stream_programs import Kind, by_name, generate

# So many captures are enough of a program that takes a third of a second.
_REPEATS_OF_LARGE = 3

# Where the option already reserves hardly more than what is live, there is nothing to be below.
_OPTION_IS_GOOD = 1.05

Row = dict[str, Any]


def measure_row(team: Team, key: int, name: str, seed: int, options: argparse.Namespace) -> Row:
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

    def found(allocator: str) -> Row:
        own = costs[allocator]
        reserved = max((cost["reserved_bytes"] for cost in own), default=None)
        return {
            "error": team.errors.get(allocator),
            **shapes.get(allocator, {"nodes": None, "edges": None}),
            "reserved_bytes": reserved,
            "ratio": ratio(reserved, peak),
            **times(own, costs["stock"], rounds[allocator], rounds["stock"]),
            "checks": options.checks,
            "wrong_sums": wrong.get(allocator),
        }

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
        "allocators": {allocator: found(allocator) for allocator in team.names},
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
