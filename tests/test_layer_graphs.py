"""The benchmark of layers with a graph each: what it calls a failure, and its step by layers."""

from __future__ import annotations

from typing import Any

import layer_graphs
import pytest


def run(**figures: Any) -> dict[str, Any]:
    return {
        "captures": 4,
        "captures_of_ours": 4,
        "pool": 100,
        "minimum": 100,
        "step_seconds": 1.0,
        "digest": "d1",
        **figures,
    }


@pytest.mark.parametrize(
    ("figures", "problems"),
    [
        ({}, []),
        ({"captures_of_ours": 0}, ["unnamed, shared: 0 of 4 captures in pools of ours"]),
        ({"digest": "d2"}, ["unnamed, shared: other gradients than eager's"]),
        ({"pool": 102}, ["unnamed, shared: the pool is 1.020 of the minimum"]),
    ],
)
def test_what_is_a_failure(figures: dict[str, Any], problems: list[str]) -> None:
    eager = layer_graphs.merge(("eager", "stock"), [run(captures=0, captures_of_ours=0)])
    shared = layer_graphs.merge(("unnamed", "shared"), [run(**figures)])
    assert layer_graphs.judge([eager, shared]) == problems


def test_runs_of_a_way_are_merged() -> None:
    runs = [
        run(step_seconds=seconds, pool=100 * seconds, digest=f"d{seconds}") for seconds in (1, 5, 2)
    ]
    merged = layer_graphs.merge(("each", "stock"), runs)
    assert (merged["step_seconds"], merged["pool"], merged["captures"]) == (2, 500, 4)
    assert layer_graphs.judge([merged]) == ["each, stock: other gradients than eager's"]
