"""Runs programs of stream_programs.py with torch, eagerly or under capture, and captures them.

A tensor is filled with a value of its own, and a reader adds it to the sums of its stream. What the
sums must be is known from the program alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _measure import CaptureCost, Captures
from _workloads import Workload
from stream_programs import WARM_UP, Kind, Program, generate, sums_of, value_of
from torch import Tensor

# (kind, stream, tensor, what the kind needs: elements and value, a view of the sums, cycles or the
# other stream)
Step = tuple[Kind, int, int, Any]


class StreamPrograms(Workload):
    """Programs by number; their streams and sums are made once, for the largest of them.

    Args:
        device: where.
        programs: what runs; a program's number here is its key.
    """

    name = "streams"

    def __init__(self, device: torch.device, programs: Sequence[Program]) -> None:
        self.keys = range(len(programs))
        self._programs = tuple(programs)
        self._device = device
        streams = max(program.streams for program in programs)
        largest = max(1, *(program.largest for program in programs))
        self._side = [torch.cuda.Stream(device) for _ in range(streams - 1)]
        self._sums = [
            torch.zeros(largest, dtype=torch.int32, device=device) for _ in range(streams)
        ]
        self.allocate: Callable[[int], Tensor] = self.empty
        self._planned: int | None = None
        self._plan: tuple[Step, ...] = ()

    def program(self, key: int) -> Program:
        return self._programs[key]

    def empty(self, elements: int) -> Tensor:
        """A tensor of so many elements, on the current stream."""
        return torch.empty(elements, dtype=torch.int32, device=self._device)

    def fill(self, key: int, seed: int) -> None:
        """A program has no inputs."""

    def step(self, key: int) -> None:
        """Runs the program; the current stream is its stream 0.

        Tensors are made by :attr:`allocate`, which may be replaced.
        """
        program = self.program(key)
        if self._planned != key:
            self._planned, self._plan = key, self._plan_of(program)
        streams = [torch.cuda.current_stream(self._device), *self._side[: program.streams - 1]]
        if len({stream.cuda_stream for stream in streams}) != len(streams):
            raise RuntimeError("two streams of a program are one")
        try:
            self._run(self._plan, streams, [None] * len(program.elements))
        finally:
            torch.cuda.set_stream(streams[0])

    def outputs(self, key: int) -> list[Tensor]:
        """The sums of each stream, as far as the largest tensor goes."""
        program = self.program(key)
        return [sums[: max(1, program.largest)] for sums in self._sums[: program.streams]]

    def expected(self, key: int) -> list[Tensor]:
        """What :meth:`outputs` must be, by the program alone."""
        program = self.program(key)
        result = []
        for reads in program.reads():
            sums = torch.zeros(max(1, program.largest), dtype=torch.int64)
            done = 0
            for elements, total in sums_of(reads):
                sums[done : done + elements] = total
                done += elements
            result.append(sums.to(torch.int32).to(self._device))  # wraps, as the device does
        return result

    def _plan_of(self, program: Program) -> tuple[Step, ...]:
        """The operations with all that can be made before: what is timed is torch and its
        allocator.
        """
        steps: list[Step] = []
        for kind, stream, tensor, other in program.ops:
            sums = self._sums[stream]
            match kind:
                case Kind.ALLOC:
                    made: Any = (program.elements[tensor], value_of(tensor))
                case Kind.READ:
                    made = sums[: program.elements[tensor]]
                case Kind.PLAIN:
                    made = sums[:1]
                case Kind.START:
                    made = sums[: max(1, program.largest)]
                case _:
                    made = other
            steps.append((kind, stream, tensor, made))
        return tuple(steps)

    def _run(
        self,
        steps: Sequence[Step],
        streams: Sequence[torch.cuda.Stream],
        tensors: list[Tensor | None],
    ) -> None:
        """The tensors that are left at the end are freed with the list."""
        current = 0
        allocate = self.allocate
        for kind, stream, tensor, made in steps:
            if stream != current and kind not in (Kind.FREE, Kind.RECORD, Kind.WAIT):
                torch.cuda.set_stream(streams[stream])
                current = stream
            if kind == Kind.READ:
                made.add_(tensors[tensor])
            elif kind == Kind.ALLOC:
                tensors[tensor] = allocate(made[0]).fill_(made[1])
            elif kind == Kind.RECORD:
                tensors[tensor].record_stream(streams[stream])  # type: ignore[union-attr]
            elif kind == Kind.FREE:
                tensors[tensor] = None
            elif kind == Kind.WAIT:
                streams[stream].wait_stream(streams[made])
            elif kind == Kind.PLAIN:
                made.add_(0)
            elif kind == Kind.START:
                made.zero_()
            else:
                torch.cuda._sleep(made)


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
        return sum(
            int(torch.count_nonzero(sums != right))
            for _ in range(times)
            for sums, right in zip(self._replay_one(key), expected, strict=True)
        )
