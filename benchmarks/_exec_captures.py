"""The graphs of one workload, with an executable each or few for all, and what is asked of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from _measure import Captures
from _workloads import Workload

import cudagraph_pool as cgp
from cudagraph_pool._forecast import count_nodes


def pool_arguments(config: str) -> dict[str, Any]:
    """What a :class:`cudagraph_pool.GraphPool` is made with: ``default``, ``none`` or a number.
    ``stock`` has none.
    """
    if config == "stock":
        return {}
    if config == "default":
        return {"shared_exec": True}
    return {"shared_exec": True, "max_execs": None if config == "none" else int(config)}


class ExecCaptures(Captures):
    """Graphs of all sizes in one pool.

    Args:
        workload: what to capture.
        device: where.
        config: ``stock``, or what bounds our pool's executables.
    """

    def __init__(
        self, workload: Callable[[torch.device], Workload], device: torch.device, config: str
    ) -> None:
        super().__init__(workload, device, ours=config != "stock")
        self._arguments = pool_arguments(config)
        self._pool: Any  # of the graphs; stock's is a handle
        self._nodes: list[int] = []

    def warm_up(self) -> None:
        """Runs every size, and captures it without an executable: what is loaded or made at the
        first capture is not the executables'. Notes how many nodes the graphs have.
        """
        super().warm_up()
        graphs = self._capture_all({}, keep_graph=True)
        nodes = [count_nodes(graph) for graph in graphs.values()]
        self._nodes = [min(nodes), max(nodes)]
        del graphs
        self.release()

    def memory(self, seed: int) -> dict[str, Any]:
        """Captures all sizes and replays them, in their order and then in another.

        ``driver_bytes`` is the most that the device has less after each of these than before the
        first, without what PyTorch reports as reserved: that is what pools and eager work hold,
        whole pages of the driver in either allocator, so that the difference is exact.
        ``nodes`` is those of the smallest and of the largest graph.
        """
        self.release()
        before = self._driver_bytes()
        graphs = self.graphs()
        used = [self._driver_bytes()]
        shuffled = random.Random(seed).sample(list(graphs), len(graphs))
        for order in (list(graphs), shuffled):
            for key in order:
                graphs[key].replay()
            used.append(self._driver_bytes())
        return {"driver_bytes": max(used) - before, "nodes": self._nodes}

    def decode(self, before: Sequence[int], timed: Sequence[int], read_back: bool) -> float:
        """Replays the graphs of these sizes, one after the other; returns the wall's seconds of
        ``timed``.

        Args:
            before: replayed first, untimed.
            timed: the sizes of the steps.
            read_back: whether each step waits for a value that the graph computed.
        """
        graphs = self.graphs()
        values = {key: self.workload.outputs(key)[0].reshape(-1)[0] for key in graphs}
        for key in before:
            graphs[key].replay()
        torch.cuda.synchronize(self._device)
        steps = [(graphs[key], values[key]) for key in timed]
        begin = time.perf_counter()
        if read_back:
            for graph, value in steps:
                graph.replay()
                value.item()
        else:
            for graph, _ in steps:
                graph.replay()
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - begin

    def graphs(self) -> dict[int, torch.cuda.CUDAGraph]:
        """By size, captured as users capture; those that there are, if any."""
        if not self._graphs:
            self._graphs = self._capture_all(self._arguments)
        return self._graphs

    def _capture_all(
        self, arguments: Mapping[str, Any], **options: bool
    ) -> dict[int, torch.cuda.CUDAGraph]:
        """By size, graphs that are made with these options, in a new pool with these arguments.
        Without arguments they have executables of their own, if any.
        """
        if self._ours:
            self._pool = cgp.GraphPool(self._device, **arguments)
        else:
            self._pool = torch.cuda.graph_pool_handle()
        capturing = cgp.graph if self._ours else torch.cuda.graph
        graphs = {}
        for key in self.workload.keys:
            graphs[key] = torch.cuda.CUDAGraph(**options)
            with capturing(graphs[key], self._pool, stream=self._stream):
                self.workload.step(key)
        return graphs

    def _driver_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free - torch.cuda.memory_reserved(self._device))
