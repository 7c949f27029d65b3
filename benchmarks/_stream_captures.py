"""Captures of random programs, and what is asked of them beyond memory and time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _graph_shape import GraphShape, shape_of
from _stream_work import StreamPrograms
from stream_programs import WARM_UP, Configuration
from torch import Tensor

from cudagraph_pool._measure import CaptureCost, Captures

# The calls of our allocator that map memory; it asks the driver for the graph's edges besides.
_MAPPING = ("Reserve_calls", "Create_calls", "Map_calls", "SetAccess_calls")


class StreamCaptures(Captures):
    """Programs, captured one at a time, each time into a fresh pool.

    Args:
        programs: each a configuration and its seed; a program's number here is its key.
        device: where.
        ours: whether the pool is a :class:`cudagraph_pool.GraphPool`; enables the allocator.
    """

    workload: StreamPrograms

    def __init__(
        self, programs: Sequence[tuple[Configuration, int]], device: torch.device, ours: bool
    ) -> None:
        self._warm_up_key = len(programs)
        all_programs = [*programs, (WARM_UP, 0)]
        super().__init__(lambda device: StreamPrograms(device, all_programs), device, ours)

    def warm_up(self) -> None:
        """Runs, captures and replays a short program."""
        self._run_eagerly(self._warm_up_key)
        self.capture([self._warm_up_key])
        self.replay(1)
        self.release()
        gc.collect()
        gc.freeze()

    def capture(self, order: Sequence[int]) -> CaptureCost:
        """Captures twice, and tells of the second time: the first finds the device, and the caches
        of the processor, as the process whose turn it was before has left them.
        """
        super().capture(order)
        return super().capture(order)

    def shape(self, key: int) -> GraphShape:
        """Of the program's graph, from a capture of its own: what is captured next finds the
        program made and its kernels loaded.
        """
        graph = self._capture_only(key)
        shape = shape_of(graph)
        del graph
        self.release()
        gc.collect()
        gc.freeze()
        return shape

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

    def spans(self, key: int) -> list[tuple[int, int]]:
        """Begin and end of each allocation of one capture, in nanoseconds of
        ``time.perf_counter_ns``.
        """
        spans = []

        def timed(elements: int) -> Tensor:
            begin = time.perf_counter_ns()
            tensor = self.workload.empty(elements)
            spans.append((begin, time.perf_counter_ns()))
            return tensor

        gc.disable()  # the tensors that are made would set it off within the times
        try:
            self._capture_with(key, timed)
        finally:
            gc.enable()
        return spans

    def mapping(self, key: int) -> list[bool]:
        """Of each allocation of one capture, whether it made the allocator ask the driver for
        memory. Not timed: asking is slow.
        """
        flags = []
        before = self._driver_requests()

        def watched(elements: int) -> Tensor:
            nonlocal before
            tensor = self.workload.empty(elements)
            after = self._driver_requests()
            flags.append(after != before)
            before = after
            return tensor

        self._capture_with(key, watched)
        return flags

    def _capture_with(self, key: int, allocate: Callable[[int], Tensor]) -> None:
        self.workload.allocate = allocate
        try:
            self._capture_only(key)
        finally:
            self.workload.allocate = self.workload.empty
            self.release()

    def _capture_only(self, key: int) -> torch.cuda.CUDAGraph:
        """Captures into a fresh pool and instantiates nothing."""
        self.release()
        pool = self._new_pool()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, pool=pool.id, stream=self._stream):
            self.workload.step(key)
        return graph

    def _driver_requests(self) -> int:
        """A number that changes with each request for memory."""
        index = self._device.index or 0
        if self._ours:
            from cudagraph_pool import _torch

            stats = _torch.driver_stats(index)
            return sum(stats.get(name, 0) for name in _MAPPING)
        stock: Any = torch._C._cuda_memoryStats(index)
        return int(stock["segment"]["all"]["allocated"])
