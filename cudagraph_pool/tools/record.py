"""``cudagraph-pool record``: a program's captures, written as traces that ``replay`` takes.

As with ``run`` every process of the program is served through the environment, and the program
itself stays as it is, on PyTorch's own allocator. What it allocates is in torch's memory history;
which of it is a capture's is known by marks in there: snapshots, taken when a capture begins and
when it has ended. The latter also says where the pool's memory lies.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Final, NamedTuple

from .memory_map import operation_of
from .trace import Event, most_live_bytes

_BEGIN: Final = "cudagraph_pool: a capture begins, number"
_END: Final = "cudagraph_pool: a capture has ended, number"


class Capture(NamedTuple):
    """One that was recorded.

    Attributes:
        number: Of its marks.
        segments: Where the pool's memory lies: a begin and an end of each.
        reserved_bytes: What stock has taken for the pool so far; 0 if it is not stock's.
    """

    number: int
    device: int
    pool: tuple[int, int]
    segments: Sequence[tuple[int, int]]
    reserved_bytes: int

    def holds(self, address: int) -> bool:
        return any(begin <= address < end for begin, end in self.segments)


@dataclass(slots=True)
class _Pool:
    """A trace in the making."""

    graphs: list[list[Event]] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)  # by graph, what stock had after it
    late: list[Event] = field(default_factory=list)  # frees since its last capture has ended

    def document(self) -> dict[str, Any]:
        graphs = []
        for place, events in enumerate(self.graphs):
            written = [[1, *e] if e.bytes else [-1, e.block] for e in events]
            stock = {"stock": self.held[place]} if self.held.get(place) else {}
            graphs.append({"key": most_live_bytes(events), **stock, "events": written})
        return {"stock": {"reserved": max(self.held.values(), default=0)}, "graphs": graphs}


class Recorder:
    """Marks captures from now on, and writes them at the end of this process."""

    def __init__(self, folder: str, cuda: Any) -> None:
        self._folder = folder
        self._cuda = cuda
        self._lock = threading.Lock()
        self._begun = 0
        self._captures: list[Capture] = []
        cuda.memory._record_memory_history("all", context=None, stacks="python")
        graph = cuda.CUDAGraph
        graph.capture_begin = self._beginning(graph.capture_begin)
        graph.capture_end = self._ending(graph.capture_end)

    def _beginning(self, begin: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(begin)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            with self._lock:
                self._begun += 1
                graph._recorded_as = self._begun
            self._mark(f"{_BEGIN} {graph._recorded_as}")
            begin(graph, *args, **kwargs)

        return capture_begin

    def _ending(self, end: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(end)
        def capture_end(graph: Any) -> None:
            end(graph)
            from ..switch import is_enabled

            pool, device = tuple(graph.pool()), self._cuda.current_device()
            segments = [
                (segment["address"], segment["address"] + segment["total_size"])
                for segment in self._mark(f"{_END} {graph._recorded_as}")
                if tuple(segment["segment_pool_id"]) == pool and segment["device"] == device
            ]
            reserved = 0 if is_enabled() else sum(end - begin for begin, end in segments)
            with self._lock:
                self._captures.append(Capture(graph._recorded_as, device, pool, segments, reserved))

        return capture_end

    def _mark(self, text: str) -> Any:
        """Leaves a mark in the history; returns all segments.

        Not those of one pool: given a pool's id, torch 2.11 releases one reference too many of both
        its numbers at each call, and crashes after a few.
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
        about = {"torch": sys.modules["torch"].__version__, "gpu": self._cuda.get_device_name()}
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
    import torch

    # Not atexit: multiprocessing's forked processes end without it.
    Finalize(None, Recorder(folder, torch.cuda).write, exitpriority=0)


def traces_of(
    history: Sequence[Sequence[Mapping[str, Any]]], captures: Iterable[Capture]
) -> list[dict[str, Any]]:
    """A trace of each pool that was captured into, but for what names it.

    A block that is freed between two captures is freed at the start of the second; one that was
    not allocated in a capture is not there.

    Arguments:
        history: Of each device, entries of torch's memory history.
        captures: In any order.
    """
    pools: dict[tuple[int, tuple[int, int]], _Pool] = {}
    known = list(captures)
    for device in dict.fromkeys(capture.device for capture in known):
        on_device = {capture.number: capture for capture in known if capture.device == device}
        _read_device(history[device], on_device, pools)
    return [pool.document() for pool in pools.values() if any(pool.graphs)]


def _read_device(
    entries: Iterable[Mapping[str, Any]],
    known: Mapping[int, Capture],
    pools: dict[tuple[int, tuple[int, int]], _Pool],
) -> None:
    open_pools: dict[int, _Pool] = {}  # by the number of a capture
    places: dict[int, int] = {}  # of captures among their pool's graphs
    live: dict[int, tuple[_Pool, int]] = {}  # by address: whose it is, and its number
    streams: dict[int, int] = {}
    blocks = itertools.count()
    for entry in entries:
        if entry["action"] == "snapshot":
            text, _, digits = str(entry["user_metadata"]).rpartition(" ")
            number = int(digits) if text in (_BEGIN, _END) else 0
            if text == _BEGIN and number in known:
                capture = known[number]
                pool = pools.setdefault((capture.device, capture.pool), _Pool())
                open_pools[number], places[number] = pool, len(pool.graphs)
                pool.graphs.append(pool.late)
                pool.late = []
            elif text == _END and number in open_pools:
                open_pools.pop(number).held[places[number]] = known[number].reserved_bytes
            continue
        address, size = operation_of(entry) or (0, 0)
        if size:
            owners = (pool for n, pool in open_pools.items() if known[n].holds(address))
            owner = next(owners, None)
            if owner is not None:
                block, stream = next(blocks), streams.setdefault(entry["stream"], len(streams))
                owner.graphs[-1].append(Event(block, size, stream))
                live[address] = owner, block
        elif address in live:
            pool, block = live.pop(address)
            is_open = any(pool is other for other in open_pools.values())
            (pool.graphs[-1] if is_open else pool.late).append(Event(block, 0, 0))
