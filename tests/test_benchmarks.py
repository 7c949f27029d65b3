"""The benchmark's own logic: what it counts as right, and that no failure is hidden."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cudagraph_pool._trace import minimum_bytes, read_trace

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import _row
import const_memory
import graph_updates
import readme_table
import trace_to_text

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json.gz"))
Capture = pytest.CaptureFixture[str]

# Stands in for _worker.py: answers every command, or fails as the environment says.
FAKE_WORKER = """
import json, os, sys, time
allocator = sys.argv[sys.argv.index("--allocator") + 1]
trouble, _, where = os.environ.get("TROUBLE", "").partition("@")
def graph(key):
    equal = not (trouble == "wrong" and where == allocator and key == 3)
    return {"equal": equal, "digest": None if equal else "x", "repeatable": True}
for line in sys.stdin:
    request = json.loads(line)
    command = request["command"]
    if where == f"{allocator}.{command}":
        if trouble == "die":
            print("last words", file=sys.stderr, flush=True)
            os._exit(9)
        if trouble == "hang":
            time.sleep(60)
        if trouble == "fail":
            print(json.dumps({"error": "RuntimeError: broken"}), flush=True)
            sys.exit(1)
    result = {
        "prepare": [1, 2, 3],
        "capture": {"seconds": 2.0 if allocator == "ours" else 1.0,
                    "reserved_bytes": (8 if allocator == "stock" else 4) << 20, "device_bytes": 0,
                    "driver_seconds": 0.5 if allocator == "ours" else None},
        "replay": 0.1, "minimum": 4 << 20,
        "compare": {str(key): graph(key) for key in request.get("order", [])},
    }[command]
    print(json.dumps({"result": result}), flush=True)
"""


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the benchmark with fake workers; returns its exit code and rows by allocator."""
    worker = tmp_path / "_worker.py"
    worker.write_text(FAKE_WORKER)
    monkeypatch.setattr(_row, "WORKER", worker)
    monkeypatch.setattr(const_memory, "device", lambda: {"gpu": "a GPU", "torch": "2.11"})

    def run(trouble: str, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
        monkeypatch.setenv("TROUBLE", trouble)
        output = tmp_path / "results.json"
        command = ["--workloads", "seed", "--orders", "desc", "--output", str(output), *arguments]
        code = const_memory.main(command)
        rows = json.loads(output.read_text())["rows"]
        return code, {row["allocator"]: row for row in rows}

    return run


def test_row(measure: Any, capsys: Capture) -> None:
    code, rows = measure("")
    assert code == 0
    assert list(rows) == ["stock", "expandable", "ours"]
    ours = rows["ours"]
    assert (ours["ratio"], rows["stock"]["ratio"]) == (1.0, 2.0)
    assert (ours["capture_vs_stock"], ours["driver_share"]) == (2.0, 0.25)
    assert len(ours["capture_seconds_all"]) == 7
    assert len(ours["replay_seconds_all"]) == 7
    assert ours["replay_vs_stock"] == 1.0
    assert ours["outputs"]["equal_to_eager"] == 3
    assert "3/3 = eager" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["prepare", "capture", "replay", "compare"])
@pytest.mark.parametrize(
    ("trouble", "words"), [("die", "code 9: last words"), ("fail", "RuntimeError: broken")]
)
def test_failing_worker_is_a_row_and_an_exit_code(
    command: str, trouble: str, words: str, measure: Any, capsys: Capture
) -> None:
    code, rows = measure(f"{trouble}@ours.{command}")
    assert code == 1
    assert rows["ours"]["error"].startswith(command)
    assert words in rows["ours"]["error"]
    assert rows["stock"]["error"] is None
    assert rows["stock"]["ratio"] == 2.0  # the others go on
    assert "FAILED" in capsys.readouterr().out


def test_failing_reference_is_a_failure(measure: Any) -> None:
    code, rows = measure("die@stock.minimum")
    assert code == 1
    assert rows["ours"]["ratio"] is None


def test_worker_that_hangs_is_killed(measure: Any) -> None:
    code, rows = measure("hang@ours.capture", "--timeout", "3")
    assert code == 1
    assert "no answer in 3 s" in rows["ours"]["error"]


def test_wrong_output_of_ours_fails(measure: Any, capsys: Capture) -> None:
    code, rows = measure("wrong@ours")
    assert code == 1
    assert rows["ours"]["outputs"]["differ"] == [3]
    assert "WRONG at sizes [3]" in capsys.readouterr().out


def test_stock_that_differs_from_eager_is_a_finding(measure: Any) -> None:
    code, rows = measure("wrong@stock")
    assert code == 0
    assert rows["stock"]["outputs"]["differ"] == [3]


def graph(equal: bool, digest: str | None = None, repeatable: bool = True) -> dict[str, Any]:
    return {"equal": equal, "digest": digest, "repeatable": repeatable}


@pytest.mark.parametrize(
    ("own", "stock", "verdict"),
    [
        (graph(True), graph(True), "equal_to_eager"),
        (graph(True, "a"), graph(False, "b"), "equal_to_eager"),
        (graph(False, "a"), graph(False, "a"), "equal_to_stock"),
        (graph(False, "a"), graph(False, "b"), "differ"),
        (graph(False, "a"), graph(True), "differ"),
        (graph(False, "a", False), graph(True), "differ"),
        (graph(False, "a", False), graph(False, "b", True), "differ"),
        (graph(False, "a", False), graph(False, "b", False), "unrepeatable"),
    ],
)
def test_judge(own: dict[str, Any], stock: dict[str, Any], verdict: str) -> None:
    found = _row.judge_outputs({"5": own}, {"5": stock})
    assert found[verdict] in (1, [5])
    assert sum(value if isinstance(value, int) else len(value) for value in found.values()) == 1


def test_orders() -> None:
    keys = [3, 1, 2]
    assert _row.order_keys(keys, "asc", 0) == [1, 2, 3]
    assert _row.order_keys(keys, "desc", 0) == [3, 2, 1]
    many = list(range(100))
    shuffled = _row.order_keys(many, "shuffled", 1)
    assert sorted(shuffled) == many
    assert shuffled == _row.order_keys(many[::-1], "shuffled", 1)
    assert shuffled != _row.order_keys(many, "shuffled", 2)


def test_traces_need_no_gpu(tmp_path: Path, capsys: Capture) -> None:
    seed = next(path for path in TRACES if path.name.startswith("seed"))
    output = tmp_path / "results.json"
    assert const_memory.main(["--traces", str(seed), "--output", str(output)]) == 0
    results = json.loads(output.read_text())["traces"]
    assert [result["order"] for result in results] == ["asc", "desc", "shuffled"]
    assert "seed_asc" in capsys.readouterr().out


def test_bad_trace_is_refused(tmp_path: Path, capsys: Capture) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    output = tmp_path / "results.json"
    assert const_memory.main(["--traces", str(bad), "--output", str(output)]) == 2
    assert str(bad) in capsys.readouterr().err
    assert not output.exists()


def test_traces_as_text_say_the_same(tmp_path: Path) -> None:
    source = next(path for path in TRACES if path.name.startswith("gpt2"))
    assert trace_to_text.main([str(source), "--output", str(tmp_path)]) == 0
    trace = read_trace(source)
    words = [line.split() for line in (tmp_path / "gpt2_train_asc.txt").read_text().splitlines()]
    assert [int(w[1]) for w in words if w[0] == "graph"] == [g.key for g in trace.graphs]
    events = [event for graph in trace.graphs for event in graph.events]
    assert [
        (int(w[1]), int(w[2]), int(w[3])) if w[0] == "alloc" else (int(w[1]), 0, 0)
        for w in words
        if w[0] != "graph"
    ] == [tuple(event) for event in events]


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_minimum_from_pytorchs_record_is_that_of_the_trace(path: Path) -> None:
    """The record that PyTorch would have made of a recorded capture gives the trace's minimum."""
    pytest.importorskip("torch")
    from cudagraph_pool._measure import peak_live_bytes

    trace = read_trace(path)
    entries: list[dict[str, Any]] = [{"action": "segment_alloc", "addr": 0, "size": 1 << 40}]
    for graph in trace.graphs:
        held: list[dict[str, Any]] = []  # as blocks are that another stream has used
        for event in graph.events:
            address = event.block << 32
            if event.bytes:
                entries.append({"action": "alloc", "addr": address, "size": event.bytes})
                # Another pool's block at the same time does not count.
                entries.append({"action": "alloc", "addr": address - (1 << 60), "size": 1 << 30})
            else:
                entries.append({"action": "free_requested", "addr": address, "size": 1})
                held.append({"action": "free_completed", "addr": address, "size": 1})
        entries += held
    assert peak_live_bytes(entries, [(0, 1 << 60)]) == minimum_bytes(trace.graphs)


# Stands in for the program that graph_updates.py compiles: a case does what its name says.
FAKE_GRAPH_UPDATES = """#!{python}
import json, os, sys, time
def say(**row):
    print(json.dumps(row), flush=True)
def controls():
    say(at="a alone"); say(a="1"); say(at="b alone"); say(b="2"); say(at="end")
command, *words = sys.argv[1:]
if command == "device":
    say(gpu="a GPU", cuda_driver="13.0", cuda_toolkit="13.0")
elif command == "list":
    for name in ("carried", "kept", "refused", "hangs", "faults", "missing"):
        say(group="launch attribute", name=name, documented="")
elif command == "measure":
    if words == [os.environ.get("FAILING", ""), "1000"]:
        say(error="cuGraphLaunch: 700")
        sys.exit(3)
    say(nodes=int((words + ["0"])[1]), update_us=1.5, wrong=0)
elif command == "control":
    controls()
else:
    name = words[1]
    say(at="building a"); say(first="1"); say(at="building b")
    if name == "missing":
        say(error="cuLaunchKernelEx: CUDA_ERROR_NOT_SUPPORTED")
        sys.exit(3)
    say(told_apart_by="nothing"); say(at="update")
    if name == "hangs":
        time.sleep(60)
    refused = name == "refused"
    say(update="CUDA_ERROR, ATTRIBUTES_CHANGED" if refused else "SUCCESS")
    say(at="launch after the update")
    if name == "faults":
        os._exit(9)
    say(after="2" if name == "carried" else "1")
    say(parameters="old" if refused else "new")
    say(back="SUCCESS"); say(back_after="1"); say(back_parameters="new")
    controls()
"""


@pytest.fixture
def update_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs graph_updates.py with a fake program; returns its exit code and its report."""
    program = tmp_path / "graph_updates"
    program.write_text(FAKE_GRAPH_UPDATES.replace("{python}", sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(graph_updates, "build", lambda folder, architecture: program)

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        output = tmp_path / "updates.json"
        words = ["--arch", "sm_90", "--limit", "3", "--output", str(output), *arguments]
        code = graph_updates.main(words)
        return code, json.loads(output.read_text()) if output.exists() else {}

    return run


def test_graph_updates_report_what_happened(update_graphs: Any, capsys: Capture) -> None:
    code, report = update_graphs()
    assert code == 0
    assert {case["name"]: case["found"] for case in report["cases"]} == {
        "carried": "carried",
        "kept": "SILENTLY KEPT",
        "refused": "refused",
        "hangs": "LOST at update: no end in 3 s",
        "faults": "LOST at launch after the update: exit code 9",
        "missing": "not tried: cuLaunchKernelEx: CUDA_ERROR_NOT_SUPPORTED (building b)",
    }
    assert all((case["a"], case["b"]) == ("1", "2") for case in report["cases"])
    counts = [row["nodes"] for row in report["measured"]["costs"]["rows"]]
    assert counts == list(graph_updates.NODES)
    printed = capsys.readouterr().out
    assert "kept |  | SUCCESS | 1 | 2 | 1 | **SILENTLY KEPT** | carried | nothing |" in printed
    assert "| nodes | update, µs | wrong |" in printed


def test_graph_updates_measurement_that_fails_is_an_exit_code(
    update_graphs: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("FAILING", "memory")
    code, report = update_graphs()
    assert code == 1
    assert report["troubles"] == ["measure memory 1000: exit code 3: cuGraphLaunch: 700"]
    assert len(report["measured"]["memory"]["rows"]) == 4
    assert "cuGraphLaunch: 700" in capsys.readouterr().err


def test_graph_updates_of_some_names(update_graphs: Any, capsys: Capture) -> None:
    code, report = update_graphs("--only", "kept")
    assert code == 0
    assert [case["name"] for case in report["cases"]] == ["kept"]
    assert report["measured"] == {}
    code, _ = update_graphs("--only", "no such case")
    assert code == 2
    assert "no such case" in capsys.readouterr().err


UPDATED = {
    "group": "launch attribute",
    "trouble": None,
    "first": "1",
    "a": "1",
    "b": "2",
    "update": "SUCCESS",
    "after": "2",
    "parameters": "new",
    "back": "SUCCESS",
    "back_after": "1",
    "back_parameters": "new",
}
REFUSED = {**UPDATED, "update": "CODE, ERROR", "after": "1", "parameters": "old"}


@pytest.mark.parametrize(
    ("row", "found", "found_back"),
    [
        (UPDATED, "carried", "carried"),
        ({**UPDATED, "after": "1"}, "SILENTLY KEPT", "carried"),
        ({**UPDATED, "after": "3"}, "WRONG: 3", "carried"),
        ({**UPDATED, "first": "3"}, "NOT REPEATABLE: 3, then 1", "carried"),
        ({**UPDATED, "parameters": "old"}, "WRONG: parameters old", "carried"),
        ({**UPDATED, "b": "1", "after": "1"}, "taken, effect not seen", "carried"),
        ({**UPDATED, "b": "1", "after": "1", "group": "topology"}, "carried", "carried"),
        ({**UPDATED, "b": "1", "after": "3"}, "WRONG: 3", "carried"),
        ({**UPDATED, "back_after": "2"}, "carried", "SILENTLY KEPT"),
        ({**UPDATED, "back_parameters": "old"}, "carried", "WRONG: parameters old"),
        ({**UPDATED, "back": "CODE, ERROR"}, "carried", "refused: ERROR"),
        (REFUSED, "refused", "works"),
        ({**REFUSED, "after": "2"}, "refused, DAMAGED: 2", "works"),
        (
            {**REFUSED, "parameters": "mixed: 1 2"},
            "refused, DAMAGED: parameters mixed: 1 2",
            "works",
        ),
    ],
)
def test_judge_of_an_update(row: dict[str, Any], found: str, found_back: str) -> None:
    assert graph_updates.judge(row) == found
    assert graph_updates.judge_back(row) == found_back


def test_the_readme_has_the_table_of_what_was_measured() -> None:
    root = Path(__file__).parent.parent
    report = json.loads((root / "benchmarks/results/const_memory.json").read_text())
    assert "\n".join(readme_table.table(report)) in (root / "README.md").read_text()
