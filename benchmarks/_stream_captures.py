"""Captures of random programs, and whether they compute what they must."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from _stream_work import StreamPrograms
from stream_programs import WARM_UP, Program, generate

from cudagraph_pool._measure import CaptureCost, Captures


class StreamCaptures(Captures):
    """Programs, captured one at a time, each time into a fresh pool.

    Args:
        programs: what is captured; a program's number here is its key.
        device: where.
        ours: whether the pool is a :class:`cudagraph_pool.GraphPool`; enables the allocator.
    """

    workload: StreamPrograms

    def __init__(self, programs: Sequence[Program], device: torch.device, ours: bool) -> None:
        self._warm_up_key = len(programs)
        all_programs = [*programs, generate(WARM_UP, 0)]
        super().__init__(lambda device: StreamPrograms(device, all_programs), device, ours)

    def warm_up(self) -> None:
        """Runs, captures and replays a short program."""
        self._run_eagerly(self._warm_up_key)
        self.capture([self._warm_up_key])
        self.replay(1)
        self.release()

    def capture(self, order: Sequence[int]) -> CaptureCost:
        """Captures twice, and tells of the second time: the first makes ready what the program
        needs, and finds the device, and the caches of the processor, as the process whose turn it
        was before has left them.
        """
        super().capture(order)
        self.release()
        gc.freeze()  # no collection looks through the program while a capture is timed
        return super().capture(order)

    def wrong_sums(self, key: int, times: int) -> int:
        """Replays the graph that was captured last; returns how many sums were wrong, over all
        replays.
        """
        expected = self.workload.expected(key)
        wrong = 0
        for _ in range(times):
            found = self._replay_one(key)
            for sums, right in zip(found, expected, strict=True):
                wrong += int(torch.count_nonzero(sums != right))
        return wrong
