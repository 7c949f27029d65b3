"""What two_streams.py counts as good, and that no failure of a rank is hidden."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import _ddp
import _team
import pytest
import readme_table
import two_streams
from test_benchmarks import FAKE_WORKER

Capture = pytest.CaptureFixture[str]

# Stands in for _ddp_worker.py.
FAKE_RANK = """
import json, os, pathlib, sys, time
allocator = sys.argv[sys.argv.index("--allocator") + 1]
output = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
rank = int(os.environ["RANK"])
assert os.environ["WORLD_SIZE"] == "2" and os.environ["MASTER_PORT"]
option = "graph_capture_record_stream_reuse:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
assert option == (allocator == "option")
trouble, _, where = os.environ.get("TROUBLE", "").partition("@")
if where == allocator and rank == 1:
    if trouble == "die":
        print("last words", flush=True)
        sys.exit(3)
    if trouble == "hang":
        time.sleep(60)
if where == allocator and trouble == "die":
    time.sleep(60)  # the other waits for it
wrong = trouble == "wrong" and where == allocator and rank == 1
more = trouble == "more" and where == allocator
output.write_text(json.dumps({
    "reserved_bytes": (100 + 10 * rank + 50 * more) << 20, "capture_seconds": 0.1 + rank,
    "digest": f"{rank} {wrong}", "replay_seconds": 0.01,
    "minimum_bytes": (80 + rank) << 20 if allocator == "stock" else None,
}))
"""


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the benchmark with fake workers; returns its exit code and its report."""
    for module, text in ((_ddp, FAKE_RANK), (_team, FAKE_WORKER)):
        worker = tmp_path / f"{module.__name__}.py"
        worker.write_text(text)
        monkeypatch.setattr(module, "WORKER", worker)
    monkeypatch.setattr(two_streams, "device", lambda: {"gpu": "a GPU", "torch": "2.11"})
    monkeypatch.setattr(two_streams, "_has_two_gpus", lambda: True)

    def run(trouble: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setenv("TROUBLE", trouble)
        output = tmp_path / "results.json"
        code = two_streams.main(["--output", str(output), *arguments])
        return code, json.loads(output.read_text())

    return run


def test_all_models(measure: Any, capsys: Capture) -> None:
    code, report = measure("")
    assert code == 0
    assert [(row["workload"], row["allocator"]) for row in report["rows"]] == [
        (model, allocator)
        for model in ("streaming", "branches")
        for allocator in ("stock", "option", "ours")
    ]
    assert [row["allocator"] for row in report["ddp"]] == ["stock", "option", "ours"]
    ours = report["ddp"][2]
    assert (ours["reserved_bytes"], ours["minimum_bytes"]) == (110 << 20, 81 << 20)
    assert ours["ratio"] == 110 / 81
    assert ours["capture_seconds"] == 1.1
    assert ours["equal_to_stock"]
    assert report["above"] == []
    assert capsys.readouterr().out.splitlines() == readme_table.table(report)


def test_table_of_the_readme(measure: Any) -> None:
    _, report = measure("")
    lines = readme_table.table(report)
    assert len(lines) == 2 + 3
    assert lines[3] == "| blocks of two branches, 8 sizes, smallest first | 4 | 8 (2.000) " + (
        "| 4 (1.000) | **4 (1.000)** |"
    )
    assert lines[4].endswith(" | 81 | 110 (1.358) | 110 (1.358) | **110 (1.358)** |")


@pytest.mark.parametrize("allocator", ["stock", "option", "ours"])
def test_a_rank_that_fails(allocator: str, measure: Any, capsys: Capture) -> None:
    code, report = measure(f"die@{allocator}", "--models", "ddp")
    assert code == 1
    failed = [row for row in report["ddp"] if row["error"]]
    assert [row["allocator"] for row in failed] == [allocator]
    assert failed[0]["error"].endswith("last words")
    assert f"ddp {allocator}: FAILED {failed[0]['error']}" in capsys.readouterr().out


def test_ranks_that_hang(measure: Any) -> None:
    code, report = measure("hang@ours", "--models", "ddp", "--timeout", "2")
    assert code == 1
    assert report["ddp"][2]["error"] == "exit codes [0, -9]: it printed nothing"


def test_training_that_differs_from_stock(measure: Any, capsys: Capture) -> None:
    code, report = measure("wrong@ours", "--models", "ddp")
    assert code == 1
    assert [row["equal_to_stock"] for row in report["ddp"]] == [True, True, False]
    assert "ddp ours: results DIFFER from stock" in capsys.readouterr().out


def test_more_than_stock_fails(measure: Any, capsys: Capture) -> None:
    code, report = measure("more@ours", "--models", "ddp")
    assert code == 1
    assert report["above"] == ["ddp"]
    assert "ddp: reserves MORE than stock or the option" in capsys.readouterr().out
    assert measure("more@option", "--models", "ddp")[0] == 0


def test_wrong_outputs_of_a_model_fail(measure: Any) -> None:
    code, _ = measure("wrong@ours", "--models", "branches")
    assert code == 1


@pytest.mark.parametrize("option", [4, 5, 6])
def test_above_is_found_by_workload_and_order(option: int) -> None:
    rows = [
        {"workload": "w", "order": order, "allocator": allocator, "reserved_bytes": reserved}
        for order, of in (("asc", (9, option, 5)), ("desc", (4, 4, 5)), ("shuffled", (9, 9, None)))
        for allocator, reserved in zip(("stock", "option", "ours"), of, strict=True)
    ]
    assert two_streams.above(rows, "workload") == ["w asc"] * (option < 5) + ["w desc"]


def test_ddp_needs_two_gpus(
    measure: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    monkeypatch.setattr(two_streams, "_has_two_gpus", lambda: False)
    output = ["--output", str(tmp_path / "x.json")]
    assert two_streams.main([*output, "--models", "ddp"]) == 2
    assert "ddp needs two GPUs" in capsys.readouterr().err
    code, report = measure("", "--allocators", "ours")
    assert code == 0
    assert report["ddp"] == []
    assert len(report["rows"]) == 4


def test_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    monkeypatch.setattr(two_streams, "device", lambda: None)
    assert two_streams.main(["--output", str(tmp_path / "x.json")]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_help(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        two_streams.main(["--help"])
    assert caught.value.code == 0
    assert "streaming,branches,ddp" in capsys.readouterr().out
