"""Captures of buffers, and whose the captures of a test are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..work import adapter, torch
from .conftest import Side

if TYPE_CHECKING:
    from torch import Tensor

MIB = 1 << 20
SIZES = (1, 3000, 100_000, 3 * MIB, 20 * MIB + 17)


def capture(function: Callable[[], Any], pool: Any = None) -> tuple[Any, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        outputs = function()
    return graph, outputs


def buffers(sizes: Sequence[int] = SIZES) -> list[Tensor]:
    return [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in sizes]


def buffers_in_holes() -> list[Tensor]:
    """The last lies in the holes between the others, at addresses of its own."""
    held = buffers([4 * MIB] * 8)
    del held[1::2]
    return held + buffers([16 * MIB])


def memory_snapshot_of(pool: tuple[int, int], **options: bool) -> list[Any]:
    """torch.cuda.memory_snapshot, which drops a reference to each number of the id that is not its
    own (pytorch#196366): from 257 on, numbers are freed by that, and the process crashes later.
    """
    for number in pool:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
    segments: list[Any] = torch.cuda.memory_snapshot(pool, **options)
    return segments


def assert_whose(side: Side) -> None:
    assert bool(adapter.pool_ids(torch.cuda.current_device())) == (side == "ours")


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
