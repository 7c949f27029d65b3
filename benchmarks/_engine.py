"""What benchmarks of engines have in common: what is asked for, and what may not be."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from _team import median_ratio

Row = dict[str, Any]

# CUDAGRAPH_POOL of a run; nothing else makes the difference.
REQUESTS = {"stock": "0", "ours": "1", "shared": "shared_exec=1"}


def digest(tokens: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def draw_weight(weight: Any, seed: str, name: str) -> None:
    """Random weights that pass signals on: engines' own are at most 0.001, norms' too, and equal in
    every layer, so that tokens would say little.
    """
    import torch

    chance = torch.Generator(weight.device)
    chance.manual_seed(zlib.crc32(seed.encode()))
    if weight.dim() > 1:
        bound = (3 / weight[0].numel()) ** 0.5
        weight.uniform_(-bound, bound, generator=chance)
    elif "bias" in name:
        weight.uniform_(-0.05, 0.05, generator=chance)
    else:
        weight.uniform_(0.95, 1.05, generator=chance)


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
