"""The benchmark of continuous batching: what it calls a failure; it needs a GPU for the rest."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import pytest
from _engine import judge


def row(allocator: str, **figures: Any) -> dict[str, Any]:
    of_ours = 4 if allocator == "ours" else 0
    equal = {"batching": "synchronous", "captures": 4, "digest": "d1"}
    return {**equal, "allocator": allocator, "captures_of_ours": of_ours, **figures}


@pytest.mark.parametrize(
    ("figures", "problems"),
    [
        ({}, []),
        ({"captures_of_ours": 0}, ["synchronous: 0 of 4 captures in pools of ours"]),
        ({"digest": "d2"}, ["synchronous: other tokens than stock's"]),
    ],
)
def test_what_is_a_failure(figures: dict[str, Any], problems: list[str]) -> None:
    rows = [row("stock"), row("ours", **figures), row("stock", batching="asynchronous", digest="x")]
    assert judge(rows, itemgetter("batching")) == problems
