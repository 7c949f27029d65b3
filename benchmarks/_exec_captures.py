"""The graphs of one workload, with an executable each or few for all, and what is asked of them."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _exec_driver import BareSwitch, empty_calls
from _graph_shape import shape_of
from torch import Tensor

from cudagraph_pool._graphs import _EXEC_BUDGET
from cudagraph_pool._measure import Captures, PoolHandle
from cudagraph_pool._workloads import Workload

# Replays between two waits for the device where calls are timed: far below what fills its queue.
_BURST = 8

# Replays on the same inputs where results are compared.
_EPOCH = 500


def pool_arguments(config: str) -> dict[str, Any]:
    """What a :class:`cudagraph_pool.GraphPool` is made with: ``default``, ``budget`` (as a
    GraphRunner's own), ``none`` or a number.
    """
    if config == "default":
        return {"shared_exec": True}
    if config == "budget":
        return {"shared_exec": True, "exec_budget": _EXEC_BUDGET}
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
        self._config = config
        self._kept_in: Any = None  # the pool of the graphs
        self._bare: BareSwitch | None = None
        self.nodes: dict[int, int] = {}

    def warm_up(self) -> None:
        """Runs every size, and captures it without an executable: what is loaded or made at the
        first capture is not the executables'. Notes how many nodes each graph has.
        """
        super().warm_up()
        graphs, _ = self._capture_all(self._plain_pool(), kept=True)
        self.nodes = {key: shape_of(graph).nodes for key, graph in graphs.items()}
        del graphs
        self.release()

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        if self._bare is not None:
            self._bare.close()
            self._bare = None
        self._graphs.clear()
        self._kept_in = None
        super().release()

    def memory(self, seed: int) -> dict[str, Any]:
        """Captures all sizes and replays them, in their order and then in another.

        ``driver_bytes`` is what the device has less after each of these than before the first,
        without what PyTorch reports as reserved: that is what pools and eager work hold, whole
        pages of the driver in either allocator, so that the difference is exact.
        """
        self.release()
        before = self._driver_bytes()
        pool = self._usual_pool()
        self._graphs, _ = self._capture_all(pool, kept=False)
        self._kept_in = pool
        driver_bytes = {"captured": self._driver_bytes() - before}
        shuffled = random.Random(seed).sample(list(self._graphs), len(self._graphs))
        for name, order in (("replayed", list(self._graphs)), ("shuffled", shuffled)):
            for key in order:
                self._graphs[key].replay()
            driver_bytes[name] = self._driver_bytes() - before
        return {"driver_bytes": driver_bytes, "nodes": self.nodes, **self._counts(pool)}

    def ready(self) -> dict[str, float]:
        """Captures all sizes, makes them ready, and does the same without executables.

        Seconds, each of all sizes together: ``exit`` in the end of the captures, ``exit_kept`` in
        that of captures with ``keep_graph=True``, which make no executable; ``instantiate`` in
        ``instantiate()`` of all graphs and the device after it, of stock's kept ones and of ours
        that share; ``made`` in those calls of it that made an executable.
        """
        self.release()
        kept_pool = self._plain_pool()
        kept, kept_seconds = self._capture_all(kept_pool, kept=True)
        instantiate, made = 0.0, 0.0
        if not self._ours:
            instantiate, made = self._instantiate(kept, kept_pool)
        kept.clear()
        del kept_pool
        self.release()
        pool = self._usual_pool()
        graphs, seconds = self._capture_all(pool, kept=False)
        if self._ours:
            instantiate, made = self._instantiate(graphs, pool)
        graphs.clear()
        del pool
        self.release()
        return {
            "exit": seconds,
            "exit_kept": kept_seconds,
            "instantiate": instantiate,
            "made": made,
        }

    def replay_same(self, key: int, times: int) -> dict[str, float]:
        """Replays one graph again and again: the device's seconds of one replay, and the CPU's of
        one call.
        """
        graph = self.graphs()[key]
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize(self._device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        spans = []
        for _ in range(max(1, times // _BURST)):
            begin = time.perf_counter()
            for _ in range(_BURST):
                graph.replay()
            spans.append(time.perf_counter() - begin)
            torch.cuda.synchronize(self._device)
        return {
            "device": float(start.elapsed_time(end)) * 1e-3 / times,
            "cpu": statistics.median(spans) / _BURST,
        }

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

    def switch(self, times: int) -> dict[str, list[int]]:
        """Nanoseconds of each call: replays that alternate between the two sizes and replays of
        one, ours and the driver's bare calls, each of them twice ``times`` pairs of calls. The
        device is idle before each call.
        """
        graphs = self.graphs()
        spans: dict[str, list[int]] = {}
        bare = self._bare_switch()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                alternating = [graph.replay for graph in graphs.values()]
                same = [alternating[0]] * len(alternating)
                measures: dict[str, Callable[[], list[int]]] = {
                    "ours_switch": lambda: _timed(alternating, times),
                    "bare_switch": lambda: bare.switching(times),
                    "ours_same": lambda: _timed(same, times),
                    "bare_same": lambda: bare.launching(times),
                }
                for name, measure in (*measures.items(), *reversed(measures.items())):
                    spans.setdefault(name, []).extend(measure())
        finally:
            gc.enable()
        spans["ctypes"] = empty_calls(100)
        return spans

    def _bare_switch(self) -> BareSwitch:
        """One for all rounds, as ours is: an executable that was updated often may be slower."""
        if self._bare is None:
            templates, _ = self._capture_all(tuple(torch.cuda.graph_pool_handle()), kept=True)
            self._bare = BareSwitch(list(templates.values()), self._stream)
        return self._bare

    def updates_of_switches(self, times: int) -> dict[str, int]:
        """What the pool counts for ``times`` switches between the two sizes, the first of which
        may be none.
        """
        graphs = list(self.graphs().values())
        before = self._counts(self._kept_in)
        for number in range(times):
            graphs[number % len(graphs)].replay()
        torch.cuda.synchronize(self._device)
        after = self._counts(self._kept_in)
        return {
            "execs": after["execs"],
            "instantiations": after["exec_instantiations"] - before["exec_instantiations"],
            "updates": after["exec_updates"] - before["exec_updates"],
        }

    def compare_results(self, replays: int, seed: int) -> int:
        """Replays random sizes, without waiting in between, and compares all that lies in the
        outputs after each with what a graph of an executable of its own leaves there; returns how
        many replays left something else. The outputs of the largest size must hold all others'.

        Raises:
            RuntimeError: if an output is not finite, so that equality would say little.
        """
        graphs = self.graphs()
        references, _ = self._capture_all(tuple(torch.cuda.graph_pool_handle()), kept=False)
        keys = list(graphs)
        widest = max(keys)
        generator = random.Random(seed)
        wrong = torch.zeros((), dtype=torch.int64, device=self._device)
        for begin in range(0, replays, _EPOCH):
            self.workload.fill(widest, seed=seed * 1_000_003 + begin)
            expected = {}
            for key, reference in references.items():
                self.workload.clear(widest)
                reference.replay()
                expected[key] = [output.clone() for output in self.workload.outputs(widest)]
            if not all(bool(output.isfinite().all()) for output in expected[widest]):
                raise RuntimeError(f"{self.workload.name} computes values that are not finite")
            for _ in range(min(_EPOCH, replays - begin)):
                key = generator.choice(keys)
                self.workload.clear(widest)
                graphs[key].replay()
                wrong += _differ(self.workload.outputs(widest), expected[key])
        return int(wrong)

    def graphs(self) -> dict[int, torch.cuda.CUDAGraph]:
        """By size, captured as users capture; those that there are, if any."""
        if not self._graphs:
            self._kept_in = self._usual_pool()
            self._graphs, _ = self._capture_all(self._kept_in, kept=False)
        return self._graphs

    def _plain_pool(self) -> Any:
        """A pool whose graphs have executables of their own, if any."""
        if not self._ours:
            return tuple(torch.cuda.graph_pool_handle())
        import cudagraph_pool

        return cudagraph_pool.GraphPool(self._device)

    def _usual_pool(self) -> Any:
        """What this process measures."""
        if not self._ours:
            return self._plain_pool()
        import cudagraph_pool

        return cudagraph_pool.GraphPool(self._device, **pool_arguments(self._config))

    def _capture_all(self, pool: Any, kept: bool) -> tuple[dict[int, torch.cuda.CUDAGraph], float]:
        """Returns the graphs by size, and the seconds spent in the ends of their captures."""
        graphs = {}
        seconds = 0.0
        for key in self.workload.keys:
            graph = torch.cuda.CUDAGraph(keep_graph=True) if kept else torch.cuda.CUDAGraph()
            with self._capturing(graph, pool):
                self.workload.step(key)
                begin = time.perf_counter()
            seconds += time.perf_counter() - begin
            graphs[key] = graph
        return graphs, seconds

    def _capturing(self, graph: torch.cuda.CUDAGraph, pool: PoolHandle | Any) -> Any:
        if isinstance(pool, tuple):
            return torch.cuda.graph(graph, pool=pool, stream=self._stream)
        import cudagraph_pool

        return cudagraph_pool.graph(graph, pool, stream=self._stream)

    def _instantiate(
        self, graphs: dict[int, torch.cuda.CUDAGraph], pool: Any
    ) -> tuple[float, float]:
        """Returns the seconds of ``instantiate()`` of all, and of those that made an executable."""
        seconds, making = 0.0, 0.0
        before = self._counts(pool)["exec_instantiations"]
        for graph in graphs.values():
            begin = time.perf_counter()
            graph.instantiate()
            spent = time.perf_counter() - begin
            after = self._counts(pool)["exec_instantiations"]
            seconds += spent
            making += spent if self._is_stock(pool) or after != before else 0.0
            before = after
        begin = time.perf_counter()
        torch.cuda.synchronize(self._device)
        waited = time.perf_counter() - begin
        return seconds + waited, making + waited

    def _is_stock(self, pool: Any) -> bool:
        return isinstance(pool, tuple)

    def _counts(self, pool: Any) -> dict[str, int]:
        """Of executables; stock has one for each graph."""
        if self._is_stock(pool):
            graphs = len(self.workload.keys)
            return {"execs": graphs, "exec_instantiations": graphs, "exec_updates": 0}
        stats = pool.stats()
        return {name: stats[name] for name in ("execs", "exec_instantiations", "exec_updates")}

    def _driver_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free - torch.cuda.memory_reserved(self._device))


def _timed(calls: Sequence[Callable[[], object]], times: int) -> list[int]:
    """Calls each in turn, ``times`` times; returns the nanoseconds of each call."""
    now = time.perf_counter_ns
    spans = []
    for call in [*calls] * times:
        begin = now()
        call()
        spans.append(now() - begin)
        torch.cuda.synchronize()
    return spans


def _differ(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> Tensor:
    """Whether any bit does, as a number on the device."""
    differing = [
        (_bits(own) != _bits(other)).any() for own, other in zip(outputs, expected, strict=True)
    ]
    return torch.stack(differing).any().to(torch.int64)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
