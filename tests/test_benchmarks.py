"""The benchmark's own logic: what it counts as right, and that no failure is hidden."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _apart
import _command
import _worker
import const_memory
import pytest
import readme_table
import trace_to_text
from _apart import run_apart
from fake_team import faked

from cudagraph_pool.integration.worker_process import WorkerError
from cudagraph_pool.tools.trace import minimum_bytes, read_trace

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json.gz"))
Capture = pytest.CaptureFixture[str]

# Stands in for _worker.py: answers every command, or fails as the environment says.
FAKE_WORKER = """
import json, os, sys, time
allocator = sys.argv[1]
trouble, _, where = os.environ.get("TROUBLE", "").partition("@")
reserved = 6 if trouble == "large" and where == allocator else 8 if allocator == "stock" else 4
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
                    "reserved_bytes": reserved << 20, "device_bytes": 0,
                    "driver_seconds": 0.5 if allocator == "ours" else None},
        "replay": 0.1, "minimum_bytes": 4 << 20, "prime": [6 << 20, 5 << 20, 4 << 20],
        "compare": {str(key): graph(key) for key in request.get("order", [])},
    }[command]
    print(json.dumps({"result": result}), flush=True)
"""


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the benchmark with fake workers; returns its exit code and rows by allocator."""
    measured = faked(const_memory, FAKE_WORKER, tmp_path, monkeypatch)

    def run(trouble: str, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
        code, report = measured(trouble, "--workloads", "seed", "--orders", "desc", *arguments)
        return code, {row["allocator"]: row for row in report["rows"]}

    return run


def test_row(measure: Any, capsys: Capture) -> None:
    code, rows = measure("")
    assert code == 0
    assert list(rows) == ["stock", "expandable", "primed", "ours"]
    assert rows["primed"]["primed_bytes"] == [6 << 20, 5 << 20, 4 << 20]
    ours = rows["ours"]
    assert (ours["ratio"], rows["stock"]["ratio"]) == (1.0, 2.0)
    assert (ours["capture_vs_stock"], ours["driver_seconds"]) == (2.0, 0.5)
    assert (ours["captures"], ours["replay_rounds"]) == (7, 7)
    assert ours["replay_vs_stock"] == 1.0
    assert ours["outputs"]["equal_to_eager"] == 3
    (line,) = capsys.readouterr().out.splitlines()[2:]
    assert line == (
        "| pinned copies and `a**2 + b*2`, 128 sizes | largest first | 4 | **4 (1.000)** | 1.000 "
        "| 8 (2.000) | 4 (1.000) | 4 (1.000) | 6 (1.500) | 2.00 | 1.000 |"
    )


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


def test_what_could_not_be_primed_is_not_measured(measure: Any) -> None:
    code, rows = measure("fail@primed.prime")
    assert code == 1
    assert rows["primed"]["reserved_bytes"] is None
    assert rows["ours"]["ratio"] == 1.0


def test_orders_share_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = faked(const_memory, FAKE_WORKER, tmp_path, monkeypatch)
    code, report = measured("", "--workloads", "seed", "--allocators", "primed", "ours")
    assert code == 0
    rows = [(row["order"], row["allocator"]) for row in report["rows"]]
    assert rows == [
        (order, name)
        for order in ("asc", "desc", "shuffled")
        for name in ("stock", "primed", "ours")
    ]
    table = "\n".join(readme_table.table(report))
    assert "primed with the minimum" in table
    assert "expandable" not in table, "nothing was measured of it"
    assert "| 8 (2.000) | 8 (2.000) | 4 (1.000) |" in readme_table.short_table(report)[2]


def test_primes_with_what_takes_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from cudagraph_pool.tools.measure import Captures

    def minimum(captures: Captures, order: list[int]) -> int:
        assert captures._primed_bytes == 0
        return 100

    def capture(captures: Captures, order: list[int]) -> argparse.Namespace:
        reserved = {100: 180, 110: 120, 125: 150}
        return argparse.Namespace(reserved_bytes=reserved[captures._primed_bytes])

    monkeypatch.setattr(Captures, "minimum_bytes", minimum)
    monkeypatch.setattr(Captures, "capture", capture)
    captures = Captures.__new__(Captures)
    for _ in range(2):
        assert captures.prime([1, 2]) == [180, 120, 150]
        assert captures._primed_bytes == 110


def test_failing_reference_is_a_failure(measure: Any) -> None:
    code, rows = measure("die@stock.minimum_bytes")
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
    found = const_memory.judge_outputs({"5": own}, {"5": stock})
    assert found[verdict] in (1, [5])
    assert sum(value if isinstance(value, int) else len(value) for value in found.values()) == 1


def test_orders() -> None:
    keys = [3, 1, 2]
    assert const_memory.order_keys(keys, "asc", 0) == [1, 2, 3]
    assert const_memory.order_keys(keys, "desc", 0) == [3, 2, 1]
    many = list(range(100))
    shuffled = const_memory.order_keys(many, "shuffled", 1)
    assert sorted(shuffled) == many
    assert shuffled == const_memory.order_keys(many[::-1], "shuffled", 1)
    assert shuffled != const_memory.order_keys(many, "shuffled", 2)


NEED_A_GPU = (
    "combinations const_memory continuous_batching footprint graph_runner layer_graphs "
    "multi_stream shared_execs"
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


@pytest.mark.parametrize(
    ("name", "words"),
    [("multi_stream", "8x10000-a0.3-f0.3"), ("const_memory", "two-streams")],
)
def test_help(name: str, words: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(name).main(["--help"])
    assert caught.value.code == 0
    assert words in capsys.readouterr().out


@dataclass
class Captured:
    seconds: float


class Captures:
    """Stands in for what a process captures."""

    workload = argparse.Namespace(keys=range(4, 9, 4))

    def capture(self, order: list[int]) -> Captured:
        return Captured(len(order) / 2)

    def compare(self, order: list[int]) -> dict[int, Captured]:
        if not order:
            raise ValueError("nothing to compare")
        return {key: Captured(key) for key in order}


def test_a_worker_answers_what_its_captures_say(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        {"command": "prepare"},
        {"command": "capture", "order": [1, 2, 3]},
        {"command": "compare", "order": [2]},
        {"command": "compare", "order": []},
        {"command": "capture", "order": [1]},
    ]
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    answers = io.StringIO()
    assert _worker.serve(answers, Captures) == 1
    assert [json.loads(line) for line in answers.getvalue().splitlines()] == [
        {"result": [4, 8]},
        {"result": {"seconds": 1.5}},
        {"result": {"2": {"seconds": 2}}},
        {"error": "ValueError: nothing to compare"},
    ]


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
    from cudagraph_pool.tools.measure import peak_live_bytes

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


@pytest.mark.parametrize(
    ("kind", "name"), [("graphs", "mlp"), ("execs", "deep"), ("streams", "2x1000-a0.1-f0.3@7")]
)
def test_each_kind_of_worker_is_there(kind: str, name: str) -> None:
    pytest.importorskip("torch")
    assert callable(_worker.KINDS[kind]([name], "stock"))


def test_first_captures_of_a_runner_are_a_median(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    import graph_runner

    apart = iter([(52, 1.5, 3), (20, 0.7, 6), (52, 1.6, 3), (20, 0.1, 8), (52, 9, 3), (22, 0.2, 6)])

    def answer(script: str, model: str, way: str, calls: int) -> dict[str, Any]:
        if way == "turns":
            times = dict.fromkeys(("capture", "call", "idle", "step"), 1.0)
            return dict.fromkeys(graph_runner.WAYS, times)
        memory, first, largest = next(apart)
        return {"memory": memory, "first": first, "largest": largest}

    monkeypatch.setattr(_command, "device", lambda: {"gpu": "none"})
    monkeypatch.setattr(graph_runner, "measure_apart", answer)
    path = tmp_path / "report.json"
    assert graph_runner.main(["--models", "mlp", "--output", str(path)]) == 0
    report = json.loads(path.read_text())
    (row,) = report["rows"]
    assert report["options"]["rounds"] == 3
    assert [row["ours"][name] for name in ("memory", "first", "largest")] == [22, 0.2, 8]
    assert [row["stock"][name] for name in ("memory", "first", "largest")] == [52, 1.6, 3]


def test_unseen_models_beside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = faked(const_memory, FAKE_WORKER, tmp_path, monkeypatch)
    code, report = measure("", "--workloads", "mlp", "unseen", "--orders", "asc")
    assert code == 0
    measured = dict.fromkeys(row["workload"] for row in report["rows"])
    assert list(measured) == ["mlp", *readme_table.UNSEEN]
    lines = readme_table.table(report)
    assert lines[3].startswith("| SqueezeNet, 8 sizes | smallest first | 4 | **4 (1.000)** |")


def test_each_workload_that_may_be_asked_for_is_there() -> None:
    pytest.importorskip("torch")
    from workloads import WORKLOADS

    asked = {*const_memory.WORKLOADS, *(n for names in const_memory.GROUPS.values() for n in names)}
    assert asked <= WORKLOADS.keys()


def test_a_model_of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results are those of its size, and stay where they are."""
    torch = pytest.importorskip("torch")
    import library_models

    double = library_models.Model(
        torch.nn.Identity, lambda size: torch.zeros(size, 3), [4, 8], run=lambda model, x: 2 * x
    )
    monkeypatch.setitem(library_models.MODELS, "twice", double)
    workload = library_models.LibraryModel(torch.device("cpu"), "twice-kept")
    for key in (8, 4):
        workload.fill(key, seed=key)
        workload.step(key)
    (large,), (small,) = workload.outputs(8), workload.outputs(4)
    assert large.shape == (8, 3)
    assert torch.equal(small, 2 * workload._given[:4])
    workload.clear(4)
    workload.step(4)
    assert workload.outputs(4)[0] is small
    assert torch.equal(small, 2 * workload._given[:4])


def test_a_process_that_runs_to_its_end(capsys: Capture) -> None:
    program = "import sys; print('warning'); print('said', file=sys.stderr); print('{\"a\": 1}')"
    assert run_apart(["-c", program], os.environ) == {"a": 1}
    with pytest.raises(WorkerError, match=r"^the process ended with code 1: no memory$"):
        run_apart(["-c", "import sys; sys.exit('no memory')"], os.environ)
    assert "no memory" in capsys.readouterr().err
    with pytest.raises(WorkerError, match=r"^no answer in 1 s$"):
        run_apart(["-c", "import time; time.sleep(60)"], os.environ, 1)


def test_a_script_that_measures_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from _apart import run_script\n"
        "def measure(*arguments):\n"
        "    os.system('echo from a library')\n"
        "    return {'given': arguments, 'pool': os.environ['CUDAGRAPH_POOL']}\n"
        "sys.exit(run_script(lambda: 3, measure))\n"
    )
    paths = [str(Path(_apart.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    found = _apart.measure_apart(str(script), "a", 2, CUDAGRAPH_POOL="1")
    assert found == {"given": ["a", 2], "pool": "1"}
    assert subprocess.run([sys.executable, script]).returncode == 3


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


@pytest.mark.parametrize("name", ["continuous_batching", "layer_graphs"])
def test_reports_without_a_table(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    path = Path(__file__).parent.parent / f"benchmarks/results/{name}.json"
    monkeypatch.setattr(sys, "argv", ["readme_table.py", str(path)])
    assert readme_table.main() == 2
    assert capsys.readouterr() == ("", f"{path}: this script prints no table of it\n")


def test_reports_have_a_line_for_each_row(tmp_path: Path) -> None:
    row = {"name": "r", "figures": [1.5, None, "ü\n"] * 30}
    report = {"options": {"seed": 0}, "rows": [row] * 4, "of": {"a": row, "b": []}, "empty": []}
    path = tmp_path / "report.json"
    _command.write_report(report, path)
    assert json.loads(path.read_text()) == report
    lines = path.read_text().splitlines()
    assert lines[1:6] == ['"options": {', '"seed": 0', "},", '"rows": [', f"{json.dumps(row)},"]
    assert len(lines) == 2 + 3 + 6 + 4 + 1
    assert list(tmp_path.iterdir()) == [path]
