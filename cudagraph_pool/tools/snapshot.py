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
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from .trace import (
    MAX_EVENTS,
    MAX_LIVE_BYTES,
    PICKLED,
    Event,
    Fields,
    FormatError,
    Graph,
    Trace,
    TraceError,
    checked,
    members,
    most_live_bytes,
    parse_trace,
    read_bytes,
)

MAX_BYTES: Final = 1 << 30

_NUMBERS: Final = range(1 << 64)
_SIZES: Final = range(1, MAX_LIVE_BYTES + 1)
_SNAPSHOT: Final[Fields] = {"segments": list, "device_traces": list}
_SEGMENT: Final[Fields] = {
    **dict.fromkeys(("device", "address", "stream"), _NUMBERS),
    "total_size": range(MAX_LIVE_BYTES + 1),
    "segment_pool_id": tuple,
    "blocks": list,
}
_BLOCK: Final[Fields] = {"address": _NUMBERS, "size": _SIZES}
_ENTRY: Final[Fields] = {"addr": _NUMBERS, "stream": _NUMBERS}


def read_traces(path: str | os.PathLike[str]) -> list[Trace]:
    """Reads a trace, or of a snapshot a trace of each graph pool in it.

    Raises:
        TraceError: The file cannot be read, or is neither.
    """
    name = os.fspath(path)
    data = read_bytes(name, MAX_BYTES)
    if not data.startswith(PICKLED):
        return [parse_trace(name, data)]
    try:
        if len(data) > MAX_BYTES:
            raise FormatError("", f"the file goes on; a snapshot may have {MAX_BYTES >> 20} MiB")
        return traces_of(_unpickle(data), name)
    except FormatError as wrong:
        raise TraceError(name, *wrong.args) from None


def traces_of(snapshot: object, path: str = "") -> list[Trace]:
    """A trace of each graph pool; raises FormatError."""
    pools = _pools(members(snapshot, _SNAPSHOT, ""))
    return [pool.trace(path, *name) for name, pool in sorted(pools.items())]


class _Unpickler(pickle.Unpickler):
    """Makes dictionaries, lists, tuples, texts and numbers, and calls nothing."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it holds a {module}.{name}, as no snapshot does")


def _unpickle(data: bytes) -> object:
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # whatever a damaged pickle may lead to
        raise FormatError("", f"not a memory snapshot: {error}") from None


@dataclass(slots=True)
class _Pool:
    """A graph pool.

    Attributes:
        reserved: What its segments have, in bytes.
        live: By address, what lives in the end: a size and a stream.
        history: Allocations, as an address, a size and a stream. A free has the size 0.
    """

    reserved: int = 0
    live: dict[int, tuple[int, int]] = field(default_factory=dict)
    history: list[tuple[int, int, int]] = field(default_factory=list)

    def trace(self, path: str, device: int, id: tuple[int, int]) -> Trace:
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
        graph = Graph(most_live_bytes([*older, *events]), [*older, *events])
        return Trace(path, f"cuda:{device} {id}", self.reserved, [graph], is_marked=False)


def _pools(snapshot: dict[str, Any]) -> dict[tuple[int, tuple[int, int]], _Pool]:
    pools: dict[tuple[int, tuple[int, int]], _Pool] = {}
    segments: dict[int, list[tuple[int, int, _Pool]]] = {}  # by device: a begin and an end of each
    for where, value in _each(snapshot["segments"], "segments"):
        segment = members(value, _SEGMENT, where)
        device, begin, size = segment["device"], segment["address"], segment["total_size"]
        pool_id = segment["segment_pool_id"]
        if len(pool_id) != 2 or not all(type(part) is int for part in pool_id):
            raise FormatError(f"{where}.segment_pool_id", "must be two integers")
        if pool_id == (0, 0):  # eager memory
            continue
        pool = pools.setdefault((device, pool_id), _Pool())
        pool.reserved += size
        segments.setdefault(device, []).append((begin, begin + size, pool))
        for place, block in _each(segment["blocks"], f"{where}.blocks"):
            if members(block, {"state": str}, place)["state"].startswith("active"):
                members(block, _BLOCK, place)
                pool.live[block["address"]] = block["size"], segment["stream"]
    if not pools:
        raise FormatError("", "there is no graph pool in it: dump it while the graphs are alive")
    _read_history(snapshot, segments)
    if not any(pool.history for pool in pools.values()):
        raise FormatError(
            "",
            "it has no history of a graph pool: call torch.cuda.memory._record_memory_history() "
            "before the captures",
        )
    return {name: pool for name, pool in pools.items() if pool.history or pool.live}


def _read_history(
    snapshot: dict[str, Any], segments: dict[int, list[tuple[int, int, _Pool]]]
) -> None:
    read = 0
    for device, trace in enumerate(snapshot["device_traces"]):
        there = sorted(segments.get(device, ()), key=lambda segment: segment[0])
        begins = [begin for begin, _, _ in there]
        place = f"device_traces[{device}]"
        for where, entry in _each(checked(trace, list, place), place):
            action = members(entry, {"action": str}, where)["action"]
            if action not in ("alloc", "free_requested"):
                continue
            address = members(entry, _ENTRY, where)["addr"]
            index = bisect.bisect_right(begins, address) - 1
            if index < 0 or address >= there[index][1]:
                continue
            read += 1
            if read > MAX_EVENTS:
                raise FormatError(
                    "", f"more than {MAX_EVENTS} allocations and frees in graph pools"
                )
            size = members(entry, {"size": _SIZES}, where)["size"] if action == "alloc" else 0
            there[index][2].history.append((address, size, entry["stream"]))


def _each(values: list[Any], where: str) -> Iterator[tuple[str, Any]]:
    """Each with its place."""
    return ((f"{where}[{number}]", value) for number, value in enumerate(values))
