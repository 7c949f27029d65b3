"""Captures into one pool, what they cost, and the order of their replays: all that knows CUDA."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._adapter import load_adapter
from .._forecast import count_nodes
from .._table import format_table
from ..capture import _next_graph, graph
from ..pools import GraphPool
from ..sizes import Size, shown

Span = tuple[Any, Any]  # two marks in the work of a stream, of :meth:`Captures.mark`

_SAMPLES = 3  # replays that are timed, for each graph


@dataclass(frozen=True, slots=True)
class SizeReport:
    r"""What one size cost.

    Attributes:
        size (tuple): The size.
        nodes (int): Of its graphs, that of the backward pass included.
        peak_bytes (int): The most that was allocated in the pool at once in its capture.
        pool_bytes (int): What the pool holds since its capture and did not before.
        driver_bytes (int): What the device has less since executables were made for it, at its
            capture or its first replays. Other processes' work shows in it.
        capture_seconds (float): What its capture took.
        eager_seconds (float or None): What a warm-up took, the backward pass included.
        replay_seconds (float or None): The median of its first replays, without the backward pass.
    """

    size: Size
    nodes: int
    peak_bytes: int
    pool_bytes: int
    driver_bytes: int
    capture_seconds: float
    eager_seconds: float | None = None
    replay_seconds: float | None = None


class Report(list[SizeReport]):
    r"""A :class:`SizeReport` for each captured size, smallest first."""

    def __str__(self) -> str:
        rows = [["size", "nodes", "peak", "pool", "driver", "capture", "eager", "replay"]]
        for row in self:
            sizes = row.peak_bytes, row.pool_bytes, row.driver_bytes
            times = row.capture_seconds, row.eager_seconds, row.replay_seconds
            cells = [shown(row.size), str(row.nodes), *(f"{n / 2**20:,.1f}" for n in sizes)]
            rows.append([*cells, *("-" if s is None else f"{s * 1e3:,.3f}" for s in times)])
        return "sizes in MiB, times in ms\n" + format_table(rows)


class Graph:
    """A graph that was captured, and whose first replays are measured."""

    def __init__(self, graph: Any, nodes: int, captures: Captures) -> None:
        self.nodes = nodes
        self.peak_bytes = captures.stats()["scope_peak_bytes"]
        self.driver_bytes = 0  # that the driver has taken to make executables
        self.spans: list[Span] = []
        self._graph, self._captures = graph, captures

    def replay(self) -> None:
        if len(self.spans) == _SAMPLES:
            self._graph.replay()
            return
        used, began = self._captures.device_bytes(), self._captures.mark()
        self._graph.replay()
        self.spans.append((began, self._captures.mark()))
        self.driver_bytes += max(0, self._captures.device_bytes() - used)


class Captures:
    """Work that is captured into a pool, and replayed one after the other."""

    # One capture at a time in a process: most of a device use one stream, and a wait for the device
    # would end that of another thread.
    lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, pool: GraphPool, shared_exec: bool | None, own_workspace: bool) -> None:
        self.device = pool.device
        self.pool = pool
        self.order = pool._order
        self._shared_exec = pool._shared_exec if shared_exec is None else shared_exec
        self._own_workspace = own_workspace
        self._stream = pool._own_stream if own_workspace else graph._capture_stream(pool.device)

    @contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        """Within it the stream that captures is current: warm-ups make what libraries keep for it,
        outside of the pool. It comes after all replays, which may still read the static inputs, and
        before what follows. pre: ``lock`` is held.
        """
        current = torch.cuda.current_stream(self.device)
        with self.order.lock:
            self.follow(())
            self._stream.wait_stream(current)
            self.order.lose("a capture")
        if self._own_workspace:
            self.synchronize()  # a graph of the pool that had the stream before may still run
        # What graphs hold of cuBLAS's workspaces is not made anew.
        load_adapter().hold_workspaces(self._stream.cuda_stream)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            # A later call, without ``lock``, would be drawn into another thread's capture there.
            with self.order.lock:
                current.wait_stream(self._stream)
                self.order.follow(current)

    def empty_caches(self) -> None:
        """Before captures, as torch.cuda.graph does before each."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()

    def capture(self, work: Callable[[], None]) -> Graph:
        """A graph of the work. pre: it is one of some :meth:`on_capture_stream`."""
        captured = torch.cuda.CUDAGraph(keep_graph=True)  # so that its nodes can be counted
        mode = "thread_local"  # other threads may pin memory for a loader meanwhile
        with _next_graph(captured, self.pool, self._stream, mode, shared_exec=self._shared_exec):
            work()
        made = Graph(captured, count_nodes(captured), self)
        if not self._shared_exec:
            used = self.device_bytes()
            captured.instantiate()
            made.driver_bytes = max(0, self.device_bytes() - used)
        return made

    def holds(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return bool(self.pool._adapter.pool_of(self.device.index, address) == self.pool.id)

    def stats(self) -> dict[str, int]:
        """Of the pool. It does not ask the device, which a small capture would feel."""
        return dict(self.pool._adapter.stats(*self.pool._key))

    def trim(self) -> None:
        self.pool.trim()

    def device_bytes(self) -> int:
        """What nobody else can have of the device now. Also of a pool that was closed."""
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def mark(self) -> Any:
        """An event, which times, in the current stream's work."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, span: Span) -> float:
        return float(span[0].elapsed_time(span[1])) * 1e-3

    def follow(self, written: Sequence[Tensor], streams: set[int] | None = None) -> None:
        """Orders what the current stream gets next behind the pool's last replay. What it writes
        was allocated on another stream, and is known to be used on ``streams``. pre: ``order.lock``
        is held until the next launch.
        """
        if torch._C._cuda_isCurrentStreamCapturing():
            raise RuntimeError(
                "a GraphRunner was called while a capture is under way on the current stream: "
                "graphs of its pool must not become part of another one. Capture what it runs"
            )
        current = torch._C._cuda_getCurrentRawStream(self.device.index)
        last = self.order.stream
        is_known = streams is None or current in streams
        if is_known and last is not None and last.cuda_stream == current:
            return  # as of most calls, which need no Stream object for it
        stream = torch.cuda.current_stream(self.device)
        self.order.follow(stream)
        if streams is not None and not is_known:
            for tensor in written:
                tensor.record_stream(stream)
            streams.add(current)


@contextmanager
def undisturbed() -> Iterator[None]:
    """What the caller has set is no part of a capture, nor of its warm-ups."""
    # Python's garbage collector would take a tenth of a second in the middle of a capture. A
    # program's own freeze is not undone.
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.freeze()
    # What autocast caches would be filled in by one graph only. In warm-ups too: torch.compile
    # guards on it, and would compile anew in the capture.
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    # Saved tensors are packed by no hooks of the caller's, as those of a checkpoint.
    hooks: Any = nullcontext()
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        hooks = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)
    try:
        # Backward passes run in this thread: that of autograd for the device may wait for this
        # capture to end, in a call from within a backward pass of another thread.
        with hooks, torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        if freezes:
            gc.unfreeze()
