"""Whose the captures of a test are."""

from __future__ import annotations

from ..work import adapter
from .conftest import Side


class Expect:
    """That so many captures went to our pools on ours, and none to the base's; on native none."""

    def __init__(self, side: Side, captures: int) -> None:
        self.side, self.captures = side, captures

    def __enter__(self) -> None:
        self.before = adapter.capture_counts()

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        if kind is not None:
            return
        after = adapter.capture_counts()
        ours = after["ours"] - self.before["ours"]
        assert ours == (self.captures if self.side == "ours" else 0)
        if self.side == "ours":
            assert after["base"] == self.before["base"]
