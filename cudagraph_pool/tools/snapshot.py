"""Reads what ``torch.cuda.memory._dump_snapshot()`` has written, which a user may have already.

It has the segments of graph pools, and the memory history if that was recorded. Where captures
began it does not say: all that happened in a pool stands for one graph. As of traces, nothing in it
is trusted: of a pickle only plain values are read.
"""

import bisect
import io
import os
import pickle
from dataclasses import dataclass, field
from operator import index, itemgetter
from typing import Any, Final, NoReturn

from . import trace
from .memory_map import operation_of
from .trace import Event, Graph, Trace, TraceError

MAX_BYTES: Final = 1 << 30


def read_traces(path: str | os.PathLike[str]) -> list[Trace]:
    """Reads a trace, or of a snapshot a trace of each graph pool in it. Raises TraceError."""
    name = os.fspath(path)
    with trace.errors_of(name):
        data = trace.read_bytes(name, MAX_BYTES)
        if not data.startswith(trace.PICKLED):
            return [trace.parse_trace(name, data)]
        if len(data) > MAX_BYTES:
            raise TraceError("", f"the file goes on; a snapshot may have {MAX_BYTES >> 20} MiB")
        try:
            return traces_of(_Unpickler(io.BytesIO(data)).load(), name)
        except TraceError:
            raise
        except Exception as error:  # whatever a damaged pickle may lead to
            what = f"not a memory snapshot: {type(error).__name__}: {error}"
            raise TraceError("", what) from None


class _Unpickler(pickle.Unpickler):
    """Makes dictionaries, lists, tuples, texts and numbers, and calls nothing."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it holds a {module}.{name}, as no snapshot does")


@dataclass(slots=True)
class _Pool:
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


def traces_of(snapshot: Any, path: str = "") -> list[Trace]:
    """A trace of each graph pool; raises TraceError."""
    pools = _pools(snapshot)
    if not pools:
        raise TraceError("", "there is no graph pool in it: dump it while the graphs are alive")
    if not any(pool.history for pool in pools.values()):
        call = "torch.cuda.memory._record_memory_history() before the captures"
        raise TraceError("", f"it has no history of a graph pool: call {call}")
    return [
        pools[device, pool_id].trace(path, f"cuda:{device} {pool_id}")
        for device, pool_id in sorted(pools)
        if pools[device, pool_id].history or pools[device, pool_id].live
    ]


def _pools(snapshot: Any) -> dict[tuple[int, tuple[int, int]], _Pool]:
    pools: dict[tuple[int, tuple[int, int]], _Pool] = {}
    segments: dict[int, list[tuple[int, int, _Pool]]] = {}  # by device: a begin and an end of each
    for segment in snapshot["segments"]:
        first, second = map(index, segment["segment_pool_id"])
        if (first, second) == (0, 0):  # eager memory
            continue
        device, begin, stream = (index(segment[key]) for key in ("device", "address", "stream"))
        size = _size(segment["total_size"])
        pool = pools.setdefault((device, (first, second)), _Pool())
        pool.reserved += size
        segments.setdefault(device, []).append((begin, begin + size, pool))
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                pool.live[index(block["address"])] = _size(block["size"]), stream
    read = 0
    for device, entries in enumerate(snapshot["device_traces"]):
        there = sorted(segments.get(device, ()), key=itemgetter(0))
        for entry in entries:
            operation = operation_of(entry)
            if operation is None:
                continue
            address = index(operation.address)
            place = bisect.bisect_right(there, address, key=itemgetter(0)) - 1
            if place < 0 or address >= there[place][1]:
                continue
            read += 1
            if read > trace.MAX_EVENTS:
                what = f"more than {trace.MAX_EVENTS} allocations and frees in graph pools"
                raise TraceError("", what)
            size = _size(operation.size) if operation.size else 0
            there[place][2].history.append((address, size, index(entry["stream"])))
    return pools


def _size(value: Any) -> int:
    if index(value) not in trace.SIZES:
        raise ValueError(f"a size of {value}, where 1 to {trace.SIZES[-1]} may stand")
    return index(value)
