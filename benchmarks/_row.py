"""One row of const_memory.py: a workload in one order, under several allocators side by side."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

from _team import Team, ratio, times

ORDERS = ("asc", "desc", "shuffled")


def order_keys(keys: Sequence[int], order: str, seed: int) -> list[int]:
    result = sorted(keys, reverse=order == "desc")
    if order == "shuffled":
        random.Random(seed).shuffle(result)
    return result


def measure_row(
    team: Team, workload: str, order: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One object for each allocator. What a worker that failed did not measure stays unset."""
    keys: list[int] = []
    for sizes in team.ask("prepare").values():
        keys = order_keys(sizes, order, options.seed)
    costs = team.in_turn(options.repeats, "capture", order=keys)
    rounds = team.in_turn(options.rounds, "replay", times=team.replay_passes())
    compared = _compare(team, keys, options.seed)
    minimum = team.ask("minimum_bytes", ["stock"], order=keys).get("stock")

    def found(name: str) -> dict[str, Any]:
        reserved = max((cost["reserved_bytes"] for cost in costs[name]), default=None)
        stock = None if name == "stock" else compared.get("stock")
        return {
            "workload": workload,
            "order": order,
            "allocator": name,
            "error": team.errors.get(name),
            "graphs": len(keys),
            "minimum_bytes": minimum,
            "reserved_bytes": reserved,
            "ratio": ratio(reserved, minimum),
            **times(costs[name], costs["stock"], rounds[name], rounds["stock"]),
            "outputs": judge_outputs(compared[name], stock) if name in compared else None,
        }

    return [found(name) for name in team.names]


def _compare(team: Team, keys: Sequence[int], seed: int) -> dict[str, dict[str, Any]]:
    """Stock first: where its graphs differ from eager, the others are held against its graphs."""
    request = {"order": order_keys(keys, "shuffled", seed + 1), "seed": seed}
    found = team.ask("compare", ["stock"], digests=[], **request)
    digests = [int(key) for key, own in found.get("stock", {}).items() if not own["equal"]]
    others = [name for name in team.names if name != "stock"]
    return found | team.ask("compare", others, digests=digests, **request)


def judge_outputs(
    compared: dict[str, dict[str, Any]], stock: dict[str, dict[str, Any]] | None
) -> dict[str, Any]:
    """Counts the sizes whose graphs are right.

    That is: equal to eager or, only where stock's graph is not either, to stock's graph.

    Args:
        compared: by size, what the worker found.
        stock: the same of stock PyTorch; None if ``compared`` is stock's own.
    """
    equal_to_eager, equal_to_stock = 0, 0
    unrepeatable: list[int] = []
    differ: list[int] = []
    for key, own in compared.items():
        if own["equal"]:
            equal_to_eager += 1
            continue
        other = stock[key] if stock else None
        if other and not other["equal"] and own["digest"] == other["digest"]:
            equal_to_stock += 1
        elif not own["repeatable"] and (other is None or not other["repeatable"]):
            unrepeatable.append(int(key))
        else:
            differ.append(int(key))
    return {
        "equal_to_eager": equal_to_eager,
        "equal_to_stock": equal_to_stock,
        "unrepeatable": unrepeatable,
        "differ": differ,
    }
