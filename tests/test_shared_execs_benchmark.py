"""What shared_execs.py measures of whom, what that comes to, and that no failure is hidden."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import readme_table
import shared_execs
from _exec_schedules import PERIODS, SCHEDULES, Schedule, every, load, schedule, steps_for
from fake_team import faked
from shared_execs import BOUNDS, SECTIONS, WORKLOADS, sections_of

Capture = pytest.CaptureFixture[str]

SIZES = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]

# Stands in for _worker.py: answers every command, or fails as the environment says. Each
# config's figures are stock's times something, so that no two can be mistaken for each other.
FAKE_WORKER = """
import json, os, sys
config, kind, workload = sys.argv[1:]
trouble, _, where = os.environ.get("TROUBLE", "").partition("@")
log = open(os.path.join(os.environ["LOG"], f"{workload}.{config}"), "a")
assert kind == "execs"
number = ["stock", "none", "1", "2", "4", "8", "16", "default"].index(config)
for line in sys.stdin:
    request = json.loads(line)
    command = request["command"]
    print(line, end="", file=log, flush=True)
    with open(os.environ["ORDER"], "a") as order:
        print(config, command, file=order)
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


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the benchmark with fake workers; returns its exit code, its report and what each worker
    was asked.
    """
    measured = faked(shared_execs, FAKE_WORKER, tmp_path, monkeypatch)
    log = tmp_path / "log"
    log.mkdir()
    monkeypatch.setenv("LOG", str(log))
    monkeypatch.setenv("ORDER", str(tmp_path / "order"))

    def run(trouble: str, *arguments: str) -> tuple[int, dict[str, Any], dict[str, list[Any]]]:
        code, report = measured(trouble, *arguments)
        asked = {
            path.name: [json.loads(line) for line in path.read_text().splitlines()]
            for path in log.iterdir()
        }
        return code, report, asked

    return run


def commands(asked: list[dict[str, Any]]) -> list[str]:
    """Without repetitions, in the order of the first."""
    return list(dict.fromkeys(request["command"] for request in asked))


def test_both_sections_of_two_workloads(measure: Any, capsys: Capture) -> None:
    code, report, asked = measure("", "--workloads", "llama", "seed")
    assert code == 0
    measured = dict.fromkeys((row["workload"], row["section"]) for row in report["rows"])
    assert list(measured) == [("llama", "memory"), ("llama", "decode"), ("seed", "memory")]
    assert set(asked) == {
        f"{workload}.{config}" for workload in ("llama", "seed") for config in ("stock", *BOUNDS)
    }
    assert commands(asked["seed.4"]) == ["prepare", "memory"]
    assert commands(asked["llama.stock"]) == ["prepare", "memory", "decode"]
    assert commands(asked["llama.4"]) == ["prepare", "memory", "decode"]
    assert capsys.readouterr().out.splitlines() == readme_table.table(report)


def test_memory_rows_tell_the_most(measure: Any, capsys: Capture) -> None:
    _, report, _ = measure("", "--workloads", "seed", "--sections", "memory")
    rows = {row["config"]: row for row in report["rows"]}
    assert list(rows) == ["stock", *BOUNDS]
    assert rows["stock"]["driver_bytes"] == 64 << 20
    assert rows["none"]["nodes"] == [30, 32]
    assert " | 30 to 32 | 64 | 32 | 16 | 8 | 4 | 2 | 1 | **0** |" in capsys.readouterr().out


def test_turns_are_taken_forth_and_back(measure: Any, tmp_path: Path) -> None:
    arguments = ["--workloads", "deep", "--sections", "decode", "--bounds", "none", "default"]
    measure("", *arguments, "--rounds", "3")
    lines = [line.split() for line in (tmp_path / "order").read_text().splitlines()]
    forth = ["stock", "none", "default"]
    loops = [who for who, command in lines if command == "decode"]
    assert loops[:6] == [*forth, *forth]  # warm up
    assert loops[6:15] == [*forth, *reversed(forth), *forth]


def test_decode_rows(measure: Any) -> None:
    code, report, asked = measure(
        "", "--workloads", "deep", "--sections", "decode", "--bounds", "4", "default"
    )
    assert code == 0
    rows = report["rows"]
    assert [(row["read_back"], row["schedule"]) for row in rows] == [
        (read_back, name) for read_back in (False, True) for name in SCHEDULES
    ]
    row = rows[1]  # 0.3 s of steps that take 10 ms
    assert (row["schedule"], row["steps"], row["switches"]) == ("every 10", 30, 3)
    assert list(row["configs"]) == ["stock", "4", "default"]
    assert row["configs"]["stock"]["steps_per_second"] == pytest.approx(100)
    assert row["configs"]["stock"]["vs_stock"] == 1
    assert row["configs"]["4"]["vs_stock"] == pytest.approx(1 / 5)  # steps, not seconds
    assert len([r for r in asked["deep.4"] if r["command"] == "decode"]) == 2 + 3 * len(rows)
    loops = {config: [r for r in asked[f"deep.{config}"] if r["command"] == "decode"]
             for config in row["configs"]}  # fmt: skip
    assert loops["stock"] == loops["4"] == loops["default"]  # the same steps for everybody


def test_table_where_little_was_measured() -> None:
    row = {"section": "decode", "workload": "deep", "schedule": "load", "read_back": False}
    rows = [{**row, "configs": {"1": {"vs_stock": 0.5}}}]
    assert readme_table.table({"rows": rows})[1:] == [
        "| steps per second ÷ stock, default, size changes | as a server's load |",
        "|---|---|",
        "| Gemma-like decode, 16 sizes | - |",
    ]


@pytest.mark.parametrize("where", ["llama.4.prepare", "llama.4.memory", "llama.4.decode"])
def test_a_worker_that_fails_is_told_and_the_others_go_on(
    where: str, measure: Any, capsys: Capture
) -> None:
    code, report, _ = measure(f"fail@{where}", "--workloads", "llama", "--rounds", "1")
    assert code == 1
    workload, config, command = where.split(".")
    (error,) = report["errors"]
    assert error == f"{workload}, max_execs {config}: FAILED {command}: RuntimeError: broken"
    assert report["rows"][-1]["configs"]["1"]["vs_stock"] is not None
    assert error in capsys.readouterr().out


@pytest.mark.parametrize("command", ["prepare", "memory", "decode"])
def test_failing_stock_is_a_failure(command: str, measure: Any, capsys: Capture) -> None:
    code, report, _ = measure(f"fail@llama.stock.{command}", "--workloads", "llama")
    assert code == 1
    (error,) = report["errors"]
    assert error.startswith("llama, max_execs stock: FAILED")
    assert error in capsys.readouterr().out


def test_only_what_a_section_measures_is_started(measure: Any) -> None:
    everything = argparse.Namespace(sections=list(SECTIONS))
    assert sections_of("llama", everything) == ["memory", "decode"]
    assert [name for name in WORKLOADS if "memory" in sections_of(name, everything)] == [*WORKLOADS]
    assert sections_of("mlp", argparse.Namespace(sections=["decode"])) == []
    _, _, asked = measure(
        "", "--workloads", "llama", "mlp", "--sections", "decode", "--bounds", "2"
    )
    assert set(asked) == {"llama.stock", "llama.2"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--sections", "speed"],
        ["--bounds", "3"],
        ["--workloads", "gpt2"],
        ["--rounds", "0"],
        ["--seconds", "x"],
        ["--sections", "decode", "--workloads", "mlp"],
    ],
)
def test_wrong_arguments(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as raised:
        shared_execs.main([*arguments, "--output", str(tmp_path / "o.json")])
    assert raised.value.code == 2


@pytest.mark.parametrize("period", [1, 10, 100])
def test_size_changes_with_each_period(period: int) -> None:
    drawn = every(SIZES, period, 1000, seed=3)
    changes = [step for step in range(1, 1000) if drawn[step] != drawn[step - 1]]
    assert changes == list(range(period, 1000, period))
    assert drawn == every(SIZES, period, 1000, seed=3)
    assert drawn != every(SIZES, period, 1000, seed=4)
    if period == 1:
        assert set(drawn) == set(SIZES)


def test_load_wanders_around_a_quarter_of_the_largest_size() -> None:
    drawn = load(SIZES, 20_000, seed=0)
    assert drawn == load(SIZES, 20_000, seed=0)
    assert set(drawn) < set(SIZES)
    assert 112 <= sum(drawn) / len(drawn) <= 152
    assert min(drawn) < 110 < 150 < max(drawn)
    changes = sum(a != b for a, b in itertools.pairwise(drawn))
    assert len(drawn) / 50 < changes < len(drawn) / 3
    # A few requests begin or end at once: one size up or down, seldom two.
    places = [SIZES.index(size) for size in drawn]
    assert max(abs(a - b) for a, b in itertools.pairwise(places)) <= 2


@pytest.mark.parametrize("sizes", [[1], [1, 2], [4, 1, 2]])
def test_load_stays_within_the_sizes(sizes: list[int]) -> None:
    assert set(load(sizes, 3000, seed=0)) <= set(sizes)
    assert load(sizes, 3000, seed=0) == load(sorted(sizes), 3000, seed=0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_begins_where_a_long_loop_would_be(name: str) -> None:
    drawn = schedule(name, SIZES, 200, seed=5)
    assert len(drawn.timed) == 200
    stays = [len(list(stay)) for _, stay in itertools.groupby(drawn.before)]
    assert len(set(drawn.before)) == len(stays) <= 16
    assert drawn == schedule(name, SIZES, 200, seed=5)
    if name == "load":
        assert 1 <= min(stays) <= max(stays) <= 6
    else:
        assert stays == [min(PERIODS[name], 6)] * 16
        assert drawn.before[-1] != drawn.timed[0]


def test_before_is_in_the_order_of_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    import _exec_schedules

    monkeypatch.setattr(_exec_schedules, "_HISTORY_SIZES", 3)
    history = [7, 1, 2, 7, 3, 1, 1, 3, 2]
    monkeypatch.setattr(_exec_schedules, "every", lambda *_: [*history, 5, 6])
    found = schedule("each step", [], 2, seed=0)
    assert found == Schedule(before=[1, 1, 3, 2], timed=[5, 6])


def test_switches() -> None:
    assert Schedule([9, 4], [4, 4, 5, 5, 4]).switches == 2
    assert Schedule([9, 5], [4, 4]).switches == 1
    assert Schedule([], [4, 4, 5]).switches == 1


@pytest.mark.parametrize(
    ("name", "seconds", "step", "steps"),
    [
        ("each step", 1.0, 0.01, 100),
        ("each step", 0.001, 0.01, 2),
        ("every 10", 1.0, 0.0099, 110),  # whole periods
        ("every 10", 0.1, 0.05, 20),
        ("every 100", 0.1, 0.05, 200),
        ("load", 4.1, 0.02, 250),
        ("load", 0.1, 0.02, 100),
    ],
)
def test_steps(name: str, seconds: float, step: float, steps: int) -> None:
    assert steps_for(name, seconds, step) == steps
