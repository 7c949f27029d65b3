"""The benchmark of layers with a graph each: what it calls a failure, and its step by layers."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
import layer_graphs


def run(way: str, allocator: str, **figures: Any) -> dict[str, Any]:
    return {
        "way": way,
        "allocator": allocator,
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
    eager = run("eager", "stock", captures=0, captures_of_ours=0)
    shared = run("unnamed", "shared", **figures)
    assert layer_graphs.judge([eager, shared]) == problems
