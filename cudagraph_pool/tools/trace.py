"""Recorded captures, as docs/trace_format.md has them, and in which order they are replayed.

Traces come from elsewhere, so nothing in them is trusted: whatever does not fit ends in a
:class:`TraceError` that says which file, where in it, and what is wrong.
"""

import contextlib
import gzip
import io
import json
import os
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, Final, Literal, NamedTuple, get_args

try:
    from tqdm import tqdm
except ImportError:  # by a build's Python, which reads traces too
    tqdm = None

Order = Literal["recorded", "asc", "desc", "shuffled"]
ORDERS: Final = get_args(Order)

GRANULE_BYTES: Final = 512
PAGE_BYTES: Final = 2 << 20

# Limits on what a file may ask of this process. The largest recorded one has 36,000 events.
MAX_JSON_BYTES: Final = 32 << 20
MAX_GRAPHS: Final = 65_536
MAX_EVENTS: Final = 1_000_000
MAX_STREAMS: Final = 1024  # for each the pool keeps what it may take of every other one's
MAX_LIVE_BYTES: Final = 1 << 40
MAX_NUMBER: Final = (1 << 63) - 1  # ids, streams and keys
MAX_NAME_CHARACTERS: Final = 200

PICKLED: Final = b"\x80"  # what a file begins with that pickle has written


class TraceError(ValueError):
    """A trace that cannot be used: ``what`` is wrong at a place, as ``graphs[3].events[17]``."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(where, what)
        self.path, self.where, self.what = "", where, what

    def __str__(self) -> str:
        name = self.path if self.path and self.path.isprintable() else repr(self.path)
        return ": ".join(filter(None, (name, self.where, self.what)))


@contextlib.contextmanager
def errors_of(path: str) -> Iterator[None]:
    """Puts the file's name into a TraceError."""
    try:
        yield
    except TraceError as error:
        error.path = path
        raise


class Event(NamedTuple):
    """One allocation, or with ``bytes == 0`` the free of a block."""

    block: int
    bytes: int
    stream: int


@dataclass(frozen=True, slots=True)
class Graph:
    """What one capture allocated and freed."""

    key: int  # its batch size or length
    events: list[Event]
    stock_bytes: int | None = None  # what stock held for the pool afterwards, if that is known


@dataclass(frozen=True, slots=True)
class Trace:
    """The captures of one workload, in the order in which they were recorded."""

    path: str
    name: str
    stock_reserved_bytes: int
    graphs: list[Graph]
    is_marked: bool = True  # or one graph stands for all: where each ends is not known
    source: str = ""  # the torch and the GPU that it was recorded on, where it says so


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Reads a recorded capture: JSON, or gzip of it. Raises TraceError."""
    name = os.fspath(path)
    with errors_of(name):
        return parse_trace(name, read_bytes(name, MAX_JSON_BYTES))


def replay_sequence(trace: Trace, order: Order, seed: int = 0) -> list[Graph]:
    """The graphs of a trace in another order.

    Keys are sorted stably. Then a free that stands in another graph than its allocation happens at
    the start of the graph after its own; it never happens if its own is the last.
    """
    graphs = trace.graphs
    places = list(range(len(graphs)))
    if order == "shuffled":
        random.Random(seed).shuffle(places)
    elif order != "recorded":
        places.sort(key=lambda place: graphs[place].key * (1 if order == "asc" else -1))
    if places == sorted(places):
        return graphs

    late: list[list[Event]] = [[] for _ in graphs]  # frees after each
    own: list[list[Event]] = [[] for _ in graphs]
    born: dict[int, int] = {}  # by block
    for place, graph in enumerate(graphs):
        for event in graph.events:
            home = born.setdefault(event.block, place)
            (own if home == place else late)[home].append(event)
    before = [[], *(late[place] for place in places)]
    return [Graph(graphs[p].key, frees + own[p]) for p, frees in zip(places, before, strict=False)]


def minimum_bytes(graphs: list[Graph]) -> int:
    """What any allocator with stable addresses reserves at least: what lives at most, in pages."""
    return whole_pages(most_live_bytes(event for graph in graphs for event in graph.events))


def most_live_bytes(events: Iterable[Event]) -> int:
    """The largest sum at any moment of the blocks that they allocate, in granules."""
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
    return round_up(size, PAGE_BYTES)


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def read_bytes(path: str, most: int) -> bytes:
    """A file, and no more of it than ``most`` bytes and one."""
    try:
        with open(path, "rb") as file:
            data: bytes = file.read(most + 1)
    except (OSError, ValueError) as error:  # of a NUL in the name
        why = getattr(error, "strerror", None) or error
        raise TraceError("", f"cannot be read: {why}") from None
    if not data:
        raise TraceError("", "the file is empty")
    return data


def parse_trace(path: str, data: bytes) -> Trace:
    """Raises TraceError without the file's name. Of its JSON no more than the limit is held."""
    if data.startswith(PICKLED):
        what = "a pickle, as torch.cuda.memory._dump_snapshot() writes it: report reads these"
        raise TraceError("", what)
    try:
        if data.startswith(b"\x1f\x8b") and len(data) <= MAX_JSON_BYTES:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as compressed:
                data = compressed.read(MAX_JSON_BYTES + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise TraceError("", f"gzip is damaged: {error}") from None
    if len(data) > MAX_JSON_BYTES:
        what = f"the file goes on; a trace may hold {MAX_JSON_BYTES >> 20} MiB of JSON"
        raise TraceError("", what)
    try:
        document = json.loads(data.decode())
    except RecursionError:
        raise TraceError("", "not a trace: JSON nested too deeply") from None
    except ValueError as error:
        raise TraceError("", f"not JSON: {error}") from None
    return _trace(path, document)


# What objects hold: by key a type, or which integers. A key that ends in ? may be absent.
Fields = Mapping[str, type | range]
NUMBERS: Final = range(MAX_NUMBER + 1)
SIZES: Final = range(1, MAX_LIVE_BYTES + 1)
_TRACE: Final[Fields] = {"name": str, "torch?": str, "gpu?": str, "stock": dict, "graphs": list}
_GRAPH: Final[Fields] = {"key": NUMBERS, "stock?": NUMBERS, "events": list}


def _trace(path: str, document: object) -> Trace:
    top = _members(document, _TRACE, "")
    name, documents = top["name"], top["graphs"]
    if not name or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise TraceError("name", f"must be 1 to {MAX_NAME_CHARACTERS} printable characters")
    reserved = _members(top["stock"], {"reserved": NUMBERS}, "stock")["reserved"]
    if not 0 < len(documents) <= MAX_GRAPHS:
        what = f"holds {len(documents)} graphs; 1 to {MAX_GRAPHS} can be replayed"
        raise TraceError("graphs", what)
    blocks = _Blocks()
    if tqdm is not None:
        documents = tqdm(documents, "reading", unit="graph", delay=1, leave=False, disable=None)
    graphs = [_graph(graph, f"graphs[{n}]", blocks) for n, graph in enumerate(documents)]
    if not blocks.sizes:
        raise TraceError("graphs", "no graph allocates anything: there is nothing to replay")
    source = ", ".join(top[key] for key in ("torch", "gpu") if key in top)
    return Trace(path, name, reserved, graphs, source=source)


def _graph(document: object, where: str, blocks: "_Blocks") -> Graph:
    graph = _members(document, _GRAPH, where)
    blocks.events += len(graph["events"])
    if blocks.events > MAX_EVENTS:
        raise TraceError(f"{where}.events", f"more than {MAX_EVENTS} events in one trace")
    events = []
    for number, event in enumerate(graph["events"]):
        try:
            events.append(blocks.read(event))
        except TraceError as error:
            raise TraceError(f"{where}.events[{number}]", error.what) from None
    return Graph(graph["key"], events, graph.get("stock"))


class _Blocks:
    """What was allocated so far, as the events are read."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}  # of all blocks; of one that was freed 0
        self.events = 0
        self._live_bytes = 0
        self._streams: set[int] = set()

    def read(self, event: Any) -> Event:
        are_numbers = isinstance(event, list) and {int}.issuperset(map(type, event))
        match event if are_numbers else None:
            case [1, block, size, stream] if (
                block in NUMBERS and size in SIZES and stream in NUMBERS
            ):
                self._streams.add(stream)
                if len(self._streams) > MAX_STREAMS:
                    raise TraceError("", f"more than {MAX_STREAMS} streams in one trace")
                if block in self.sizes:
                    raise TraceError("", f"block {block} is allocated a second time")
                self.sizes[block] = size
                self._live_bytes += size
                if self._live_bytes > MAX_LIVE_BYTES:
                    most = f"at most {MAX_LIVE_BYTES} can be replayed"
                    raise TraceError("", f"{self._live_bytes} bytes are live; {most}")
                return Event(block, size, stream)
            case [-1, block] if self.sizes.get(block):
                self._live_bytes -= self.sizes[block]
                self.sizes[block] = 0
                return Event(block, 0, 0)
            case [-1, block]:
                why = "freed a second time" if block in self.sizes else "freed, but never allocated"
                raise TraceError("", f"block {block} is {why}")
        raise TraceError("", f"must be [1, id, bytes, stream] or [-1, id], is {short(event)}")


_KINDS: Final = {dict: "an object", list: "an array", str: "a string", int: "an integer"}


def _members(value: object, fields: Fields, where: str) -> dict[str, Any]:
    parent: dict[str, Any] = _checked(value, dict, where)
    for field, kind in fields.items():
        key = field.removesuffix("?")
        if key in parent:
            _checked(parent[key], kind, f"{where}.{key}".lstrip("."))
        elif key == field:
            raise TraceError(where, f'has no "{key}": not a trace')
    return parent


def _checked(value: Any, kind: type | range, where: str) -> Any:
    """The value, if it is what may stand there; true and false are no integers."""
    expected = int if isinstance(kind, range) else kind
    if type(value) is not expected:
        raise TraceError(where, f"must be {_KINDS[expected]}, is {short(value)}")
    if isinstance(kind, range) and value not in kind:
        raise TraceError(where, f"must be {kind[0]} to {kind[-1]}, is {short(value)}")
    return value
