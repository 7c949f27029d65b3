"""What benchmarks of engines have in common: what is asked for, and what may not be."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from _team import median_ratio

Row = dict[str, Any]

# CUDAGRAPH_POOL of a run; nothing else makes the difference.
REQUESTS = {"stock": "0", "ours": "1", "shared": "shared_exec=1"}


def digest(tokens: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def most(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of all GPUs the one that took most, or where fewest captures were ours."""
    return {
        key: (min if key == "captures_of_ours" else max)(rank[key] for rank in ranks)
        for key in ranks[0]
    }


def judge(rows: Sequence[Row], group: Callable[[Row], str]) -> list[str]:
    """What is not as it should be; runs of one group compute the same."""
    problems = [
        f"{group(row)}: {row['captures_of_ours']} of {row['captures']} captures in pools of ours"
        for row in rows
        if row["allocator"] != "stock" and row["captures_of_ours"] != row["captures"]
    ]
    for name in dict.fromkeys(map(group, rows)):
        if len({row["digest"] for row in rows if group(row) == name}) > 1:
            problems.append(f"{name}: other tokens than stock's")
    return problems


def beside(own: Sequence[Row], stock: Sequence[Row], key: str) -> float | None:
    """The median over rounds: what was measured one after the other drifts alike."""
    of_stock = {row["round"]: row[key] for row in stock}
    pairs = [(row[key], of_stock[row["round"]]) for row in own if row["round"] in of_stock]
    return median_ratio([a for a, _ in pairs], [b for _, b in pairs])
