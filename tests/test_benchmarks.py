"""The benchmarks without a GPU: each runs with processes that stand in for its own, says what it
found, and hides no failure.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _apart
import _command
import _worker
import combinations
import const_memory
import multi_stream
import pytest
import readme_table
import shared_execs
import trace_to_text
import vllm_engine
from _apart import run_apart
from _engine import judge as judge_engine
from fake_team import faked

from cudagraph_pool.integration.worker_process import WorkerError
from cudagraph_pool.tools.footprint import Footprint
from cudagraph_pool.tools.trace import minimum_bytes, read_trace

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json.gz"))
MIB = 1 << 20
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
    """Runs const_memory.py with fake workers; returns its exit code and rows by allocator."""
    measured = faked(const_memory, FAKE_WORKER, tmp_path, monkeypatch)

    def run(trouble: str, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
        code, report = measured(trouble, "--workloads", "seed", "--orders", "desc", *arguments)
        return code, {row["allocator"]: row for row in report["rows"]}

    return run


def test_const_memory(measure: Any, capsys: Capture) -> None:
    code, rows = measure("")
    assert (code, list(rows)) == (0, ["stock", "expandable", "primed", "ours"])
    ours = rows["ours"]
    assert (ours["ratio"], rows["stock"]["ratio"]) == (1.0, 2.0)
    assert (ours["capture_vs_stock"], ours["driver_seconds"]) == (2.0, 0.5)
    assert ours["outputs"]["equal_to_eager"] == 3
    (line,) = capsys.readouterr().out.splitlines()[2:]
    assert line == (
        "| pinned copies and `a**2 + b*2`, 128 sizes | largest first | 4 | **4 (1.000)** | 1.000 "
        "| 8 (2.000) | 4 (1.000) | 4 (1.000) | 6 (1.500) | 2.00 | 1.000 |"
    )


@pytest.mark.parametrize(
    ("trouble", "allocator", "said"),
    [
        ("die@ours.replay", "ours", "code 9: last words"),
        ("fail@primed.prime", "primed", "RuntimeError: broken"),
        ("hang@ours.capture", "ours", "no answer in 3 s"),
    ],
)
def test_a_worker_that_fails_is_a_row_and_an_exit_code(
    trouble: str, allocator: str, said: str, measure: Any
) -> None:
    code, rows = measure(trouble, "--timeout", "3")
    assert code == 1
    assert said in rows[allocator]["error"]
    others = [row for name, row in rows.items() if name != allocator]
    assert all(row["error"] is None for row in others), "the others go on"


def test_wrong_outputs_of_ours_fail_and_stocks_are_a_finding(measure: Any, capsys: Capture) -> None:
    for allocator, failed in (("ours", 1), ("stock", 0)):
        code, rows = measure(f"wrong@{allocator}")
        assert code == failed
        assert rows[allocator]["outputs"]["differ"] == [3]
        assert ("WRONG at sizes [3]" in capsys.readouterr().out) == failed


def test_two_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    run = faked(const_memory, FAKE_WORKER, tmp_path, monkeypatch)
    asked = ["--allocators", "stock", "option", "ours", "--orders", "asc", "--workloads"]
    code, report = run("", *asked, "two-streams")
    assert code == 0
    assert capsys.readouterr().out.splitlines() == readme_table.table(report)
    assert run("large@ours", *asked, "branches")[0] == 1
    assert "branches asc: reserves MORE than stock or the option" in capsys.readouterr().out


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


# Stands in for _worker.py: answers every command, or fails as the environment says.
STREAMS_WORKER = """
import json, os, sys
allocator = sys.argv[1]
trouble, _, where = os.environ.get("TROUBLE", "").partition("@")
number = ["stock", "option", "ours"].index(allocator)
asked = []
for line in sys.stdin:
    request = json.loads(line)
    command = request["command"]
    asked.append(command)
    here = where == f"{allocator}.{command}"
    if here and trouble == "fail":
        print(json.dumps({"error": "RuntimeError: broken"}), flush=True)
        sys.exit(1)
    wrong = 17 if here and trouble == "wrong" and request["key"] == 1 else 0
    result = {
        "prepare": {},
        "capture": {"seconds": [0.1, 0.2, 0.09][number], "reserved_bytes": (400 >> number) << 20,
                    "device_bytes": 0, "driver_seconds": 0.01 if allocator == "ours" else None},
        "replay": [0.02, 0.02, 0.021][number],
        "wrong_sums": wrong, "release": None,
    }[command]
    print(json.dumps({"result": result}), flush=True)
"""


def test_multi_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    names = ["2x1000-a0.1-f0.1", "4x1000-a0.3-f0.3"]
    run = faked(multi_stream, STREAMS_WORKER, tmp_path, monkeypatch)
    code, report = run("", "--configurations", *names)
    assert code == 0
    ours = report["rows"][0]["allocators"]["ours"]
    assert ours["ratio"] == (100 << 20) / report["rows"][0]["peak_bytes"]
    assert (ours["capture_vs_stock"], ours["replay_vs_stock"]) == pytest.approx((0.9, 1.05))
    assert capsys.readouterr().out.splitlines() == readme_table.table(report)
    for trouble, said in (
        ("wrong@stock.wrong_sums", f"{names[1]} seed 0, stock: 17 WRONG sums"),
        ("fail@ours.capture", "ours: FAILED"),
    ):
        assert run(trouble, "--configurations", *names)[0] == 1
        assert said in capsys.readouterr().out


# Stands in for _worker.py: answers every command, or fails as the environment says. Each
# config's figures are stock's times something, so that no two can be mistaken for each other.
EXECS_WORKER = """
import json, os, sys
config, kind, workload = sys.argv[1:]
trouble, _, where = os.environ.get("TROUBLE", "").partition("@")
assert kind == "execs"
number = ["stock", "none", "1", "2", "4", "8", "16", "default"].index(config)
for line in sys.stdin:
    request = json.loads(line)
    command = request["command"]
    if trouble == "fail" and where == f"{workload}.{config}.{command}":
        print(json.dumps({"error": "RuntimeError: broken"}), flush=True)
        sys.exit(1)
    result = {
        "prepare": [1, 2, 4, 8],
        "memory": {
            "driver_bytes": (64 >> number) << 20, "nodes": [30, 32],
        },
        "decode": 0.01 * (1 + number) * len(request.get("timed", [])),
    }[command]
    print(json.dumps({"result": result}), flush=True)
"""


def test_shared_execs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    run = faked(shared_execs, EXECS_WORKER, tmp_path, monkeypatch)
    asked = ["--workloads", "llama", "--bounds", "4", "default", "--rounds", "1"]
    code, report = run("", *asked)
    assert code == 0
    rows = report["rows"]
    assert list(dict.fromkeys(row["section"] for row in rows)) == ["memory", "decode"]
    assert rows[-1]["configs"]["4"]["vs_stock"] == pytest.approx(1 / 5), "steps, not seconds"
    assert capsys.readouterr().out.splitlines() == readme_table.table(report)
    for who in ("4", "stock"):
        code, report = run(f"fail@llama.{who}.decode", *asked)
        error = f"llama, max_execs {who}: FAILED decode: RuntimeError: broken"
        assert (code, report["errors"]) == (1, [error])


class Engine:
    """Stands for the processes: answers, or fails where it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fails: tuple[str, int] | None = None

    def __call__(
        self, arguments: Sequence[str], environment: Mapping[str, str], seconds: float
    ) -> dict[str, Any]:
        run = json.loads(arguments[1])
        request, number = environment["CUDAGRAPH_POOL"], run["round"]
        self.asked.append(f"{run['cudagraph_mode']} {run['all_reduce']} {request}")
        if (request, number) == self.fails:
            raise WorkerError("ended with code 1: out of memory")
        stock = request == "0"
        return {
            "captures": 902,
            "captures_of_ours": 0 if stock else 902,
            "pool": (128 if stock else 73) * MIB,
            "minimum": 0 if stock else 72 * MIB,
            "device": (300 if stock else 240) * MIB,
            "estimate": 0,
            "saved": 0 if stock else 30 * MIB,
            "kv_tokens": 1000 if stock else 1010,
            # Every round takes twice as long as the one before.
            "capture_seconds": (2.0 if stock else 2.5) * 2**number,
            "tokens_per_second": 5000.0 / 2**number,
            "digest": f"{run['cudagraph_mode']} {run['all_reduce']}",
        }


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(vllm_engine, "run_apart", made)
    monkeypatch.setattr(vllm_engine, "missing", lambda gpus: None)
    monkeypatch.setattr(_command, "device", lambda: {"torch": "2.11.0", "gpu": "H100"})
    return made


def run_engine(output: Path, *arguments: str) -> int:
    common = ["--models", "1b", "--modes", "v2-FULL", "--allocators", "stock", "ours"]
    return vllm_engine.main([*common, "--rounds", "2", "--output", str(output), *arguments])


def test_runs_take_turns_and_become_medians(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_engine(tmp_path / "rows.json") == 0
    assert engine.asked == [f"FULL custom {request}" for request in "0110"]
    cells = [line.split() for line in capsys.readouterr().out.splitlines()]
    stock, ours = cells[2:4]
    assert stock[:8] == ["1b", "1", "v2-FULL", "custom", "stock", "902", "0", "128"]
    assert ours[:9] == ["1b", "1", "v2-FULL", "custom", "ours", "902", "902", "73", "1.014"]
    assert ours[9:18] == ["240", "0.800", "0", "30", "1,010", "1.010", "3.75", "1.250", "3,750"]


def test_a_second_call_runs_what_is_missing(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    engine.fails = ("1", 1)
    assert run_engine(path) == 1
    failed = "1b 1 v2-FULL custom ours: ended with code 1: out of memory"
    assert failed in capsys.readouterr().out
    engine.fails, engine.asked = None, []
    assert run_engine(path, "--parallel", "1", "2") == 0
    assert engine.asked == [
        *(f"FULL {which}" for which in ("custom 0", "custom 1", "nccl 0", "nccl 1")),
        *(f"FULL {which}" for which in ("nccl 1", "nccl 0", "custom 1", "custom 0", "custom 1")),
    ]
    path.write_text(json.dumps({**json.loads(path.read_text()), "gpu": "H200"}))
    with pytest.raises(SystemExit, match="name another --output"):
        run_engine(path)


@pytest.mark.parametrize(
    ("figures", "problems"),
    [
        ({}, []),
        ({"captures_of_ours": 0}, ["synchronous: 0 of 4 captures in pools of ours"]),
        ({"digest": "d2"}, ["synchronous: other tokens than stock's"]),
    ],
)
def test_an_engine_that_fails(figures: dict[str, Any], problems: list[str]) -> None:
    row = {"batching": "synchronous", "captures": 4, "digest": "d1"}
    ours = {**row, "allocator": "ours", "captures_of_ours": 4, **figures}
    stock = {**row, "allocator": "stock", "captures_of_ours": 0}
    assert judge_engine([stock, ours], lambda found: found["batching"]) == problems


def test_layer_graphs() -> None:
    pytest.importorskip("torch")
    import layer_graphs

    row = {"captures": 4, "captures_of_ours": 4, "pool": 100, "minimum": 100, "digest": "d1"}
    eager = {"way": "eager", "allocator": "stock", "step_seconds": 1.0, **row}
    shared = {**eager, "way": "unnamed", "allocator": "shared"}
    assert layer_graphs.judge([eager, shared]) == []
    for change in ({"captures_of_ours": 0}, {"digest": "d2"}, {"pool": 102}):
        assert len(layer_graphs.judge([eager, shared | change])) == 1


def test_combinations() -> None:
    eager = combinations.Combination("ddp", True, "eager", "stock")
    ours = eager._replace(graphs="step", allocator="ours")
    stock = ours._replace(allocator="stock")
    good: dict[str, Any] = {"losses": [1.0, 0.5], "graph_pool_bytes": 3 << 20}
    bad = {"error": "RuntimeError: no"}
    assert combinations.works({eager: good, ours: good}, ours)
    assert not combinations.works({eager: good, ours: {**good, "losses": [1.0, 0.51]}}, ours)
    for theirs, own, verdict in ((good, good, True), (good, bad, False), (bad, bad, True)):
        assert combinations.no_worse({eager: good, stock: theirs, ours: own}, ours) == verdict
    found = {eager: good, stock: bad, ours: good}
    rows = [{**combination._asdict(), **of} for combination, of in found.items()]
    assert combinations.table(rows)[2:] == [
        *("| ddp | yes | step | no (1) | 3 MiB |", "", "1. `RuntimeError: no`")
    ]


def test_footprint() -> None:
    from footprint import judge

    stock = Footprint(250 * MIB, 256 * MIB, 100 * MIB, 80 * MIB)
    larger = Footprint(250 * MIB, 258 * MIB, 102 * MIB, 83 * MIB)
    assert judge({"graphs, stock": stock, "graphs, ours": stock}) == []
    assert len(judge({"graphs, stock": stock, "graphs, ours": larger})) == 3
    assert judge({"graphs, stock": "failed", "graphs, ours": stock}) == ["graphs, stock failed"]
    compiler = "torch._inductor.exc.InductorError: CantSplit"
    assert judge({"graphs, stock": compiler, "graphs, ours": compiler}) == []


NEED_A_GPU = (
    "combinations const_memory continuous_batching footprint graph_runner layer_graphs leases "
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


@pytest.mark.parametrize("path", TRACES[:1], ids=lambda path: path.stem)
def test_minimum_from_pytorchs_record_is_that_of_the_trace(path: Path) -> None:
    """The record that PyTorch would have made of a recorded capture gives the trace's minimum."""
    pytest.importorskip("torch")
    from _measure import peak_live_bytes

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
    ("kind", "name"),
    [
        ("graphs", "mlp"),
        ("execs", "deep"),
        ("streams", "2x1000-a0.1-f0.3@7"),
        ("replays", "mlp"),
    ],
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


@pytest.mark.parametrize(
    "name",
    ["layer_graphs", "continuous_batching", "--short two_streams", "--short exec_decode_deep"],
)
def test_reports_without_a_table(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    *options, stem = name.split()
    path = Path(__file__).parent.parent / f"benchmarks/results/{stem}.json"
    monkeypatch.setattr(sys, "argv", ["readme_table.py", *options, str(path)])
    assert readme_table.main() == 2
    assert capsys.readouterr() == ("", f"{path}: this script prints no table of it\n")
