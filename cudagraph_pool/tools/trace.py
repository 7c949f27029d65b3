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
from collections.abc import Iterable, Mapping
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
PICKLED: Final = b"\x80"  # what a file begins with that pickle has written


class TraceError(ValueError):
    """A trace that cannot be used.

    Attributes:
        path (str): the file.
        where (str): the place in it, for instance ``graphs[3].events[17]``; empty: all of it.
        what (str): what is wrong there.
    """

    def __init__(self, path: str, where: str, what: str) -> None:
        name = path if path and path.isprintable() else repr(path)
        name = "standard input" if path == STANDARD_INPUT else name
        super().__init__(": ".join(filter(None, (name, where, what))))
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
    """What one capture allocated and freed.

    Attributes:
        key: Its batch size or length.
        stock_bytes: What PyTorch's own allocator held for the pool afterwards, if that is known.
    """

    key: int
    events: list[Event]
    stock_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """The captures of one workload, in the order in which they were recorded.

    Attributes:
        is_marked: Whether it is known where one graph ends and the next begins. Else one stands for
            all.
        source: The torch and the GPU that it was recorded on, where it says so.
    """

    path: str
    name: str
    stock_reserved_bytes: int
    graphs: list[Graph]
    is_marked: bool = True
    source: str = ""


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Reads a recorded capture.

    Args:
        path: the file, JSON or gzip of it; ``-``: standard input.

    Raises:
        TraceError: if the file cannot be read, or is not a trace from its first to its last byte.
    """
    name = os.fspath(path)
    return parse_trace(name, read_bytes(name, MAX_JSON_BYTES))


def parse_trace(path: str, data: bytes) -> Trace:
    """The trace that a file holds; raises TraceError likewise."""
    try:
        return _trace(path, _parse(_text(data)))
    except FormatError as wrong:
        raise TraceError(path, *wrong.args) from None


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
    recorded = list(range(len(trace.graphs)))
    if order == "shuffled":
        places = recorded.copy()
        random.Random(seed).shuffle(places)
    else:
        sign = {"recorded": 0, "asc": 1, "desc": -1}[order]
        places = sorted(recorded, key=lambda place: sign * trace.graphs[place].key)
    if places == recorded:
        return trace.graphs

    born = {e.block: place for place in recorded for e in trace.graphs[place].events if e.bytes}
    position = {place: index for index, place in enumerate(places)}
    late_frees: list[list[Event]] = [[] for _ in range(len(places) + 1)]
    own_events: list[list[Event]] = [[] for _ in places]
    for place, graph in enumerate(trace.graphs):
        for event in graph.events:
            home = position[born[event.block]]
            is_own = home == position[place]
            (own_events[home] if is_own else late_frees[home + 1]).append(event)
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
            sizes[event.block] = round_up(event.bytes, GRANULE_BYTES)
            live += sizes[event.block]
            peak = max(peak, live)
        else:
            live -= sizes.pop(event.block, 0)
    return peak


def whole_pages(size: int) -> int:
    """Rounded up to a page."""
    return round_up(size, PAGE_BYTES)


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class FormatError(Exception):
    """A place in a file, and what is wrong there."""


def read_bytes(path: str, most: int) -> bytes:
    """A file, or standard input, and no more of it than ``most`` bytes and one."""
    try:
        with sys.stdin.buffer if path == STANDARD_INPUT else open(path, "rb") as file:
            data: bytes = file.read(most + 1)
    except (OSError, ValueError) as error:  # of a NUL in the name
        why = getattr(error, "strerror", None) or error
        raise TraceError(path, "", f"cannot be read: {why}") from None
    if not data:
        raise TraceError(path, "", "the file is empty")
    return data


def _text(data: bytes) -> bytes:
    """The file's JSON. No more than the limit is ever held, of it and of what is compressed."""
    too_long = f"the file goes on; a trace may hold {MAX_JSON_BYTES >> 20} MiB of JSON"
    if len(data) > MAX_JSON_BYTES:
        raise FormatError(f"byte {MAX_JSON_BYTES}", too_long)
    if data.startswith(PICKLED):
        what = "a pickle, as torch.cuda.memory._dump_snapshot() writes it: report reads these"
        raise FormatError("", what)
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as compressed:
            text = compressed.read(MAX_JSON_BYTES + 1)
    except EOFError:
        raise FormatError(f"byte {len(data)}", "gzip ends early: the file is truncated") from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise FormatError("", f"gzip is damaged: {error}") from None
    if len(text) > MAX_JSON_BYTES:
        raise FormatError(f"byte {MAX_JSON_BYTES} after decompression", too_long)
    return text


def _parse(data: bytes) -> object:
    def refuse_constant(name: str) -> NoReturn:
        raise FormatError("", f"{name} stands in it, which is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise FormatError("", f"an object has the key {_show(key)} twice")
            result[key] = value
        return result

    try:
        return json.loads(data.decode(), parse_constant=refuse_constant, object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise FormatError(f"byte {error.start}", "not UTF-8: not a trace") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise FormatError(where, f"not JSON: {error.msg}") from None
    except RecursionError:
        raise FormatError("", "not a trace: JSON nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise FormatError("", f"not a trace: {error}") from None


# What objects hold: by key a type, or which integers. A key that ends in ? may be absent.
Bounds = range
Fields = Mapping[str, "type | Bounds"]
NUMBERS: Final = range(MAX_NUMBER + 1)
_TRACE: Final[Fields] = {"name": str, "torch?": str, "gpu?": str, "stock": dict, "graphs": list}
_STOCK: Final[Fields] = {
    **dict.fromkeys(("used?", "peak_live?", "live_at_end?"), NUMBERS),
    "conf?": str,
    "capture_s?": float,
    "reserved": NUMBERS,
}
_GRAPH: Final[Fields] = {"key": NUMBERS, "stock?": NUMBERS, "events": list}
_ALLOCATION: Final[Fields] = {
    "id": NUMBERS,
    "bytes": range(1, MAX_LIVE_BYTES + 1),
    "stream": NUMBERS,
}


def _trace(path: str, document: object) -> Trace:
    """Checks a document and makes a :class:`Trace` of it."""
    top = members(document, _TRACE, "")
    name, documents = top["name"], top["graphs"]
    if not name or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise FormatError("name", f"must be 1 to {MAX_NAME_CHARACTERS} printable characters")
    reserved = members(top["stock"], _STOCK, "stock")["reserved"]
    if not 0 < len(documents) <= MAX_GRAPHS:
        raise FormatError(
            "graphs", f"holds {len(documents)} graphs; 1 to {MAX_GRAPHS} can be replayed"
        )
    blocks = _Blocks()
    graphs = [_graph(graph, f"graphs[{n}]", blocks) for n, graph in enumerate(documents)]
    if not blocks.sizes:
        raise FormatError("graphs", "no graph allocates anything: there is nothing to replay")
    source = ", ".join(top[key] for key in ("torch", "gpu") if key in top)
    return Trace(path, name, reserved, graphs, source=source)


def _graph(document: object, where: str, blocks: _Blocks) -> Graph:
    graph = members(document, _GRAPH, where)
    blocks.events += len(graph["events"])
    if blocks.events > MAX_EVENTS:
        raise FormatError(f"{where}.events", f"more than {MAX_EVENTS} events in one trace")
    events = []
    for number, event in enumerate(graph["events"]):
        try:
            events.append(blocks.read(event))
        except FormatError as wrong:
            place, what = wrong.args
            raise FormatError(f"{where}.events[{number}]{place}", what) from None
    return Graph(graph["key"], events, graph.get("stock"))


class _Blocks:
    """What was allocated so far, as the events are read.

    Attributes:
        sizes: Of all blocks; of one that was freed 0.
    """

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.events = 0
        self._live_bytes = 0
        self._streams: set[int] = set()

    def read(self, value: object) -> Event:
        event = checked(value, list, "")
        kind = event[0] if event and type(event[0]) is int else 0
        if (kind, len(event)) == (1, 4):
            parts = zip(_ALLOCATION.items(), event[1:], strict=True)
            return self._allocation(*(checked(x, bounds, f" {key}") for (key, bounds), x in parts))
        if (kind, len(event)) == (-1, 2):
            return self._free(checked(event[1], NUMBERS, " id"))
        raise FormatError("", f"must be [1, id, bytes, stream] or [-1, id], is {_show(event)}")

    def _allocation(self, block: int, size: int, stream: int) -> Event:
        self._streams.add(stream)
        if len(self._streams) > MAX_STREAMS:
            raise FormatError("", f"more than {MAX_STREAMS} streams in one trace")
        if block in self.sizes:
            raise FormatError("", f"block {block} is allocated a second time")
        self.sizes[block] = size
        self._live_bytes += size
        if self._live_bytes > MAX_LIVE_BYTES:
            most = f"at most {MAX_LIVE_BYTES} can be replayed"
            raise FormatError("", f"{self._live_bytes} bytes are live; {most}")
        return Event(block, size, stream)

    def _free(self, block: int) -> Event:
        if block not in self.sizes:
            raise FormatError("", f"block {block} is freed, but was never allocated")
        if not self.sizes[block]:
            raise FormatError("", f"block {block} is freed a second time")
        self._live_bytes -= self.sizes[block]
        self.sizes[block] = 0
        return Event(block, 0, 0)


_KINDS: Final = {
    dict: "an object",
    float: "a number",
    list: "an array",
    str: "a string",
    tuple: "a tuple",
}


def members(value: object, fields: Fields, where: str) -> dict[str, Any]:
    """An object, whose members are checked."""
    parent: dict[str, Any] = checked(value, dict, where)
    for field, kind in fields.items():
        key = field.removesuffix("?")
        if key in parent:
            checked(parent[key], kind, f"{where}.{key}".lstrip("."))
        elif key == field:
            raise FormatError(where, f'has no "{key}": not a trace')
    return parent


def checked(value: Any, kind: type | Bounds, where: str) -> Any:
    """The value, if it is what may stand there; true and false are no integers."""
    what = "an integer" if isinstance(kind, Bounds) else _KINDS[kind]
    kinds = (int,) if isinstance(kind, Bounds) else (int, float) if kind is float else (kind,)
    if type(value) not in kinds:
        raise FormatError(where, f"must be {what}, is {_show(value)}")
    if isinstance(kind, Bounds) and value not in kind:
        raise FormatError(where, f"must be {kind[0]} to {kind[-1]}, is {_show(value)}")
    if kind is float and not 0 <= value <= sys.float_info.max:
        raise FormatError(where, f"must be a time in seconds, is {_show(value)}")
    return value


def _show(value: object) -> str:
    """A value as JSON, short and on one line."""
    if isinstance(value, dict):
        return f"an object of {len(value)} members"
    if isinstance(value, list) and (
        len(value) > 8 or any(isinstance(item, list | dict) for item in value)
    ):
        return f"an array of {len(value)} values"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):  # what a pickle may hold
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
