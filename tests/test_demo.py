"""The demo: what it says of recorded captures, and whether it hides a graph that is wrong."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from small_trace import SNAPSHOT

from cudagraph_pool.cli.main import main
from cudagraph_pool.tools import demo
from cudagraph_pool.tools.costs import PoolCost

Capture = pytest.CaptureFixture[str]


def set_gpu(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    cuda = SimpleNamespace(is_available=lambda: is_there, get_device_name=lambda: "a GPU")
    monkeypatch.setattr(demo, "torch", SimpleNamespace(cuda=cuda))


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    set_gpu(monkeypatch, False)
    assert main(["demo"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "gated MLP: 128 graphs in 146 MiB instead of 1,326 MiB: 1,180 MiB saved, 9.1" in out
    assert "ResNet-50: 64 graphs in 320 MiB instead of 7,144 MiB: 6,824 MiB saved, 22.3" in out
    assert "There is no GPU here" in out
    assert max(map(len, out.splitlines())) <= 90


def test_a_graph_that_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Where stock's graphs differ from eager too, ours must do as they do."""
    torch = pytest.importorskip("torch")
    one, two = torch.tensor([1]), torch.tensor([2])
    equal = "outputs of 1 of 2 graphs equal eager's bit for bit"
    assert demo._judge([None, None], [None, one])[0] == 0
    assert demo._judge([None, one], [None, torch.tensor([1])]) == (
        *(0, f"{equal}, 1 equal those of PyTorch's graphs, which differ"),
    )
    assert demo._judge([None, one], [None, two]) == (1, f"{equal}, 1 are WRONG")
    assert demo._judge([None, one], [None, None])[0] == 1

    def measure(work: Any, is_ours: bool) -> demo._Measured:
        cost = PoolCost("", "", [], 4 << 20, 4 << 20, None, stock=None if is_ours else 8 << 20)
        return demo._Measured(cost, 1.0, 0.01, [one if is_ours else None])

    set_gpu(monkeypatch, True)
    monkeypatch.setattr(demo, "_works", lambda: [SimpleNamespace(name="gated MLP")])
    monkeypatch.setattr(demo, "_measure", measure)
    monkeypatch.setattr(demo, "enabled", nullcontext)
    assert main(["demo"]) == 1
    out = capsys.readouterr().out
    assert "captured in 1.00 s (PyTorch 1.00), replayed in 10.0 ms (10.0)" in out
    assert "gated MLP: 0 graphs in 4 MiB instead of 8 MiB" in out
    assert "1 are WRONG" in out


def test_what_keeps_it_from_capturing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    pytest.importorskip("torch")
    set_gpu(monkeypatch, True)
    monkeypatch.setattr(demo, "_works", fail)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == "cudagraph-pool: demo: out of memory\n"


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with graphs that do nothing: their outputs are told."""
    torch = pytest.importorskip("torch")
    memory = SimpleNamespace(
        _record_memory_history=lambda *_, **__: None, _snapshot=lambda: SNAPSHOT
    )
    graph = SimpleNamespace(replay=lambda: None)
    fakes = {
        **{"Stream": lambda: None, "stream": nullcontext, "synchronize": lambda: None},
        **{"CUDAGraph": lambda: graph, "graph": lambda graph, **_: nullcontext()},
        **{"graph_pool_handle": lambda: (0, 3), "empty_cache": lambda: None, "memory": memory},
        "Event": lambda **_: SimpleNamespace(
            record=lambda: None, synchronize=lambda: None, elapsed_time=lambda other: 20.0
        ),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    given = torch.empty(4, 8, dtype=torch.bfloat16)
    work = demo._Work("gated MLP", demo._gated_mlp(2, 8, 16), [given[:2], given])
    stock = demo._measure(work, is_ours=False)
    assert (stock.cost.stock, stock.cost.minimum, stock.replay) == (20 << 20, 4 << 20, 0.002)
    assert [output is not None and len(output) for output in stock.outputs] == [2, 4]
    pool = {"device": 0, "id": (0, 4), "kind": "GraphPool", "graphs": []}
    sizes = {"peak_allocated_bytes": 3 << 20, "reserved_bytes": 4 << 20}
    monkeypatch.setattr(demo, "stats", lambda: {"pools": [{**pool, **sizes}]})
    monkeypatch.setattr(demo, "GraphPool", lambda: SimpleNamespace(id=(0, 4)))
    ours = demo._measure(work, is_ours=True)
    assert ours.cost.reserved == 4 << 20
    assert demo._judge(ours.outputs, stock.outputs)[0] == 0


def test_on_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("captures CUDA graphs")
    command = [sys.executable, *"-P -m cudagraph_pool demo".split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "WRONG" in done.stdout) == (0, False), done
