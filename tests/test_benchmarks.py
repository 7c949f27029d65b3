"""The benchmarks without a GPU: each runs with processes that stand in for its own, says what it
found, and hides no failure.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import _apart
import _command
import _worker
import const_memory
import multi_stream
import pytest
import readme_table
import shared_execs
import vllm_engine
from _apart import WorkerError
from fake_team import faked

MIB = 1 << 20
Capture = pytest.CaptureFixture[str]


def test_const_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    answers = """{
        "prepare": [1, 2, 3], "replay": 0.1, "minimum_bytes": 4 << 20,
        "prime": [6 << 20, 5 << 20, 4 << 20],
        "capture": {
            "seconds": 2.0 if one == "ours" else 1.0, "device_bytes": 0,
            "reserved_bytes": (8 if one == "stock" else 4) << 20,
            "driver_seconds": 0.5 if one == "ours" else None,
        },
        "compare": {
            str(key): {"equal": not (here and key == 3), "digest": None, "repeatable": True}
            for key in request.get("order", [])
        },
    }"""
    run = faked(const_memory, answers, tmp_path, monkeypatch)
    seed = ["--workloads", "seed", "--orders", "desc", "--timeout", "3"]
    code, report = run("", *seed)
    stock, _, _, ours = report["rows"]
    assert (code, ours["ratio"], stock["ratio"]) == (0, 1.0, 2.0)
    assert (ours["capture_vs_stock"], ours["driver_seconds"]) == (2.0, 0.5)
    assert ours["outputs"]["equal_to_eager"] == 3
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| pinned copies and `a**2 + b*2`, 128 sizes | largest first | 4 | **4 (1.000)** | 1.000 "
        "| 8 (2.000) | 4 (1.000) | 4 (1.000) | 6 (1.500) | 2.00 | 1.000 |"
    ]
    for trouble, said in (
        ("die@ours.replay", "code 9: last words"),
        ("fail@primed.prime", "RuntimeError: broken"),
        ("hang@ours.capture", "no answer in 3 s"),
    ):
        code, report = run(trouble, *seed)
        (error,) = filter(None, (row["error"] for row in report["rows"]))
        assert code == 1
        assert said in error
    capsys.readouterr()
    for who, failed in (("ours", 1), ("stock", 0)):  # of stock it is a finding
        assert run(f"wrong@{who}.compare", *seed)[0] == failed
        assert ("WRONG at sizes [3]" in capsys.readouterr().out) == failed


def test_multi_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    answers = """{
        "prepare": {}, "release": None, "wrong_sums": 17 * (here and request.get("key") == 1),
        "capture": {
            "seconds": 0.09 if one == "ours" else 0.1, "device_bytes": 0,
            "reserved_bytes": (100 if one == "ours" else 400) << 20, "driver_seconds": None,
        },
        "replay": 0.021 if one == "ours" else 0.02,
    }"""
    run = faked(multi_stream, answers, tmp_path, monkeypatch)
    names = ["2x1000-a0.1-f0.1", "4x1000-a0.3-f0.3"]
    code, report = run("", "--configurations", *names)
    ours = report["rows"][0]["allocators"]["ours"]
    assert (code, ours["ratio"]) == (0, (100 << 20) / report["rows"][0]["peak_bytes"])
    assert (ours["capture_vs_stock"], ours["replay_vs_stock"]) == pytest.approx((0.9, 1.05))
    assert capsys.readouterr().out.splitlines() == readme_table.table(report)
    for trouble, said in (
        ("wrong@stock.wrong_sums", f"{names[1]} seed 0, stock: 17 WRONG sums"),
        ("fail@ours.capture", "ours: FAILED"),
    ):
        assert run(trouble, "--configurations", *names)[0] == 1
        assert said in capsys.readouterr().out


def test_shared_execs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    answers = """{
        "prepare": [1, 2, 4, 8], "memory": {"driver_bytes": 64 << 20, "nodes": [30, 32]},
        "decode": (0.05 if one == "4" else 0.01) * len(request.get("timed", [])),
    }"""
    run = faked(shared_execs, answers, tmp_path, monkeypatch)
    asked = ["--workloads", "llama", "--bounds", "4", "default", "--rounds", "1"]
    code, report = run("", *asked)
    rows = report["rows"]
    assert (code, list(dict.fromkeys(row["section"] for row in rows))) == (0, ["memory", "decode"])
    assert rows[-1]["configs"]["4"]["vs_stock"] == pytest.approx(1 / 5), "steps, not seconds"
    assert capsys.readouterr().out.splitlines() == readme_table.table(report)
    code, report = run("fail@4.decode", *asked)
    error = "llama, max_execs 4: FAILED decode: RuntimeError: broken"
    assert (code, report["errors"]) == (1, [error])


def test_vllm_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Runs take turns and become medians."""
    asked: list[str] = []

    def answer(arguments: Any, environment: Any, seconds: float) -> dict[str, Any]:
        number, ours = json.loads(arguments[1])["round"], environment["CUDAGRAPH_POOL"] == "1"
        asked.append(environment["CUDAGRAPH_POOL"])
        figures = {
            "captures_of_ours": (0, 902),
            "pool": (128 * MIB, 73 * MIB),
            "minimum": (0, 72 * MIB),
            "device": (300 * MIB, 240 * MIB),
            "saved": (0, 30 * MIB),
            "kv_tokens": (1000, 1010),
            # Every round takes twice as long as the one before.
            "capture_seconds": (2.0 * 2**number, 2.5 * 2**number),
            "tokens_per_second": (5000.0 / 2**number,) * 2,
        }
        chosen = {name: pair[ours] for name, pair in figures.items()}
        return {"captures": 902, "estimate": 0, "digest": "d", **chosen}

    monkeypatch.setattr(vllm_engine, "run_apart", answer)
    monkeypatch.setattr(vllm_engine, "missing", lambda gpus: None)
    monkeypatch.setattr(_command, "device", lambda: {"torch": "2.11.0", "gpu": "H100"})
    command = ["--models", "1b", "--modes", "v2-FULL", "--allocators", "stock", "ours"]
    command += ["--rounds", "2", "--output", str(tmp_path / "rows.json")]
    assert vllm_engine.main(command) == 0
    assert asked == ["0", "1", "1", "0"]
    stock, ours = [line.split() for line in capsys.readouterr().out.splitlines()[2:4]]
    assert stock[:8] == ["1b", "1", "v2-FULL", "custom", "stock", "902", "0", "128"]
    assert ours[:9] == ["1b", "1", "v2-FULL", "custom", "ours", "902", "902", "73", "1.014"]
    assert ours[9:18] == ["240", "0.800", "0", "30", "1,010", "1.010", "3.75", "1.250", "3,750"]


NEED_A_GPU = (
    "combinations const_memory continuous_batching footprint graph_runner layer_graphs leases "
    "multi_stream sglang_engine shared_execs"
).split()


@pytest.mark.parametrize("name", NEED_A_GPU)
def test_needs_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py"])
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(name).main(["--output", str(tmp_path / "x.json")])
    assert caught.value.code == 2
    assert f"{name}.py: no CUDA device" in capsys.readouterr().err


class Captures:
    """Stands for what a process captures."""

    workload = argparse.Namespace(keys=range(4, 9, 4))

    def halved(self, order: list[int]) -> list[float]:
        return [key / 2 for key in order] or [1 / 0]


def test_a_worker_answers_what_its_captures_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [{"command": "halved", "order": order} for order in ([1, 2], [], [3])]
    lines = "".join(json.dumps(request) + "\n" for request in ({"command": "prepare"}, *asked))
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    answers = io.StringIO()
    assert _worker.serve(answers, Captures) == 1
    assert [json.loads(line) for line in answers.getvalue().splitlines()] == [
        *({"result": [4, 8]}, {"result": [0.5, 1.0]}),
        {"error": "ZeroDivisionError: division by zero"},
    ]


def test_what_workers_are_asked_for_is_there() -> None:
    pytest.importorskip("torch")
    from workloads import WORKLOADS

    groups = (name for names in const_memory.GROUPS.values() for name in names)
    assert {*const_memory.WORKLOADS, *groups} <= WORKLOADS.keys()
    kinds = {"graphs": "mlp", "execs": "deep", "streams": "2x1000-a0.1-f0.3@7", "replays": "mlp"}
    assert all(callable(_worker.KINDS[kind]([name], "stock")) for kind, name in kinds.items())


def test_what_is_measured_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "from _apart import run_script\n"
        "def measure(*arguments):\n"
        "    os.system('echo from a library')\n"
        "    return {'given': arguments, 'pool': os.environ['CUDAGRAPH_POOL']}\n"
        "sys.exit(run_script(lambda: time.sleep(60) if sys.argv[1:] else 'no memory', measure))\n"
    )
    paths = [str(Path(_apart.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    found = _apart.measure_apart(str(script), "a", 2, CUDAGRAPH_POOL="1")
    assert found == {"given": ["a", 2], "pool": "1"}
    with pytest.raises(WorkerError, match=r"^the process ended with code 1: no memory$"):
        _apart.run_apart([str(script)], os.environ)
    assert "no memory" in capsys.readouterr().err
    with pytest.raises(WorkerError, match=r"^no answer in 1 s$"):
        _apart.run_apart([str(script), "hang"], os.environ, 1)


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("capture_parts", "docs/performance.md"),
        ("combinations", "docs/combinations.md"),
        ("const_memory", "docs/performance.md"),
        ("unseen", "docs/performance.md"),
        ("footprint", "docs/footprint.md"),
        ("graph_runner", "docs/performance.md"),
        ("multi_stream", "docs/performance.md"),
        ("shared_execs", "docs/performance.md"),
        ("two_streams", "docs/performance.md"),
        ("vllm_engine", "docs/compatibility.md"),
        ("vllm_engine_2_14", "docs/compatibility.md"),
    ],
)
def test_pages_have_the_tables_of_what_was_measured(name: str, page: str) -> None:
    root = Path(__file__).parent.parent
    report = json.loads((root / f"benchmarks/results/{name}.json").read_text())
    lines = readme_table.table(report)
    assert len(lines) > 2
    text = (root / page).read_text()
    assert all(part in text for part in "\n".join(lines).split("\n\n"))
    if name == "const_memory":
        assert "\n".join(readme_table.short_table(report)) in (root / "README.md").read_text()
