"""Recorded captures: reads them, and says in which order their graphs are replayed.

docs/trace_format.md says how they are written.

Traces come from elsewhere, so nothing in them is trusted: whatever does not fit ends in a
:class:`TraceError` that says which file, where in it, and what is wrong.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, NoReturn

Order = Literal["recorded", "asc", "desc", "shuffled"]
ORDERS: Final[tuple[Order, ...]] = ("recorded", "asc", "desc", "shuffled")

GRANULE_BYTES: Final = 512
PAGE_BYTES: Final = 2 << 20

# Limits on what a file may ask of this process. The largest of the recorded traces has 0.5 MiB of
# JSON, 36,000 events and 4 GiB of live blocks.
MAX_JSON_BYTES: Final = 32 << 20
MAX_GRAPHS: Final = 65_536
MAX_EVENTS: Final = 1_000_000
MAX_STREAMS: Final = 1024  # for each the pool keeps what it may take of every other one's
MAX_LIVE_BYTES: Final = 1 << 40
MAX_NUMBER: Final = (1 << 63) - 1  # ids, streams and keys
MAX_NAME_CHARACTERS: Final = 200

STANDARD_INPUT: Final = "-"


class TraceError(ValueError):
    """A trace that cannot be used.

    Attributes:
        path (str): the file.
        where (str): the place in it, for instance ``graphs[3].events[17]``.
        what (str): what is wrong there.
    """

    def __init__(self, path: str, where: str, what: str) -> None:
        printable = path if path and path.isprintable() else repr(path)
        super().__init__(f"{printable}: {where}: {what}")
        self.path = path
        self.where = where
        self.what = what


class Event(NamedTuple):
    """One allocation, or with ``bytes == 0`` the free of a block."""

    block: int
    bytes: int
    stream: int


@dataclass(frozen=True, slots=True)
class Graph:
    """What one capture allocated and freed. ``key`` is its batch size or length."""

    key: int
    events: list[Event]


@dataclass(frozen=True, slots=True)
class Trace:
    """The captures of one workload, in the order in which they were recorded."""

    path: str
    name: str
    stock_reserved_bytes: int
    graphs: list[Graph]


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Reads a recorded capture.

    Args:
        path: the file, JSON or gzip of it; ``-``: standard input.

    Raises:
        TraceError: if the file cannot be read, or is not a trace from its first to its last byte.
    """
    name = os.fspath(path)
    document = _parse(name, _read(name))
    return _Reader(name).trace(document)


def replay_sequence(trace: Trace, order: Order, seed: int = 0) -> list[Graph]:
    """The graphs of a trace in another order.

    Keys are sorted stably. In another order than the recorded one a free that stands in another
    graph than its allocation happens at the start of the graph after its own; it never happens if
    its own is the last.

    Args:
        trace: what :func:`read_trace` returned.
        order: ``"recorded"``, ``"asc"`` or ``"desc"`` by key, or ``"shuffled"``.
        seed: of the shuffle.
    """
    count = len(trace.graphs)
    places = list(range(count))
    if order == "asc":
        places.sort(key=lambda place: trace.graphs[place].key)
    elif order == "desc":
        places.sort(key=lambda place: -trace.graphs[place].key)
    elif order == "shuffled":
        random.Random(seed).shuffle(places)
    if places == list(range(count)):
        return trace.graphs

    born = {
        event.block: place
        for place, graph in enumerate(trace.graphs)
        for event in graph.events
        if event.bytes
    }
    position = {place: index for index, place in enumerate(places)}
    late_frees: list[list[Event]] = [[] for _ in range(count + 1)]
    own_events: list[list[Event]] = [[] for _ in range(count)]
    for place, graph in enumerate(trace.graphs):
        for event in graph.events:
            home = born[event.block]
            if home == place:
                own_events[position[place]].append(event)
            else:
                late_frees[position[home] + 1].append(event)
    return [
        Graph(trace.graphs[place].key, late_frees[index] + own_events[index])
        for index, place in enumerate(places)
    ]


def minimum_bytes(graphs: list[Graph]) -> int:
    """The least that any allocator with stable addresses can reserve for a sequence of graphs.

    That is the largest sum of live blocks at any moment, each rounded up to a granule, rounded up
    to a page.
    """
    return whole_pages(most_live_bytes(e for graph in graphs for e in graph.events))


def most_live_bytes(events: Iterable[Event]) -> int:
    """The largest sum at any moment of the blocks that they allocate, each rounded up to a granule.
    Frees of others are left out.
    """
    sizes: dict[int, int] = {}
    live = peak = 0
    for event in events:
        if event.bytes:
            sizes[event.block] = _round_up(event.bytes, GRANULE_BYTES)
            live += sizes[event.block]
            peak = max(peak, live)
        else:
            live -= sizes.pop(event.block, 0)
    return peak


def whole_pages(size: int) -> int:
    """Rounded up to a page."""
    return _round_up(size, PAGE_BYTES)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _read(path: str) -> bytes:
    """The file's JSON. No more than the limit is ever held, of it and of what is compressed."""
    too_long = f"the file goes on; a trace may hold {MAX_JSON_BYTES >> 20} MiB of JSON"
    try:
        with sys.stdin.buffer if path == STANDARD_INPUT else open(path, "rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise TraceError(path, "file", f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the name
        raise TraceError(path, "file", f"cannot be read: {error}") from None
    if not data:
        raise TraceError(path, "byte 0", "the file is empty")
    if len(data) > MAX_JSON_BYTES:
        raise TraceError(path, f"byte {MAX_JSON_BYTES}", too_long)
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as compressed:
            text = compressed.read(MAX_JSON_BYTES + 1)
    except EOFError:
        where = f"byte {len(data)}"
        raise TraceError(path, where, "gzip ends early: the file is truncated") from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(path, "file", f"gzip is damaged: {error}") from None
    if len(text) > MAX_JSON_BYTES:
        raise TraceError(path, f"byte {MAX_JSON_BYTES} after decompression", too_long)
    if not text:
        raise TraceError(path, "byte 0 after decompression", "the file is empty")
    return text


def _parse(path: str, data: bytes) -> object:
    def refuse_constant(name: str) -> NoReturn:
        raise TraceError(path, "file", f"{name} stands in it, which is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise TraceError(path, "file", f"an object has the key {_show(key)} twice")
            result[key] = value
        return result

    try:
        return json.loads(data.decode(), parse_constant=refuse_constant, object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise TraceError(path, f"byte {error.start}", "not UTF-8: not a trace") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise TraceError(path, where, f"not JSON: {error.msg}") from None
    except RecursionError:
        raise TraceError(path, "file", "not a trace: JSON nested too deeply") from None
    except TraceError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise TraceError(path, "file", f"not a trace: {error}") from None


class _Reader:
    """Checks a parsed document, piece by piece, and turns it into a :class:`Trace`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._live: dict[int, int] = {}
        self._freed: set[int] = set()
        self._live_bytes = 0
        self._events = 0
        self._streams: set[int] = set()

    def trace(self, document: object) -> Trace:
        top = self._object(document, "file")
        name = self._string(self._member(top, "name", "file"), "name")
        if not name or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
            self._fail("name", f"must be 1 to {MAX_NAME_CHARACTERS} printable characters")
        for key in ("torch", "gpu"):
            if key in top:
                self._string(top[key], key)
        stock = self._stock(self._member(top, "stock", "file"))
        graphs = self._array(self._member(top, "graphs", "file"), "graphs")
        if not 0 < len(graphs) <= MAX_GRAPHS:
            self._fail("graphs", f"holds {len(graphs)} graphs; 1 to {MAX_GRAPHS} can be replayed")
        result = [self._graph(graph, f"graphs[{index}]") for index, graph in enumerate(graphs)]
        if not self._live and not self._freed:
            self._fail("graphs", "no graph allocates anything: there is nothing to replay")
        return Trace(self._path, name, stock, result)

    def _stock(self, value: object) -> int:
        stock = self._object(value, "stock")
        for key in ("used", "peak_live", "live_at_end"):
            if key in stock:
                self._integer(stock[key], f"stock.{key}", 0, MAX_NUMBER)
        if "conf" in stock:
            self._string(stock["conf"], "stock.conf")
        seconds = stock.get("capture_s", 0)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            self._fail("stock.capture_s", f"must be a number, is {_show(seconds)}")
        if not 0 <= seconds <= sys.float_info.max:
            self._fail("stock.capture_s", f"must be a time in seconds, is {_show(seconds)}")
        return self._integer(
            self._member(stock, "reserved", "stock"), "stock.reserved", 0, MAX_NUMBER
        )

    def _graph(self, value: object, where: str) -> Graph:
        graph = self._object(value, where)
        key = self._integer(self._member(graph, "key", where), f"{where}.key", 0, MAX_NUMBER)
        events = self._array(self._member(graph, "events", where), f"{where}.events")
        self._events += len(events)
        if self._events > MAX_EVENTS:
            self._fail(f"{where}.events", f"more than {MAX_EVENTS} events in one trace")
        return Graph(
            key, [self._event(event, f"{where}.events[{i}]") for i, event in enumerate(events)]
        )

    def _event(self, value: object, where: str) -> Event:
        event = self._array(value, where)
        kind = event[0] if event else None
        if type(kind) is int and kind == 1 and len(event) == 4:
            return self._allocation(event, where)
        if type(kind) is int and kind == -1 and len(event) == 2:
            return self._free(event, where)
        self._fail(where, f"must be [1, id, bytes, stream] or [-1, id], is {_show(event)}")

    def _allocation(self, event: list[object], where: str) -> Event:
        block = self._integer(event[1], f"{where} id", 0, MAX_NUMBER)
        size = self._integer(event[2], f"{where} bytes", 1, MAX_LIVE_BYTES)
        stream = self._integer(event[3], f"{where} stream", 0, MAX_NUMBER)
        self._streams.add(stream)
        if len(self._streams) > MAX_STREAMS:
            self._fail(where, f"more than {MAX_STREAMS} streams in one trace")
        if block in self._live or block in self._freed:
            self._fail(where, f"block {block} is allocated a second time")
        self._live[block] = size
        self._live_bytes += size
        if self._live_bytes > MAX_LIVE_BYTES:
            self._fail(
                where,
                f"{self._live_bytes} bytes are live; at most {MAX_LIVE_BYTES} can be replayed",
            )
        return Event(block, size, stream)

    def _free(self, event: list[object], where: str) -> Event:
        block = self._integer(event[1], f"{where} id", 0, MAX_NUMBER)
        if block in self._freed:
            self._fail(where, f"block {block} is freed a second time")
        if block not in self._live:
            self._fail(where, f"block {block} is freed, but was never allocated")
        self._live_bytes -= self._live.pop(block)
        self._freed.add(block)
        return Event(block, 0, 0)

    def _member(self, value: dict[str, Any], key: str, where: str) -> object:
        if key not in value:
            self._fail(where, f'has no "{key}": not a trace')
        return value[key]

    def _object(self, value: object, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._fail(where, f"must be an object, is {_show(value)}")
        return value

    def _array(self, value: object, where: str) -> list[object]:
        if not isinstance(value, list):
            self._fail(where, f"must be an array, is {_show(value)}")
        return value

    def _string(self, value: object, where: str) -> str:
        if not isinstance(value, str):
            self._fail(where, f"must be a string, is {_show(value)}")
        return value

    def _integer(self, value: object, where: str, least: int, most: int) -> int:
        if type(value) is not int:  # true and false are integers to isinstance()
            self._fail(where, f"must be an integer, is {_show(value)}")
        if not least <= value <= most:
            self._fail(where, f"must be {least} to {most}, is {_show(value)}")
        return value

    def _fail(self, where: str, what: str) -> NoReturn:
        raise TraceError(self._path, where, what)


def _show(value: object) -> str:
    """A value as JSON, short and on one line."""
    if isinstance(value, dict):
        return f"an object of {len(value)} members"
    if isinstance(value, list) and (
        len(value) > 8 or any(isinstance(item, list | dict) for item in value)
    ):
        return f"an array of {len(value)} values"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
