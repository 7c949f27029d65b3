"""The demo: what it says of recorded captures, and whether it hides a graph that is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from small_trace import SNAPSHOT

from cudagraph_pool.cli.main import main
from cudagraph_pool.tools import demo

Capture = pytest.CaptureFixture[str]


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(demo, "_gpu_name", lambda: None)
    assert main(["demo"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "128 graphs of a gated MLP: PyTorch 1,326 MiB, pool 146 MiB: 9.1 times less\n" in out
    assert "64 graphs of ResNet-50: PyTorch 7,144 MiB, pool 320 MiB: 22.3 times less\n" in out
    assert "There is no GPU here" in out
    assert max(map(len, out.splitlines())) <= 90


def test_needs_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; from cudagraph_pool.cli.main import main;"
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{program} sys.exit(main(['demo']))"], capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("ours", "stock", "wrong", "said"),
    [
        ("", "", 0, "outputs of 2 of 2 graphs equal eager's bit for bit"),
        ("x", "x", 0, "outputs of 1 of 2 graphs .*, 1 equal those of PyTorch's graphs"),
        ("x", "y", 1, "outputs of 1 of 2 graphs .*, 1 are WRONG"),
        ("x", "", 1, "1 are WRONG"),
    ],
)
def test_a_graph_that_is_wrong_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, ours: str, stock: str, wrong: int, said: str
) -> None:
    """A digest stands for outputs that differ from eager's."""

    def answer(allocator: str, seed: int) -> list[dict[str, Any]]:
        outputs = {"1": "", "2": ours if allocator == "ours" else stock}
        sizes = dict.fromkeys(("stock", "reserved", "minimum", "expandable", "primed"), 4 << 20)
        times = {"capture": 1.0, "replay": 0.01}
        return [{"model": "mlp_asc", "graphs": 2, "outputs": outputs, **sizes, **times}]

    monkeypatch.setattr(demo, "_gpu_name", lambda: "a GPU")
    monkeypatch.setattr(demo, "_ask_worker", answer)
    assert main(["demo", "--seed", "3"]) == wrong
    out = capsys.readouterr().out
    assert "captured in 1.00 s (PyTorch 1.00), replayed in 10.0 ms (10.0)" in out

    assert re.search(said, out)


def test_a_process_that_fails_is_said(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(demo, "_gpu_name", lambda: "a GPU")
    monkeypatch.setattr(demo, "_ask_worker", lambda allocator, seed: "no answer in 300 s")
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == "cudagraph-pool demo: stock: no answer in 300 s\n"


def test_what_a_worker_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with graphs that do nothing: their outputs are told by a digest."""
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
    work = demo._Work("mlp_asc", demo._gated_mlp(2, 8, 16), given, [1, 2], 2)
    stock = demo._measure(work, is_ours=False, seed=1)
    assert (stock["stock"], stock["minimum"], stock["replay"]) == (20 << 20, 4 << 20, 0.002)
    assert list(stock["outputs"]) == [1, 2]
    assert all(len(digest) == 64 for digest in stock["outputs"].values())
    pool = SimpleNamespace(id=(0, 4), stats=lambda: {"reserved_bytes": 4 << 20})
    monkeypatch.setattr(demo, "GraphPool", lambda: pool)
    ours = demo._measure(work, is_ours=True, seed=1)
    assert (ours["reserved"], ours["outputs"]) == (4 << 20, stock["outputs"])


def test_on_a_gpu(capsys: Capture) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("captures CUDA graphs")
    assert main(["demo"]) == 0
    assert "WRONG" not in capsys.readouterr().out
