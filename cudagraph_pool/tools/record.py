"""``cudagraph-pool record``: a program's captures, written as traces that ``replay`` takes.

As with ``run`` every process of the program is served through the environment, on PyTorch's own
allocator. What it allocates is in torch's memory history; which of it is a capture's is known by
marks in there: snapshots at a capture's begin and at its end, which also has the pool's segments.
"""

import functools
import gzip
import itertools
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Final, NamedTuple

from .._lazy import torch
from ..switch import is_enabled
from .memory_map import operation_of
from .trace import Event, most_live_bytes

_BEGIN: Final = "cudagraph_pool: a capture begins, number"
_END: Final = "cudagraph_pool: a capture has ended, number"


class Capture(NamedTuple):
    number: int  # of its marks
    device: int
    pool: tuple[int, int]
    segments: Sequence[tuple[int, int]]  # where the pool's memory lies: a begin and an end of each
    reserved_bytes: int  # what stock has taken for the pool so far; 0 if it is not stock's

    def holds(self, address: int) -> bool:
        return any(begin <= address < end for begin, end in self.segments)


class Recorder:
    """Marks captures from now on, and writes them at the end of this process."""

    def __init__(self, folder: str, cuda: Any) -> None:
        self._folder, self._cuda = folder, cuda
        self._numbers = itertools.count(1)
        self._captures: list[Capture] = []
        cuda.memory._record_memory_history("all", context=None, stacks="python")
        begin, end = cuda.CUDAGraph.capture_begin, cuda.CUDAGraph.capture_end

        @functools.wraps(begin)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            graph._recorded_as = next(self._numbers)
            self._mark(f"{_BEGIN} {graph._recorded_as}")
            begin(graph, *args, **kwargs)

        @functools.wraps(end)
        def capture_end(graph: Any) -> None:
            end(graph)
            self._note(graph, self._mark(f"{_END} {graph._recorded_as}"))

        cuda.CUDAGraph.capture_begin, cuda.CUDAGraph.capture_end = capture_begin, capture_end

    def _note(self, graph: Any, segments: Iterable[Mapping[str, Any]]) -> None:
        pool, device = tuple(graph.pool()), self._cuda.current_device()
        own = [s for s in segments if (tuple(s["segment_pool_id"]), s["device"]) == (pool, device)]
        spans = [(s["address"], s["address"] + s["total_size"]) for s in own]
        reserved = 0 if is_enabled() else sum(end - begin for begin, end in spans)
        self._captures.append(Capture(graph._recorded_as, device, pool, spans, reserved))

    def _mark(self, text: str) -> Any:
        """Leaves a mark in the history; returns all segments. (Asked for those of one pool, torch
        2.11 releases one reference too many of its id at each call, and crashes after a few.)
        """
        memory = self._cuda.memory
        before = memory._get_memory_metadata()
        memory._set_memory_metadata(text)
        try:
            return memory.memory_snapshot(include_traces=False)
        finally:
            memory._set_memory_metadata(before)

    def write(self) -> None:
        history = self._cuda.memory._snapshot()["device_traces"] if self._captures else ()
        traces = traces_of(history, self._captures)
        if not traces:
            return
        about = {"torch": torch.__version__, "gpu": self._cuda.get_device_name()}
        stem = Path(sys.argv[0]).stem or "python"
        for number, trace in enumerate(traces, 1):
            name = f"{stem}-{os.getpid()}-{number}"
            path = Path(self._folder, f"{name}.json.gz")
            try:
                with gzip.open(path, "wt") as file:
                    json.dump({"name": name, **about, **trace}, file, separators=(",", ":"))
                said = f"{len(trace['graphs'])} graphs of one pool: {path}"
            except OSError as error:
                said = f"{path}: cannot be written: {error.strerror or error}"
            print(f"cudagraph-pool record: {said}", file=sys.stderr, flush=True)


def start(folder: str) -> None:
    """Records this process from its first use of CUDA on."""
    # Not atexit: multiprocessing's forked processes end without it.
    Finalize(None, Recorder(folder, torch.cuda).write, exitpriority=0)


def traces_of(
    history: Sequence[Sequence[Mapping[str, Any]]], captures: Iterable[Capture]
) -> list[dict[str, Any]]:
    """A trace of each pool that was captured into, but for what names it. What is freed between two
    captures is freed at the start of the second. ``history`` has torch's entries for each device.
    """
    known = list(captures)
    pools: list[_Pool] = []
    for device, entries in enumerate(history):
        pools += _pools(entries, {c.number: c for c in known if c.device == device})
    return [pool.document() for pool in pools if any(pool.graphs)]


@dataclass(slots=True)
class _Pool:
    """A trace in the making."""

    graphs: list[list[Event]] = field(default_factory=list)
    stock: list[int] = field(default_factory=list)  # what it had after each
    open: dict[int, Capture] = field(default_factory=dict)  # captures under way, by number
    late: list[Event] = field(default_factory=list)  # frees since its last capture has ended

    def document(self) -> dict[str, Any]:
        graphs = []
        for events, held in zip(self.graphs, self.stock, strict=True):
            written = [[1, *e] if e.bytes else [-1, e.block] for e in events]
            stock = {"stock": held} if held else {}
            graphs.append({"key": most_live_bytes(events), **stock, "events": written})
        return {"stock": {"reserved": max(self.stock)}, "graphs": graphs}


def _pools(entries: Iterable[Mapping[str, Any]], known: Mapping[int, Capture]) -> list[_Pool]:
    """Those of one device."""
    pools: dict[tuple[int, int], _Pool] = {}
    live: dict[int, tuple[_Pool, int]] = {}  # by address: whose it is, and its number
    streams: dict[int, int] = {}
    blocks = itertools.count()
    for entry in entries:
        if entry["action"] == "snapshot":
            text, _, digits = str(entry["user_metadata"]).rpartition(" ")
            capture = known.get(int(digits)) if text in (_BEGIN, _END) else None
            if capture is not None:
                pool = pools.setdefault(capture.pool, _Pool())
                pool.open.pop(capture.number, None)
                if text == _BEGIN:
                    pool.open[capture.number] = capture
                    pool.graphs.append(pool.late)
                    pool.stock.append(capture.reserved_bytes)
                    pool.late = []
            continue
        address, size = operation_of(entry) or (0, 0)
        if size:
            holding = (p for p in pools.values() if any(c.holds(address) for c in p.open.values()))
            if owner := next(holding, None):
                block, stream = next(blocks), streams.setdefault(entry["stream"], len(streams))
                owner.graphs[-1].append(Event(block, size, stream))
                live[address] = owner, block
        elif address in live:
            pool, block = live.pop(address)
            (pool.graphs[-1] if pool.open else pool.late).append(Event(block, 0, 0))
    return list(pools.values())
