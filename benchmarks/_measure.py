"""Captures a workload for many sizes into one pool, and measures what that costs.

Needs torch and a GPU.

One process measures one allocator: which one, is chosen
before anything is allocated.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _workloads import Workload
from torch import Tensor

from cudagraph_pool._adapter import load_adapter
from cudagraph_pool.tools.demo import replay_seconds
from cudagraph_pool.tools.memory_map import operation_of
from cudagraph_pool.tools.stock import PRIMED
from cudagraph_pool.tools.trace import Event, most_live_bytes, whole_pages


@dataclass(frozen=True, slots=True)
class CaptureCost:
    """What capturing all sizes took. Bytes and seconds.

    ``device_bytes`` is what the device has less than before: the pool, and what the driver keeps
    for the graphs. ``driver_seconds`` is the time in driver calls of our allocator, None for
    another.
    """

    seconds: float
    reserved_bytes: int
    device_bytes: int
    driver_seconds: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outputs of one graph, against the same work done eagerly on the same inputs.

    ``digest`` is that of the graph's outputs, taken if they differ or if it was asked for.
    ``repeatable`` is false if they differ and a second replay gave something else again: then
    nothing can be compared with them.
    """

    equal: bool
    digest: str | None
    repeatable: bool


class FreshPool:
    """A pool to capture into: a :class:`cudagraph_pool.GraphPool`, or one of PyTorch's.

    Attributes:
        id (tuple): what ``torch.cuda.graph`` takes.
    """

    def __init__(self, device: torch.device, ours: bool) -> None:
        self.id: tuple[int, int]
        self._ours: Any = None
        if ours:
            import cudagraph_pool

            self._ours = cudagraph_pool.GraphPool(device)
            self.id = self._ours.id
        else:
            self.id = tuple(torch.cuda.graph_pool_handle())

    def reserved_bytes(self) -> int:
        if self._ours is not None:
            return int(self._ours.stats()["reserved_bytes"])
        return sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == self.id
        )


class Captures:
    """The graphs of one workload in one pool.

    Args:
        workload: what to capture.
        device: where.
        ours: whether the pool is a :class:`cudagraph_pool.GraphPool`; enables the allocator.
    """

    def __init__(
        self, workload: Callable[[torch.device], Workload], device: torch.device, ours: bool
    ) -> None:
        self._device = device
        self._ours = ours
        if ours:
            import cudagraph_pool

            if not cudagraph_pool.is_enabled():
                cudagraph_pool.enable()
        self.workload = workload(device)
        # Eager work and captures use one stream, so that cuBLAS has made its workspace for it,
        # outside of the pool, before the first capture.
        self._stream = torch.cuda.Stream(device)
        self._pool: FreshPool | None = None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._primed_bytes = 0

    def warm_up(self) -> None:
        """Runs every size eagerly: what libraries load or make lazily is not part of a capture."""
        for key in reversed(self.workload.keys):
            self.workload.fill(key, seed=key)
            self._run_eagerly(key)
        # Captures are timed: the garbage collector need not walk through everything that was
        # imported.
        gc.collect()
        gc.freeze()

    def capture(self, order: Sequence[int]) -> CaptureCost:
        """Captures all sizes in this order into a new pool; what was captured before is released
        first.
        """
        self.release()
        self._run_eagerly(order[0])  # since torch 2.14 a graph that goes takes the workspace along
        torch.cuda.empty_cache()  # what the first capture would give back is none of its cost
        pool = self._new_pool()
        torch.cuda.synchronize(self._device)
        free_before = torch.cuda.mem_get_info(self._device)[0]
        driver_before = self._driver_nanoseconds()
        seconds = 0.0
        for key in order:
            graph = torch.cuda.CUDAGraph()
            start = time.perf_counter()
            with torch.cuda.graph(graph, pool=pool.id, stream=self._stream):
                if self._primed_bytes and not self._graphs:
                    torch.empty(self._primed_bytes, dtype=torch.uint8, device=self._device)
                self.workload.step(key)
            seconds += time.perf_counter() - start
            self._graphs[key] = graph
        torch.cuda.synchronize(self._device)
        driver_seconds = (self._driver_nanoseconds() - driver_before) * 1e-9
        return CaptureCost(
            seconds=seconds,
            reserved_bytes=pool.reserved_bytes(),
            device_bytes=free_before - torch.cuda.mem_get_info(self._device)[0],
            driver_seconds=driver_seconds if self._ours else None,
        )

    def prime(self, order: Sequence[int]) -> list[int]:
        """Makes pools begin with one block that is allocated and freed before all others, of the
        size of which they reserve the least in this order. Returns what they reserve with each of
        :data:`PRIMED`.
        """
        self._primed_bytes = 0
        minimum = self.minimum_bytes(order)
        reserved = {}
        for times in PRIMED:
            self._primed_bytes = int(times * minimum)
            reserved[self._primed_bytes] = self.capture(order).reserved_bytes
        self._primed_bytes = min(reserved, key=reserved.__getitem__)
        return list(reserved.values())

    def release(self) -> None:
        """Drops all graphs and gives the pool's memory back."""
        torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self.workload.forget_captures()
        self._pool = None
        gc.collect()
        torch.cuda.empty_cache()

    def replay(self, times: int) -> float:
        """Replays every graph ``times`` times; returns the device's seconds for one pass over
        all of them.
        """
        return replay_seconds([*self._graphs.values()], times)

    def compare(
        self, order: Sequence[int], seed: int, digests: Collection[int] = ()
    ) -> dict[int, Comparison]:
        """Replays every graph on fresh inputs and compares its outputs with eager ones.

        Args:
            order: of the replays.
            seed: of the inputs.
            digests: sizes whose outputs shall have a digest in any case.

        Raises:
            RuntimeError: if an eager output is not finite, so that equality would say little.
        """
        result: dict[int, Comparison] = {}
        for key in order:
            self.workload.fill(key, seed=seed * 1_000_003 + key)
            self.workload.clear(key)
            self._run_eagerly(key)
            expected = [output.clone() for output in self.workload.outputs(key)]
            if not all(bool(output.isfinite().all()) for output in expected):
                raise RuntimeError(
                    f"{self.workload.name} of size {key} computes values that are not finite"
                )
            outputs = self._replay_one(key)
            equal = all(map(same_bits, outputs, expected))
            digest = None if equal and key not in digests else digest_of(outputs)
            repeatable = equal or digest_of(self._replay_one(key)) == digest
            result[key] = Comparison(equal, digest, repeatable)
        return result

    def minimum_bytes(self, order: Sequence[int]) -> int:
        """The least that any allocator with stable addresses can reserve for these captures.

        Captures once more and reads PyTorch's own record of what was allocated. Not for our
        allocator, so that the figure does not depend on what it is compared with.
        """
        memory: Any = torch.cuda.memory  # the recorder is not annotated
        memory._record_memory_history(enabled="all", context=None, clear_history=True)
        try:
            self.capture(order)
            snapshot = memory._snapshot(self._device)
        finally:
            memory._record_memory_history(enabled=None)
        assert self._pool is not None
        segments = [
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in snapshot["segments"]
            if tuple(segment["segment_pool_id"]) == self._pool.id
        ]
        return peak_live_bytes(snapshot["device_traces"][self._device.index or 0], segments)

    def _new_pool(self) -> FreshPool:
        self._pool = FreshPool(self._device, self._ours)
        return self._pool

    def _driver_nanoseconds(self) -> int:
        """What our allocator has spent in driver calls so far."""
        calls = load_adapter().driver_calls(self._device.index or 0) if self._ours else {}
        return sum(nanoseconds for _, nanoseconds in calls.values())

    def _run_eagerly(self, key: int) -> None:
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            self.workload.step(key)
        torch.cuda.synchronize(self._device)

    def _replay_one(self, key: int) -> list[Tensor]:
        self.workload.clear(key)
        self._graphs[key].replay()
        torch.cuda.synchronize(self._device)
        return self.workload.outputs(key)


def peak_live_bytes(
    entries: Iterable[Mapping[str, Any]], segments: Sequence[tuple[int, int]]
) -> int:
    """The largest sum of live blocks within ``segments``, by PyTorch's record of allocations.

    Each block is rounded up to a granule and the sum to a page: docs/design.md calls this the
    minimum. A block is live until it is given back, however long the allocator then holds it for
    other streams.
    """
    events = (
        Event(address, size, 0)
        for address, size in filter(None, map(operation_of, entries))
        if not size or any(begin <= address < end for begin, end in segments)
    )
    return whole_pages(most_live_bytes(events))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes; unlike ``==``, a NaN equals itself and 0 is not
    -0.
    """
    return bool(torch.equal(_bytes(a), _bytes(b)))


def digest_of(tensors: Sequence[Tensor]) -> str:
    """SHA-256 over the bytes of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        data = _bytes(tensor).cpu()
        digest.update((ctypes.c_char * data.numel()).from_address(data.data_ptr()))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
