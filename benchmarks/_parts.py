"""Captures whose allocations and frees are timed one by one, for capture_parts.py."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _measure import Captures, FreshPool
from _workloads import Workload

import cudagraph_pool
from cudagraph_pool._adapter import load_adapter

SOURCE = Path(__file__).with_name("capture_parts.cc")
ALLOCATOR = "_ZN3c104cuda20CUDACachingAllocator9allocatorE"  # of c10::cuda


class TimedCaptures(Captures):
    """By stock and by ours in turns, in one process, so that the host's speed is the same."""

    def __init__(self, workload: Callable[[torch.device], Workload], device: torch.device) -> None:
        super().__init__(workload, device, ours=False)
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder) / "capture_parts.so"
            flags = ["-std=c++17", "-O2", "-shared", "-fPIC"]
            subprocess.run(["g++", *flags, str(SOURCE), "-o", str(built)], check=True)
            self._hook = ctypes.CDLL(str(built))
        for name in ("parts_now", "parts_count"):
            getattr(self._hook, name).restype = ctypes.c_int64
        self._hook.parts_calls.restype = ctypes.POINTER(ctypes.c_int64)
        c10_cuda = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10_cuda.so"))
        self._allocator = ctypes.c_void_p.in_dll(c10_cuda, ALLOCATOR)

    def parts(self, order: Sequence[int], ours: bool, rounds: int = 1) -> dict[str, Any]:
        """Captures all sizes into a new pool, and again in it until that was done ``rounds`` times,
        each graph being dropped once its successor is captured.

        Returns nanoseconds: ``enter``, ``body`` and ``exit`` of ``torch.cuda.graph`` over all
        sizes; of each call of the allocator ``bytes`` (-1: a free), how long it ``took``, and the
        ``gap`` from there to the next call or the end of the body; and ``driver``: by CUDA's
        function how often it was called, and the time. All that is of the first round. ``bodies``
        and ``mapped`` have the bodies' nanoseconds and the handles mapped of each round,
        ``reserved_bytes`` what the pool held at its end.
        """
        self.release()
        if ours:
            cudagraph_pool.enable()
        else:
            cudagraph_pool.disable()
        self._hook.parts_hook(self._allocator)
        self._pool = pool = FreshPool(self._device, ours)
        found = [self._round(order, ours, pool.id) for _ in range(rounds)]
        driver = [one["driver"].get("cuMemMap", (0, 0))[0] for one in found]
        return {
            **found[0],
            "bodies": [one["body"] for one in found],
            "mapped": driver,
            "reserved_bytes": [one["reserved_bytes"] for one in found],
        }

    def _round(self, order: Sequence[int], ours: bool, pool: tuple[int, int]) -> dict[str, Any]:
        torch.cuda.synchronize(self._device)
        before = self._driver_calls(ours)
        enter = body = leave = 0
        took, gap, sizes = [], [], []
        for key in order:
            graph = torch.cuda.CUDAGraph()
            start = time.perf_counter_ns()
            with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                self._hook.parts_record(1)
                first = self._hook.parts_now()
                self.workload.step(key)
                last = self._hook.parts_now()
                self._hook.parts_record(0)
                calls = self._hook.parts_calls()[: 3 * self._hook.parts_count()]
                done = time.perf_counter_ns()
            end = time.perf_counter_ns()
            self._graphs[key] = graph
            enter, body, leave = enter + first - start, body + last - first, leave + end - done
            begins, ends = calls[::3], calls[1::3]
            took += [end - begin for begin, end in zip(begins, ends, strict=True)]
            gap += [after - end for end, after in zip(ends, [*begins[1:], last], strict=True)]
            sizes += calls[2::3]
        driver = {
            name: (count - before.get(name, (0, 0))[0], spent - before.get(name, (0, 0))[1])
            for name, (count, spent) in self._driver_calls(ours).items()
        }
        return {
            "enter": enter,
            "body": body,
            "exit": leave,
            "took": took,
            "gap": gap,
            "bytes": sizes,
            "driver": driver,
            "reserved_bytes": self._pool.reserved_bytes() if self._pool else 0,
        }

    def _driver_calls(self, ours: bool) -> dict[str, tuple[int, int]]:
        return load_adapter().driver_calls(self._device.index or 0) if ours else {}
