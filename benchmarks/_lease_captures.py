"""Captures whose memory goes away and comes back: by cudagraph_pool's leases, or by
torch_memory_saver. For leases.py.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from statistics import median
from typing import Any, Protocol

import torch
from _lease_figures import SAVER, SHARED
from _measure import Captures, same_bits
from _unet import Unet
from _workloads import Workload
from torch import Tensor
from workloads import WORKLOADS, Gpt2Training

import cudagraph_pool as cgp
from cudagraph_pool._adapter import load_adapter

_SPIN_CYCLES = 20_000_000  # some ten milliseconds, in which a replay is launched


class LargeGpt2(Gpt2Training):
    """With a batch for which the pool needs more than 10 GiB."""

    _batch = 21


SLEEPING: Mapping[str, Callable[[torch.device], Workload]] = {
    "llama": WORKLOADS["llama"],
    "resnet50": WORKLOADS["resnet50-kept"],  # its outputs live in the pool
    "unet": Unet,
    "gpt2": LargeGpt2,
}


class Way(Protocol):
    """A pool that can give its memory to the device, and get it back."""

    def capturing(
        self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream
    ) -> AbstractContextManager[None]: ...
    def sleep(self) -> int | None: ...
    def wake(self) -> None: ...
    def scratch_bytes(self) -> int | None: ...
    def figures(self) -> dict[str, Any]: ...


class OurPool:
    """A :class:`cudagraph_pool.GraphPool`."""

    def __init__(self, device: torch.device, shared_exec: bool) -> None:
        if not cgp.is_enabled():
            cgp.enable()
        self.pool = cgp.GraphPool(device, shared_exec=shared_exec)
        self._device = device

    def capturing(
        self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream
    ) -> AbstractContextManager[None]:
        return cgp.graph(graph, self.pool, stream=stream)

    def sleep(self) -> int:
        return self.pool.sleep()

    def wake(self) -> None:
        self.pool.wake()

    def scratch_bytes(self) -> int:
        return scratch_bytes(self.pool.snapshot())

    def figures(self) -> dict[str, Any]:
        """What the pool says of itself, and how often it mapped and made handles so far."""
        said = self.pool.stats()
        calls = driver_calls(self._device)
        names = ("reserved_bytes", "last_sleep_bytes", "execs")
        times = ("last_wake_seconds", "last_wake_exec_seconds")
        return {
            **{name: said[name] for name in (*names, *times)},
            "mappings": calls("cuMemMap"),
            "handles": calls("cuMemCreate"),
        }


class SaverPool:
    """One of PyTorch's, captured into as torch_memory_saver wants it."""

    def __init__(self) -> None:
        self._saver: Any = import_module(SAVER).torch_memory_saver
        self._id = torch.cuda.graph_pool_handle()

    def capturing(
        self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream
    ) -> AbstractContextManager[None]:
        capturing: AbstractContextManager[None] = self._saver.cuda_graph(
            graph, pool=self._id, stream=stream
        )
        return capturing

    def sleep(self) -> None:
        torch.cuda.synchronize()  # it unmaps what may still be in use
        self._saver.pause()

    def wake(self) -> None:
        self._saver.resume()

    def scratch_bytes(self) -> None:
        return None

    def figures(self) -> dict[str, Any]:
        reserved = sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == self._id
        )
        return {"reserved_bytes": reserved}


class Sleepers(Captures):
    """The graphs of one workload, in pools that sleep and wake."""

    def __init__(self, workload: Callable[[torch.device], Workload], device: torch.device) -> None:
        super().__init__(workload, device, ours=False)

    def sleep(self, name: str, rounds: int, seed: int) -> dict[str, Any]:
        """Captures all sizes, smallest first, and lets the pool sleep and wake so many times.
        Returns medians; what the first wake took stands apart.
        """
        self.release()
        way: Way = SaverPool() if name == SAVER else OurPool(self._device, name == SHARED)
        for key in self.workload.keys:
            graph = self._graphs[key] = torch.cuda.CUDAGraph()
            with way.capturing(graph, self._stream):
                self.workload.step(key)
        row = {
            "way": name,
            "graphs": len(self._graphs),
            "reserved_bytes": way.figures()["reserved_bytes"],
            "scratch_bytes": way.scratch_bytes(),
        }
        before = [self._replayed(seed), self._replayed(seed)]
        first, *found = [self._round(way) for _ in range(1 + rounds)]
        after = self._replayed(seed)
        return {
            **row,
            **{figure: median(one[figure] for one in found) for figure in first},
            "first_wake_seconds": first["wake_seconds"],
            "repeatable": _alike(*before),
            "equal": _alike(before[1], after),
        }

    def _round(self, way: Way) -> dict[str, Any]:
        """What one sleep and one wake take and give."""
        first, every = self._first_seconds(), self._seconds(self._replay_all)
        awake = way.figures()
        free = self._free_bytes()
        began = time.perf_counter()
        told = way.sleep()
        slept = time.perf_counter() - began
        given = self._free_bytes() - free
        asleep = way.figures()
        self._overwrite(given)
        began = time.perf_counter()
        way.wake()
        woke = time.perf_counter() - began
        figures = {
            "sleep_seconds": slept,
            "wake_seconds": woke,
            "device_bytes": given,
            "back_bytes": self._free_bytes() - free,
            "first_ratio": self._first_seconds() / first,
            "every_ratio": self._seconds(self._replay_all) / every,
        }
        if told is None:
            return figures
        again = way.figures()
        return figures | {
            "told_bytes": told,
            "stats_bytes": again["last_sleep_bytes"],
            "pages_bytes": awake["reserved_bytes"] - asleep["reserved_bytes"],
            "told_seconds": again["last_wake_seconds"],
            "exec_seconds": again["last_wake_exec_seconds"],
            "mappings": again["mappings"] - asleep["mappings"],
            "handles": again["handles"] - asleep["handles"],
            "execs": awake["execs"],
            "execs_asleep": asleep["execs"],
        }

    def _first_seconds(self) -> float:
        """The device's time for a replay of the largest graph, which is launched while the device
        is busy, so that its launch does not show.
        """
        graph = self._graphs[self.workload.keys[-1]]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SPIN_CYCLES)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    def _replay_all(self) -> None:
        for graph in self._graphs.values():
            graph.replay()

    def _seconds(self, run: Callable[[], None]) -> float:
        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        run()
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - began

    def _replayed(self, seed: int) -> list[Tensor]:
        """What all graphs make of the same inputs each time."""
        made = []
        for key in self.workload.keys:
            self.workload.fill(key, seed=seed * 1_000_003 + key)
            made += [output.clone() for output in self._replay_one(key)]
        return made

    def _free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def _overwrite(self, given: int) -> None:
        """What the pages held must not be there by chance when they are back."""
        torch.empty(max(given, 0), dtype=torch.uint8, device=self._device).fill_(0xA5)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


class Trimmed(Captures):
    """Graphs most of which go, whose pool is then trimmed."""

    def trim(self, keys: Sequence[int], kept: Collection[int], seed: int) -> dict[str, Any]:
        """Captures ``keys`` in this order; all but ``kept`` go. ``touched_bytes`` is that of the
        pages on which a block of what is kept lay, by PyTorch's own record of allocations;
        ``alone_bytes`` what a fresh pool holds with what is kept alone.
        """
        alone = self._capture_in(cgp.GraphPool(self._device), [k for k in keys if k in kept])[0]
        self.release()
        pool = cgp.GraphPool(self._device)
        before, touched = self._capture_in(pool, keys)
        for key in keys:
            if key not in kept:
                del self._graphs[key]
        gc.collect()
        began = time.perf_counter()
        told = pool.trim()
        seconds = time.perf_counter() - began
        pages = set().union(*(touched[key] for key in kept))
        said = pool.stats()
        compared = self.compare(sorted(kept), seed)
        self.release()
        return {
            "graphs": len(keys),
            "kept": len(kept),
            "before_bytes": before,
            "reserved_bytes": said["reserved_bytes"],
            "told_bytes": told,
            "touched_bytes": len(pages) * said["page_bytes"],
            "alone_bytes": alone,
            "seconds": seconds,
            "equal": all(one.equal for one in compared.values()),
        }

    def _capture_in(
        self, pool: cgp.GraphPool, keys: Sequence[int]
    ) -> tuple[int, dict[int, set[int]]]:
        """What the pool holds then, and on which of its pages each graph's blocks lay."""
        memory: Any = torch.cuda.memory  # the recorder is not annotated
        touched = {}
        for key in keys:
            memory._record_memory_history(enabled="all", context=None, clear_history=True)
            try:
                graph = self._graphs[key] = torch.cuda.CUDAGraph()
                with cgp.graph(graph, pool, stream=self._stream):
                    self.workload.step(key)
                entries = memory._snapshot(self._device)["device_traces"][self._device.index or 0]
            finally:
                memory._record_memory_history(enabled=None)
            touched[key] = touched_pages(entries, pool.snapshot())
        return pool.stats()["reserved_bytes"], touched


def driver_calls(device: torch.device) -> Callable[[str], int]:
    """How often our allocator has called a function of the driver, by its name."""
    calls = load_adapter().driver_calls(device.index or 0)
    return lambda name: int(calls.get(name, (0, 0))[0])


def scratch_bytes(snapshot: Mapping[str, Any]) -> int:
    """Those of the pages without a live block."""
    held = {page for block in snapshot["blocks"] for page, _, _ in block["pieces"]}
    stats = snapshot["stats"]
    return int(stats["reserved_bytes"]) - len(held) * int(stats["page_bytes"])


def touched_pages(entries: Iterable[Mapping[str, Any]], snapshot: Mapping[str, Any]) -> set[int]:
    """Of a pool: on which a block of PyTorch's record of allocations lay."""
    size = snapshot["stats"]["page_bytes"]
    page_at = {
        range_["address"] + number * size: page
        for range_ in snapshot["ranges"]
        for number, page in enumerate(range_["pages"])
    }
    found = set()
    for entry in entries:
        if entry["action"] == "alloc":
            first, end = entry["addr"] // size * size, entry["addr"] + entry["size"]
            found |= {page_at[at] for at in range(first, end, size) if at in page_at}
    return found


def _alike(these: Sequence[Tensor], those: Sequence[Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(these, those, strict=True))
