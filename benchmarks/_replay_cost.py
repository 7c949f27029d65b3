"""One graph, and what its replay takes of the host and of the device. For leases.py."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from _measure import Captures
from _workloads import Workload

# Without this package; with it; with it and the modules of leases, of which nothing is called; and
# where a pool has slept once, and is awake.
WAYS = ("stock", "ours", "imported", "slept")

_UNTIMED = 10  # replays, in which clocks rise


class ReplayCost(Captures):
    """The smallest size of a workload, captured in one of :data:`WAYS`."""

    def __init__(
        self, workload: Callable[[torch.device], Workload], device: torch.device, way: str
    ) -> None:
        super().__init__(workload, device, ours=way != "stock")
        self._way = way
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self) -> None:
        key = self.workload.keys[0]
        self.workload.fill(key, seed=key)
        self._run_eagerly(key)
        if self._way == "stock":
            with torch.cuda.graph(self._graph, stream=self._stream):
                self.workload.step(key)
            return
        import cudagraph_pool as cgp

        pool = cgp.GraphPool(self._device)
        with cgp.graph(self._graph, pool, stream=self._stream):
            self.workload.step(key)
        if self._way == "imported":
            _ = cgp.sleep, cgp.wake, cgp.lend_on_oom  # a name imports its module
        if self._way == "slept":
            pool.sleep()
            pool.wake()

    def modules(self) -> list[str]:
        """Those of this package that are imported."""
        return sorted(name for name in sys.modules if name.startswith("cudagraph_pool."))

    def replays(self, calls: int) -> list[float]:
        """The seconds that the calls took of the host, and until the device was done."""
        replay = self._graph.replay
        for _ in range(_UNTIMED):
            replay()
        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        for _ in range(calls):
            replay()
        called = time.perf_counter()
        torch.cuda.synchronize(self._device)
        return [called - began, time.perf_counter() - began]
