"""The reader of recorded captures: what it takes, what it refuses and in which words."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import pickle
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies
from small_trace import SNAPSHOT, TRACES, WriteTrace, small_trace
from tqdm import tqdm

from cudagraph_pool.tools import trace as _trace
from cudagraph_pool.tools.snapshot import read_traces
from cudagraph_pool.tools.trace import (
    Event,
    Graph,
    Trace,
    TraceError,
    minimum_bytes,
    read_trace,
    replay_sequence,
)

PAGE = 2 << 20


def error_of(path: Path) -> TraceError:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    error = caught.value
    assert str(error) == ": ".join(filter(None, [str(path), error.where, error.what]))
    assert "\n" not in str(error)
    return error


def events_error(write_trace: WriteTrace, *events: Any) -> TraceError:
    """The error for a second graph of these events, after one that leaves block 7 live, 8 freed."""
    first = {"key": 1, "events": [[1, 7, 512, 0], [1, 8, 512, 0], [-1, 8]]}
    return error_of(write_trace(graphs=[first, {"key": 2, "events": list(events)}]))


def test_reads_plain_and_compressed_alike(tmp_path: Path, write_trace: WriteTrace) -> None:
    plain = write_trace()
    compressed = tmp_path / "any.name"
    compressed.write_bytes(gzip.compress(plain.read_bytes()))
    read = read_trace(plain)
    assert read == Trace(
        str(plain),
        "small",
        4 << 20,
        [
            Graph(2, [Event(0, 8, 0), Event(1, 3 << 20, 0), Event(1, 0, 0)]),
            Graph(3, [Event(0, 0, 0), Event(2, 1000, 7)]),
            Graph(1, [Event(3, 512, 0), Event(3, 0, 0), Event(2, 0, 0)]),
        ],
        source="2.11.0, none",
    )
    assert read_trace(compressed).graphs == read.graphs
    text = plain.read_bytes()  # of two members
    compressed.write_bytes(gzip.compress(text[:50]) + gzip.compress(text[50:]))
    assert read_trace(compressed).graphs == read.graphs


def test_what_may_be_left_out(write_trace: WriteTrace) -> None:
    graph = {"key": 1, "stock": 7, "events": [[1, 0, 8, 0]]}
    trace = read_trace(write_trace(graphs=[graph], recorder="later version"))
    assert (trace.graphs[0].stock_bytes, trace.source) == (7, "2.11.0, none")
    assert error_of(write_trace(graphs=[{**graph, "stock": -1}])).where == "graphs[0].stock"


# --- Files ---


@pytest.mark.parametrize("keep", [2, 9, 20, 1000, -9, -4, -1])
def test_truncated_gzip(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.gz"
    path.write_bytes(TRACES[0].read_bytes()[:keep])
    assert re.search("gzip is damaged: .* ended before", error_of(path).what)


def read_trace_bytes(folder: Path, data: bytes) -> Trace:
    path = folder / "bytes"
    path.write_bytes(data)
    return read_trace(path)


def test_name_that_no_file_can_have() -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace("a\0b")
    with pytest.raises(TraceError) as caught:
        read_trace("no such\nfile")
    assert "\n" not in str(caught.value)
    with pytest.raises(TraceError, match=r"^'': "):
        read_trace("")


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "empty"),
        (b"\xff\xfe{}", "not JSON: 'utf-8' codec can't decode byte 0xff in position 0"),
        (b"\x80\x04N.", "a pickle, as torch.cuda.memory._dump_snapshot() writes it"),
        (b'{"name": ', "not JSON: Expecting value: line 1 column 10"),
        (b"[" * 100_000, "nested too deeply"),
        (b"9" * 5000, "not JSON: Exceeds the limit"),
        (b"[]", "must be an object, is []"),
        (b'"' + b"a" * 500 + b'"', "must be an object"),
        (b"{}", 'has no "name"'),
    ],
)
def test_foreign_files(tmp_path: Path, data: bytes, what: str) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(data)
    error = error_of(path)
    assert error.where == ""
    assert what in error.what
    assert len(error.what) < 200


def test_size_limit_of_plain_and_compressed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps(small_trace()).encode()
    monkeypatch.setattr(_trace, "MAX_JSON_BYTES", len(text))
    assert read_trace_bytes(tmp_path, text)
    assert read_trace_bytes(tmp_path, gzip.compress(text))
    for data in (text + b" ", gzip.compress(text + b" ")):
        with pytest.raises(TraceError, match="the file goes on"):
            read_trace_bytes(tmp_path, data)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_how_far_a_file_is_read(
    write_trace: WriteTrace, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """Of what takes a second."""
    said = io.StringIO()
    monkeypatch.setattr(said, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(_trace, "tqdm", lambda *of, **how: tqdm(*of, **{**how, "delay": 0}))
    read_trace(write_trace())
    assert ("reading" in said.getvalue()) == is_terminal


def test_gzip_bomb_takes_no_memory(tmp_path: Path) -> None:
    """8 GiB of spaces in 8 MB are refused by a process that may hold 512 MiB."""
    member = gzip.compress(b" " * (64 << 20))
    path = tmp_path / "bomb.gz"
    path.write_bytes(member * 128)
    program = (
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({512 << 20}, {512 << 20}))\n"
        "from cudagraph_pool.cli.main import main\n"
        "sys.exit(main(['replay', sys.argv[1]]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "a trace may hold 32 MiB" in done.stderr
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


ALPHABET = b'0123456789-,[]{}":.eE truefalsnul\\\x00\xff\x80'
CHANGES = strategies.lists(
    strategies.tuples(
        strategies.integers(0, 400),
        strategies.integers(0, 5),
        strategies.lists(strategies.sampled_from(list(ALPHABET)), max_size=3),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("reader", [read_trace, read_traces])
@pytest.mark.parametrize("kind", ["json", "gzip", "pickle"])
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(changes=CHANGES)
def test_whatever_a_file_holds_it_is_read_or_refused(
    tmp_path: Path, changes: list[Any], kind: str, reader: Callable[[Path], object]
) -> None:
    text = json.dumps(small_trace()).encode()
    whole = {"json": text, "gzip": gzip.compress(text), "pickle": pickle.dumps(SNAPSHOT)}
    data = bytearray(whole[kind])
    for place, length, by in changes:
        data[place % len(data) : place % len(data) + length] = bytes(by)
    path = tmp_path / "bytes"
    path.write_bytes(data)
    with contextlib.suppress(TraceError):
        reader(path)


# --- Members ---


@pytest.mark.parametrize(
    ("changes", "where", "what"),
    [
        ({"name": 5}, "name", "must be a string, is 5"),
        ({"name": ""}, "name", "1 to 200"),
        ({"name": "a\x1b[2J"}, "name", "printable"),
        ({"torch": None}, "torch", "must be a string, is None"),
        ({"stock": None}, "stock", "must be an object, is None"),
        ({"stock": {}}, "stock", 'has no "reserved"'),
        ({"stock": {"reserved": True}}, "stock.reserved", "must be an integer, is True"),
        ({"stock": {"reserved": -1}}, "stock.reserved", "must be 0 to"),
        ({"graphs": {}}, "graphs", "must be an array, is {}"),
        ({"graphs": []}, "graphs", "holds 0 graphs"),
        ({"graphs": [7]}, "graphs[0]", "must be an object, is 7"),
        ({"graphs": [{"key": 1}]}, "graphs[0]", 'has no "events"'),
        ({"graphs": [{"key": False, "events": []}]}, "graphs[0].key", "must be an integer"),
        ({"graphs": [{"key": 1, "events": 3}]}, "graphs[0].events", "must be an array, is 3"),
        ({"graphs": [{"key": 1, "events": []}]}, "graphs", "nothing to replay"),
    ],
)
def test_wrong_members(
    write_trace: WriteTrace, changes: dict[str, Any], where: str, what: str
) -> None:
    error = error_of(write_trace(**changes))
    assert error.where == where
    assert what in error.what


@pytest.mark.parametrize(
    "event",
    [
        *(None, 1, {}, [], [1], [1, 9, 512], [1, 9, 512, 0, 0], [-1], [-1, 7, 0]),
        *([0, 9, 512, 0], [2, 9, 512, 0], [True, 9, 512, 0], [1.0, 9, 512, 0], ["1", 9, 512, 0]),
        *([[1], 9, 512, 0], [1, True, 512, 0], [1, 9, True, 0], [1, 9, 512, False]),
        *([1, 9.0, 512, 0], [1, 9, "512", 0], [1, 9, 512, None], [1, -9, 512, 0], [1, 9, 512, -1]),
        *([1, 1 << 63, 512, 0], [1, 9, 512, 1 << 63], [1, 9, 0, 0], [1, 9, -512, 0]),
        *([1, 9, (1 << 40) + 1, 0], [1, 9, 1 << 100, 0], [1, 9, 512.0, 0]),
        *([-1, True], [-1, 7.0], [-1, [7]], [-1.0, 7]),
    ],
)
def test_malformed_events(write_trace: WriteTrace, event: Any) -> None:
    error = events_error(write_trace, [1, 20, 512, 0], event)
    assert error.where.startswith("graphs[1].events[1]")


@pytest.mark.parametrize(
    ("events", "index", "what"),
    [
        ([[-1, 9]], 0, "block 9 is freed, but never allocated"),
        ([[-1, 8]], 0, "block 8 is freed a second time"),
        ([[-1, 7], [-1, 7]], 1, "block 7 is freed a second time"),
        ([[1, 7, 512, 0]], 0, "block 7 is allocated a second time"),
        ([[1, 8, 512, 0]], 0, "block 8 is allocated a second time"),
        ([[1, 9, 1 << 40, 0]], 0, "bytes are live"),
    ],
)
def test_impossible_sequences(
    write_trace: WriteTrace, events: list[Any], index: int, what: str
) -> None:
    error = events_error(write_trace, *events)
    assert error.where == f"graphs[1].events[{index}]"
    assert what in error.what


def test_limits_on_graphs_and_events(
    write_trace: WriteTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_trace()
    monkeypatch.setattr(_trace, "MAX_GRAPHS", 3)
    monkeypatch.setattr(_trace, "MAX_EVENTS", 8)
    read_trace(path)
    monkeypatch.setattr(_trace, "MAX_EVENTS", 7)
    assert "more than 7 events" in error_of(path).what
    assert error_of(path).where == "graphs[2].events"
    monkeypatch.setattr(_trace, "MAX_GRAPHS", 2)
    assert "holds 3 graphs; 1 to 2" in error_of(path).what


# A replay takes time and memory with the square of the streams: 8,000 took 9 s and 1.2 GB.
def test_a_limit_on_streams(write_trace: WriteTrace) -> None:
    events = [[1, stream, 512, stream] for stream in range(1025)]
    assert read_trace(write_trace(graphs=[{"key": 1, "events": events[:-1]}]))
    error = error_of(write_trace(graphs=[{"key": 1, "events": events}]))
    assert error.where == "graphs[0].events[1024]"
    assert error.what == "more than 1024 streams in one trace"


# --- Orders and the minimum ---


def trace_of(*graphs: tuple[int, list[Event]]) -> Trace:
    return Trace("file", "name", 0, [Graph(key, events) for key, events in graphs])


def alloc(block: int, size: int = 512) -> Event:
    return Event(block, size, 0)


def free(block: int) -> Event:
    return Event(block, 0, 0)


def test_sorting_is_stable() -> None:
    trace = trace_of(*[(key, [alloc(block)]) for block, key in enumerate([2, 1, 2, 1, 3])])

    def blocks(order: _trace.Order) -> list[int]:
        return [graph.events[0].block for graph in replay_sequence(trace, order)]

    assert blocks("asc") == [1, 3, 0, 2, 4]
    assert blocks("desc") == [4, 0, 2, 1, 3]


def test_late_frees_happen_at_the_start_of_the_graph_after_their_own() -> None:
    trace = trace_of(
        (1, [alloc(0), alloc(1)]),
        (2, [free(0), alloc(2), alloc(3), free(3)]),
        (3, [free(2), alloc(4), free(1)]),
    )
    assert replay_sequence(trace, "desc") == [
        Graph(3, [alloc(4)]),
        Graph(2, [alloc(2), alloc(3), free(3)]),
        Graph(1, [free(2), alloc(0), alloc(1)]),  # blocks 0 and 1 have no graph after them
    ]
    # asc is the recorded order here, so nothing moves.
    assert replay_sequence(trace, "asc") == trace.graphs


def test_minimum_counts_granules_and_rounds_up_to_a_page() -> None:
    def minimum(*events: Event) -> int:
        return minimum_bytes([Graph(1, list(events))])

    assert minimum(alloc(0, 1)) == PAGE
    assert minimum(alloc(0, PAGE)) == PAGE
    assert minimum(alloc(0, PAGE - 511), alloc(1, 1)) == 2 * PAGE
    assert minimum(alloc(0, PAGE - 512), alloc(1, 512)) == PAGE
    assert minimum(alloc(0, PAGE), free(0), alloc(1, PAGE)) == PAGE
    assert minimum(alloc(0, PAGE), free(0), alloc(1, 3 * PAGE), free(1), alloc(2, 1)) == 3 * PAGE
