"""``cudagraph-pool record``: what of a memory history becomes a trace, and who marks it.

Histories are made up of recorded captures, as PyTorch's own allocator would have left them;
``gpu/test_explains.py`` records real ones.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from entry_points import environment

from cudagraph_pool.cli import run
from cudagraph_pool.cli.main import main
from cudagraph_pool.tools import record as _record
from cudagraph_pool.tools.record import Capture, Recorder, traces_of
from cudagraph_pool.tools.trace import Event, Graph, read_trace

GIB = 1 << 30
ELSEWHERE = 7 * GIB  # eager memory


class History:
    """What torch keeps of one device: captures into pools, and eager work between them."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.captures: list[Capture] = []
        self._begun = 0
        self._next: dict[int, int] = {}

    def do(self, action: str, addr: int, size: int, stream: int = 0x7F00, text: str = "") -> None:
        entry = {"action": action, "addr": addr, "size": size, "stream": stream, "time_us": 1}
        self.entries.append({**entry, "user_metadata": text})

    def mark(self, text: str) -> None:
        self.do("snapshot", 0, 0, text=text)

    def begin(self) -> int:
        self._begun += 1
        self.mark(f"{_record._BEGIN} {self._begun}")
        return self._begun

    def end(self, number: int, pool: int, reserved: int = GIB, device: int = 0) -> None:
        self.mark(f"{_record._END} {number}")
        segment = (pool * GIB, (pool + 1) * GIB)
        self.captures.append(Capture(number, device, (0, pool), [segment], reserved))

    def allocate(self, pool: int, size: int, stream: int = 0x7F00) -> int:
        address = self._next.get(pool, pool * GIB)
        self._next[pool] = address + 512
        self.do("alloc", address, size, stream)
        return address

    def free(self, address: int) -> None:
        self.do("free_requested", address, 0)
        self.do("free_completed", address, 0)

    def eager(self) -> None:
        self.do("segment_alloc", ELSEWHERE, 2 << 20)
        self.do("alloc", ELSEWHERE, 999)
        self.free(ELSEWHERE)


def events(graphs: Iterable[Graph]) -> list[Event]:
    return [event for graph in graphs for event in graph.events]


def test_what_is_freed_between_captures_and_what_is_no_captures() -> None:
    history = History()
    warm_up = history.allocate(1, 100)  # of graph trees: eager work in the pool
    first = history.begin()
    kept = history.allocate(1, 700, 0x7F01)
    dropped = history.allocate(1, 1000, 0x7F02)
    history.free(dropped)
    history.end(first, 1)
    history.mark("somebody else's")
    history.free(kept)
    history.free(warm_up)
    second = history.begin()
    other = history.allocate(1, 10, 0x7F02)
    history.end(second, 1)
    history.free(other)
    (trace,) = traces_of([history.entries], reversed(history.captures))
    assert trace["graphs"] == [
        {"key": 2048, "stock": GIB, "events": [[1, 0, 700, 0], [1, 1, 1000, 1], [-1, 1]]},
        {"key": 512, "stock": GIB, "events": [[-1, 0], [1, 2, 10, 1]]},
    ]
    assert trace["stock"] == {"reserved": GIB}


def test_captures_of_two_threads_and_pools_at_once() -> None:
    history = History()
    history.begin()  # which nobody ends
    empty = history.begin()
    first, second = history.begin(), history.begin()
    a, b = history.allocate(1, 512), history.allocate(2, 1024)
    history.free(b)
    history.end(empty, 3)
    history.end(first, 1, reserved=10)
    history.free(a)
    history.end(second, 2, reserved=0)
    third = history.begin()
    history.end(third, 1, reserved=30)
    one, two = traces_of([history.entries], history.captures)
    assert one["graphs"] == [
        {"key": 512, "stock": 10, "events": [[1, 0, 512, 0]]},
        {"key": 0, "stock": 30, "events": [[-1, 0]]},
    ]
    assert two["graphs"] == [{"key": 1024, "events": [[1, 1, 1024, 0], [-1, 1]]}]
    assert (one["stock"], two["stock"]) == ({"reserved": 30}, {"reserved": 0})


class Cuda:
    """Stands for torch.cuda: captures allocate 512 bytes in pool 1."""

    def __init__(self) -> None:
        self.history = history = History()
        self.metadata = "the program's own"
        self.asked: list[Any] = []
        self.memory = SimpleNamespace(
            _record_memory_history=lambda *args, **kwargs: self.asked.append((args, kwargs)),
            _get_memory_metadata=lambda: self.metadata,
            _set_memory_metadata=lambda text: setattr(self, "metadata", text),
            memory_snapshot=self._snapshot,
            _snapshot=lambda: {"device_traces": [history.entries]},
        )
        self.current_device = lambda: 0
        self.get_device_name = lambda: "a GPU"

        class CUDAGraph:
            fails = False

            def capture_begin(self, pool: Any = None) -> None:
                if self.fails:
                    raise RuntimeError("cannot begin")
                history.allocate(1, 512)

            def capture_end(self) -> None:
                pass

            def pool(self) -> tuple[int, int]:
                return (0, 1)

        self.CUDAGraph = CUDAGraph

    def _snapshot(self, include_traces: bool) -> list[dict[str, Any]]:
        assert not include_traces
        self.history.mark(self.metadata)
        return [
            {"segment_pool_id": pool, "address": GIB, "total_size": 2 << 20, "device": device}
            for pool, device in (((0, 1), 0), ((0, 1), 1), ((0, 0), 0))
        ]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.11.0"))
    monkeypatch.setattr(sys, "argv", ["/some/where/serve.py"])
    return Cuda()


def test_recorder(cuda: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(str(tmp_path), cuda)
    assert cuda.asked == [(("all",), {"context": None, "stacks": "python"})]
    for _ in range(2):
        graph = cuda.CUDAGraph()
        graph.capture_begin(pool=(0, 1))
        graph.capture_end()
    failing = cuda.CUDAGraph()
    failing.fails = True
    with pytest.raises(RuntimeError, match="cannot begin"):
        failing.capture_begin()
    assert cuda.metadata == "the program's own"
    recorder.write()
    (path,) = tmp_path.iterdir()
    assert path.name == f"serve-{os.getpid()}-1.json.gz"
    trace = read_trace(path)
    assert [len(graph.events) for graph in trace.graphs] == [1, 1]
    assert trace.stock_reserved_bytes == 2 << 20
    with gzip.open(path) as file:
        document = json.load(file)
    assert (document["torch"], document["gpu"]) == ("2.11.0", "a GPU")
    assert capsys.readouterr().err == f"cudagraph-pool record: 2 graphs of one pool: {path}\n"
    assert main(["replay", str(path)]) == 0


def test_a_folder_that_is_gone_is_said(
    cuda: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(str(tmp_path / "none"), cuda)
    recorder.write()
    assert capsys.readouterr().err == "", "the command says it, of all processes"
    graph = cuda.CUDAGraph()
    graph.capture_begin()
    graph.capture_end()
    recorder.write()
    assert "cannot be written: No such file" in capsys.readouterr().err


def test_command_says_why_it_cannot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "require", lambda command: None)
    (tmp_path / "file").write_text("")
    assert main(["record", "-o", str(tmp_path / "file" / "x"), "serve.py"]) == 2
    assert "no trace can be written there: Not a directory" in capsys.readouterr().err
    assert main(["record", "-o", "/proc", "serve.py"]) == 2  # there, and nobody's to write to
    assert "/proc: no trace can be written there: " in capsys.readouterr().err


RECORDED = """
import os, sys, torch

def record(*arguments):
    print("recording", arguments[:3], "CUDAGRAPH_POOL" in os.environ, sys.argv[1:])

torch._C._cuda_init = torch._C._cuda_getDeviceCount = lambda: 0
torch.cuda._cudart = torch.cuda._cudart or object()
torch._C._cuda_record_memory_history = record
assert not hasattr(torch.cuda.CUDAGraph.capture_begin, "__wrapped__")
torch.cuda.init()
assert torch.cuda.CUDAGraph.capture_begin.__wrapped__
assert torch.cuda.CUDAGraph.capture_end.__wrapped__
sys.exit(7)
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch, of any kind")
def test_in_a_process_that_uses_cuda(tmp_path: Path) -> None:
    """With nothing faked but the driver, and no capture."""
    (tmp_path / "program.py").write_text(RECORDED)
    done = subprocess.run(
        [sys.executable, *"-P -m cudagraph_pool record -o traces program.py -o x".split()],
        env=environment(tmp_path, CUDA_VISIBLE_DEVICES="", CUDAGRAPH_POOL="1"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 7
    assert done.stderr.endswith(f"nothing was written to {tmp_path / 'traces'}\n")
    assert done.stderr.count("\n") == 1
    assert done.stdout == "recording ('all', None, 'python') False ['-o', 'x']\n"
    assert list((tmp_path / "traces").iterdir()) == []
