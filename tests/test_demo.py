"""The demo: from recorded traces without a GPU, and the real thing with one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from cudagraph_pool.tools import demo as _demo

Capture = pytest.CaptureFixture[str]


def has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def cells(out: str, allocator: str) -> list[list[str]]:
    """The table's lines of one allocator, from the column after it on."""
    return [line.split(allocator)[1].split() for line in out.splitlines() if allocator in line]


def graph(equal: bool, digest: str | None = None) -> dict[str, Any]:
    return {"equal": equal, "digest": digest, "repeatable": True}


def test_without_gpu(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(_demo, "_gpu_name", lambda: None)
    assert _demo.main([]) == 0
    out = capsys.readouterr().out
    assert sum("No GPU" in line for line in out.splitlines()) == 1
    expected = {
        "stock PyTorch ": ["9.068", "1.000"],
        "expandable segments ": ["1.260", "1.000"],
        "primed pool ": ["1.288", "6.000"],
        "cudagraph_pool ": ["1.000", "1.000"],
    }
    for allocator, ratios in expected.items():
        assert [row[4] for row in cells(out, allocator)] == ratios


def test_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from cudagraph_pool.tools import demo\n"
        "demo._gpu_name = lambda: None\n"
        "sys.exit(demo.main([]))\n"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True)


def test_refuses_arguments(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exit_info:
        _demo.main(["--seed", "one"])
    assert exit_info.value.code == 2
    assert "invalid int value" in capsys.readouterr().err


def test_judges_outputs() -> None:
    stock = {"1": graph(True), "2": graph(False, "a"), "3": graph(True), "4": graph(False, "b")}
    assert _demo._judge(stock, None) == (0, "2 of 4 equal eager")
    same = {"1": graph(True), "2": graph(False, "a"), "3": graph(True), "4": graph(True, "c")}
    wrong, words = _demo._judge(same, stock)
    assert wrong == 0
    assert words.startswith("3 of 4 equal eager, 1 equal stock's")
    # Different from eager where stock's graph is not, and from both where neither equals the other.
    assert _demo._judge({**same, "3": graph(False, "x")}, stock)[0] == 1
    assert _demo._judge({**same, "2": graph(False, "x")}, stock)[0] == 1


def worker_row(outputs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "workload": "seed",
        "graphs": len(outputs),
        "reserved_bytes": 4 << 20,
        "minimum_bytes": 4 << 20,
        "capture_seconds": 0.1,
        "replay_seconds": 0.001,
        "outputs": outputs,
    }


@pytest.mark.parametrize("right", [True, False])
def test_exit_code_says_whether_outputs_are_right(
    right: bool, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    answers = {name: [worker_row({"1": graph(True)})] for name in _demo._ALLOCATORS}
    answers["ours"] = [worker_row({"1": graph(right, "a")})]
    monkeypatch.setattr(_demo, "_gpu_name", lambda: "a GPU")
    monkeypatch.setattr(_demo, "_run_worker", lambda allocator, seed: answers[allocator])
    assert _demo.main([]) == (0 if right else 1)
    assert ("WRONG" in capsys.readouterr().out) == (not right)


def test_worker_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def die(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], -11, stdout="", stderr="first\nlast words\n")

    monkeypatch.setattr(_demo, "_gpu_name", lambda: "a GPU")
    monkeypatch.setattr(subprocess, "run", die)
    assert _demo.main([]) == 1
    assert "stock: the process ended with code -11: last words" in capsys.readouterr().err


def test_worker_runs_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that lies in the current folder, such as a clone in which nothing is built."""
    seen: dict[str, Any] = {}

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        seen.update(command=command, **options)
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps([]), stderr="")

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr(subprocess, "run", run)
    assert _demo._run_worker("stock", 0) == []
    assert "-P" in seen["command"]
    assert seen["env"]["PYTHONPATH"].startswith(str(_demo._TRACES.parents[1]))
    assert "PYTORCH_CUDA_ALLOC_CONF" not in seen["env"]  # stock PyTorch is what it is by default
    _demo._run_worker("expandable", 0)
    assert seen["env"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.skipif(not has_gpu(), reason="captures CUDA graphs")
def test_on_gpu(capsys: Capture) -> None:
    assert _demo.main([]) == 0
    out = capsys.readouterr().out
    for row in cells(out, "cudagraph_pool "):
        assert float(row[4]) <= 1.03
