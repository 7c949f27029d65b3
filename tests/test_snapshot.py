"""What ``torch.cuda.memory._dump_snapshot()`` has written, read as traces."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_trace import SNAPSHOT, WriteTrace

from cudagraph_pool.cli.main import main
from cudagraph_pool.tools.snapshot import read_traces
from cudagraph_pool.tools.trace import Event, TraceError

Write = Callable[[object], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(snapshot: object) -> Path:
        path = tmp_path / "snapshot.pickle"
        path.write_bytes(pickle.dumps(snapshot))
        return path

    return write


def test_a_trace_of_each_graph_pool(write: Write) -> None:
    """What the history lacks, since it began later, comes first."""
    (trace,) = read_traces(write(SNAPSHOT))
    assert (trace.name, trace.stock_reserved_bytes) == ("cuda:0 (0, 3)", 20 << 20)
    assert trace.graphs[0].events == [
        *(Event(-1, 1024, 0), Event(0, 512, 0), Event(0, 0, 0), Event(2, 3 << 20, 1))
    ]
    assert not trace.is_marked


def test_report_says_what_would_be_saved(
    write: Write, write_trace: WriteTrace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(write(SNAPSHOT)), str(write_trace())]) == 0
    out = capsys.readouterr().out
    assert "cuda:0 (0, 3): its graphs in 4 MiB instead of 20 MiB: 16 MiB saved, 5.0 times" in out
    (row,) = (line for line in out.splitlines() if line.startswith("cuda:0 (0, 3)  "))
    assert row.split()[3:9] == ["recorded", "-", "4", "4", "1.000", "20"]
    assert "all 2 pools: 8 MiB instead of 24 MiB: 16 MiB saved" in out


def changed(*keys: Any, value: Any) -> dict[str, Any]:
    """The snapshot with another value at a place."""
    snapshot: Any = copy.deepcopy(SNAPSHOT)
    inner = snapshot
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return dict(snapshot)


@pytest.mark.parametrize(
    ("snapshot", "said"),
    [
        ([], "not a memory snapshot: TypeError"),
        ({}, "KeyError: 'segments'"),
        (Path("x"), "it holds a pathlib.PosixPath, as no snapshot does"),
        (changed("segments", value=[]), "there is no graph pool in it: dump it while"),
        (changed("segments", 0, value=7), "not a memory snapshot: TypeError"),
        (changed("segments", 0, "segment_pool_id", value=(1,)), "ValueError: not enough values"),
        (changed("segments", 0, "blocks", 1, "size", value=1.0), "TypeError: 'float' object"),
        (changed("segments", 0, "total_size", value=1 << 60), "a size of 1152921504606846976"),
        (changed("device_traces", value=[[]]), "it has no history of a graph pool: call torch."),
        (changed("device_traces", 0, 1, "size", value=-1), "a size of -1, where 1 to"),
        (changed("device_traces", 0, 1, value=[b"x"]), "not a memory snapshot: TypeError"),
    ],
    ids=str,
)
def test_what_is_refused(write: Write, snapshot: object, said: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_traces(write(snapshot))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_in_a_pickle_is_run(tmp_path: Path) -> None:
    path = tmp_path / "evil.pickle"
    path.write_bytes(b"\x80\x04cos\nsystem\n(S'touch evil'\ntR.")
    with pytest.raises(TraceError, match=r"it holds a \w+\.system"):
        read_traces(path)
