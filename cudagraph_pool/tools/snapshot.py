"""Reads what ``torch.cuda.memory._dump_snapshot()`` has written, which a user may have already.

A snapshot has the segments of every graph pool, and the memory history if that was recorded. It
does not say where captures began and ended: all that happened in a pool stands for one graph.

As of traces, nothing in it is trusted: of a pickle only plain values are read.
"""

from __future__ import annotations

import bisect
import io
import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from . import trace
from .trace import SIZES, Event, Fields, Graph, Trace, TraceError, checked, members

MAX_BYTES: Final = 1 << 30

_NUMBERS: Final = range(1 << 64)
_SNAPSHOT: Final[Fields] = {"segments": list, "device_traces": list}
_SEGMENT: Final[Fields] = {
    **dict.fromkeys(("device", "address", "stream"), _NUMBERS),
    **{"total_size": range(SIZES.stop), "segment_pool_id": tuple, "blocks": list},
}
_BLOCK: Final[Fields] = {"address": _NUMBERS, "size": SIZES}
_ENTRY: Final[Fields] = {"addr": _NUMBERS, "stream": _NUMBERS}


def read_traces(path: str | os.PathLike[str]) -> list[Trace]:
    """Reads a trace, or of a snapshot a trace of each graph pool in it.

    Raises:
        TraceError: The file cannot be read, or is neither.
    """
    name = os.fspath(path)
    with trace.errors_of(name):
        data = trace.read_bytes(name, MAX_BYTES)
        if not data.startswith(trace.PICKLED):
            return [trace.parse_trace(name, data)]
        if len(data) > MAX_BYTES:
            raise TraceError("", f"the file goes on; a snapshot may have {MAX_BYTES >> 20} MiB")
        try:
            snapshot = _Unpickler(io.BytesIO(data)).load()
        except Exception as error:  # whatever a damaged pickle may lead to
            raise TraceError("", f"not a memory snapshot: {error}") from None
        return traces_of(snapshot, name)


class _Unpickler(pickle.Unpickler):
    """Makes dictionaries, lists, tuples, texts and numbers, and calls nothing."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it holds a {module}.{name}, as no snapshot does")


@dataclass(slots=True)
class _Pool:
    """A graph pool."""

    reserved: int = 0  # what its segments have, in bytes
    live: dict[int, tuple[int, int]] = field(default_factory=dict)  # by address: size and stream
    # Allocations, as an address, a size and a stream. A free has the size 0.
    history: list[tuple[int, int, int]] = field(default_factory=list)

    def trace(self, path: str, name: str) -> Trace:
        events: list[Event] = []
        blocks: dict[int, int] = {}  # what lives, by address
        streams: dict[int, int] = {}
        for number, (address, size, stream) in enumerate(self.history):
            if address in blocks:
                events.append(Event(blocks.pop(address), 0, 0))
            if size:
                blocks[address] = number
                events.append(Event(number, size, streams.setdefault(stream, len(streams))))
        older = [
            Event(-1 - number, size, streams.setdefault(stream, len(streams)))
            for number, (address, (size, stream)) in enumerate(self.live.items())
            if address not in blocks
        ]
        graph = Graph(trace.most_live_bytes([*older, *events]), [*older, *events])
        return Trace(path, name, self.reserved, [graph], is_marked=False)


_Segments = dict[int, list[tuple[int, int, _Pool]]]  # by device: a begin and an end of each


def traces_of(snapshot: object, path: str = "") -> list[Trace]:
    """A trace of each graph pool; raises TraceError."""
    top = members(snapshot, _SNAPSHOT, "")
    pools: dict[tuple[int, tuple[int, int]], _Pool] = {}
    segments: _Segments = {}
    for where, value in _each(top["segments"], "segments"):
        segment = members(value, _SEGMENT, where)
        device, begin, pool_id = segment["device"], segment["address"], segment["segment_pool_id"]
        if [*map(type, pool_id)] != [int, int]:
            raise TraceError(f"{where}.segment_pool_id", "must be two integers")
        if pool_id == (0, 0):  # eager memory
            continue
        pool = pools.setdefault((device, pool_id), _Pool())
        pool.reserved += segment["total_size"]
        segments.setdefault(device, []).append((begin, begin + segment["total_size"], pool))
        for place, block in _each(segment["blocks"], f"{where}.blocks"):
            if members(block, {"state": str}, place)["state"].startswith("active"):
                members(block, _BLOCK, place)
                pool.live[block["address"]] = block["size"], segment["stream"]
    if not pools:
        raise TraceError("", "there is no graph pool in it: dump it while the graphs are alive")
    _read_history(top, segments)
    if not any(pool.history for pool in pools.values()):
        call = "torch.cuda.memory._record_memory_history() before the captures"
        raise TraceError("", f"it has no history of a graph pool: call {call}")
    return [
        pool.trace(path, f"cuda:{device} {pool_id}")
        for (device, pool_id), pool in sorted(pools.items(), key=lambda named: named[0])
        if pool.history or pool.live
    ]


def _read_history(snapshot: Mapping[str, Any], segments: _Segments) -> None:
    read = 0
    for device, (place, entries) in enumerate(_each(snapshot["device_traces"], "device_traces")):
        there = sorted(segments.get(device, ()), key=lambda segment: segment[0])
        for where, entry in _each(checked(entries, list, place), place):
            action = members(entry, {"action": str}, where)["action"]
            if action not in ("alloc", "free_requested"):
                continue
            address = members(entry, _ENTRY, where)["addr"]
            index = bisect.bisect_right(there, address, key=lambda segment: segment[0]) - 1
            if index < 0 or address >= there[index][1]:
                continue
            read += 1
            if read > trace.MAX_EVENTS:
                what = f"more than {trace.MAX_EVENTS} allocations and frees in graph pools"
                raise TraceError("", what)
            size = members(entry, {"size": SIZES}, where)["size"] if action == "alloc" else 0
            there[index][2].history.append((address, size, entry["stream"]))


def _each(values: list[Any], where: str) -> Iterator[tuple[str, Any]]:
    """Each with its place."""
    return ((f"{where}[{number}]", value) for number, value in enumerate(values))
