"""benchmarks/leases.py without a GPU: with processes that stand in for its own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import leases
import pytest
import readme_table
from _apart import WorkerError
from _lease_figures import OURS, SAVER, SHARED, judge
from fake_team import faked

MIB = 1 << 20
GIB = 1 << 30

SLEEP = {
    "workload": "gpt2",
    "way": OURS,
    "reserved_bytes": 10 * GIB,
    "scratch_bytes": 10 * GIB,
    "pages_bytes": 10 * GIB,
    "device_bytes": 10 * GIB,
    "back_bytes": 0,
    "sleep_seconds": 0.1,
    "wake_seconds": 0.2,
    "mappings": 5000,
    "handles": 300,
    "first_ratio": 1.001,
    "every_ratio": 1.0,
    "repeatable": True,
    "equal": True,
}
TRIM = {
    "order": "asc",
    "before_bytes": 100 * MIB,
    "reserved_bytes": 22 * MIB,
    "touched_bytes": 20 * MIB,
    "alone_bytes": 18 * MIB,
    "seconds": 0.001,
    "equal": True,
}
HELD = {
    "driver_bytes": 50 * MIB,
    "host_bytes": GIB,
    "host_maps": 900,
    "handles": 70,
    "addresses": 9,
    "ranges": 9,
    "page_mappings": 300,
    "reserved_bytes": 140 * MIB,
}
CYCLES = {"cycles": 1000, "wrong": 0, "seconds": 20.0, "before": HELD, "after": HELD}
LEND = {
    "reserved_bytes": 2 * GIB,
    "peak_bytes": {"lent": 0, "alone": 1100 * MIB},
    "step_ratio": 1.01,
    "equal": True,
    "free_bytes": 2 * GIB,
    "lendable_bytes": 2 * GIB,
    "extra_bytes": 0,
    "waited": False,
    "ordered": True,
}
REPLAY = {"way": "imported", "call_ratio": 1.0, "total_ratio": 1.005}
GOOD = {"sleep": SLEEP, "trim": TRIM, "cycles": CYCLES, "lend": LEND, "replay": REPLAY}

# Calls of one that is slow take longer than the others'.
ANSWERS = """{
    "prepare": [1],
    "modules": "abcd"[: ["stock", "ours", "imported", "slept"].index(one.split()[0]) + 1],
    "replays": [
        request.get("calls", 0) * times * (1.01 if trouble == "slow" and "imported" in one else 1)
        for times in (1e-6, 1e-4)
    ],
}"""


@pytest.mark.parametrize(
    ("section", "place", "value", "said"),
    [
        ("sleep", "equal", False, "outputs are not those before"),
        ("sleep", "pages_bytes", 9 * GIB, "bytes of scratch went"),
        ("sleep", "device_bytes", 9 * GIB, "the device has 9,663,676,416 bytes more"),
        ("sleep", "back_bytes", -8 * MIB, "8,388,608 bytes are gone"),
        ("sleep", "first_ratio", 1.02, "the first replay takes 1.020"),
        ("sleep", "wake_seconds", 0.23, "a wake of 0.2300 s, not 0.2283"),
        ("trim", "touched_bytes", 19 * MIB, "19,922,944 are touched"),
        ("trim", "equal", False, "outputs are not eager's"),
        ("cycles", "wrong", 3, "3 outputs are wrong"),
        ("cycles", "after", {**HELD, "driver_bytes": 60 * MIB}, "bytes of the driver lost"),
        ("cycles", "after", {**HELD, "host_bytes": 2 * GIB}, "bytes of the host lost"),
        ("cycles", "after", {**HELD, "host_maps": 990}, "90 maps of the host more"),
        ("cycles", "after", {**HELD, "addresses": 11}, "2 addresses lost"),
        ("lend", "peak_bytes", {"lent": 500 * MIB, "alone": 1100 * MIB}, "a peak lower by"),
        ("lend", "lendable_bytes", GIB, "free bytes lendable"),
        ("lend", "extra_bytes", GIB, "bytes for a block of 95 %"),
        ("lend", "equal", False, "outputs differ"),
        ("lend", "waited", True, "the host waits"),
        ("lend", "ordered", False, "is not ordered behind replays"),
        ("replay", "call_ratio", 1.006, "call 1.0060"),
    ],
)
def test_each_figure_is_judged(section: str, place: str, value: Any, said: str) -> None:
    row = {"lease": section, **GOOD[section]}
    assert judge(row) == []
    (problem,) = judge({**row, place: value})
    assert said in problem


def test_what_is_not_judged() -> None:
    """Another's figures, a wake in which executables are made, and a pool that has slept."""
    slow = {"lease": "sleep", **SLEEP, "wake_seconds": 0.5}
    assert judge({**slow, "way": SAVER}) == judge({**slow, "way": SHARED}) == []
    assert len(judge(slow)) == 1
    assert judge({"lease": "replay", **REPLAY, "way": "slept", "call_ratio": 1.1}) == []


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs it; what its processes answer can be told to be other figures, or to fail."""
    rows: dict[str, list[dict[str, Any]]] = {
        "sleep": [{**SLEEP, "way": way, "exec_seconds": 0.01} for way in (OURS, SHARED)],
        "trim": [TRIM],
        "cycles": [CYCLES],
        "lend": [LEND],
    }

    def answer(script: str, section: str, *given: Any, **options: Any) -> dict[str, Any]:
        measured = copy.deepcopy(rows[section])
        if "LD_PRELOAD" in options:
            if not measured:
                raise WorkerError("the process ended with code 1: CUresult error")
            return {"rows": [{**measured[0], "way": SAVER, "scratch_bytes": None}, *measured]}
        if not measured:
            raise WorkerError("the process ended with code 1: no memory")
        return {"rows": measured}

    monkeypatch.setattr(leases, "measure_apart", answer)
    monkeypatch.setattr(leases, "saver_environment", lambda: {"LD_PRELOAD": "saver.so"})
    started = faked(leases, ANSWERS, tmp_path, monkeypatch)

    def start(trouble: str, fails: str = "") -> tuple[int, dict[str, Any]]:
        if fails:
            rows[fails] = []
        return started(trouble, "--workloads", "gpt2")

    return start


def test_leases(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run("")
    assert code == 0
    said = capsys.readouterr().out
    assert said.splitlines() == readme_table.table(report)
    titles = ("sleep and wake", "trim, 10 of 50", "1,000 cycles", "eager steps", "replay")
    assert all(f"\n| {title}" in f"\n{said}" for title in titles)
    assert [row["way"] for row in report["rows"][:3]] == [SAVER, OURS, SHARED]
    assert [row["modules"] for row in report["rows"][-3:]] == [[], ["c"], ["d"]]
    assert {row["call_ratio"] for row in report["rows"][-3:]} == {1.0}


def test_a_replay_that_costs_more(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("slow")[0] == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "replay, imported: call 1.0100",
        "replay, imported: total 1.0100",
    ]


def test_processes_that_fail(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run("", fails="sleep")
    assert code == 1
    assert [row["lease"] for row in report["rows"]][:2] == ["trim", "cycles"]
    said = capsys.readouterr().out
    assert f"sleep gpt2, with {SAVER}: FAILED the process ended with code 1: CUresult" in said
    assert "sleep ['gpt2', 5]: FAILED the process ended with code 1: no memory" in said


def test_pages_and_scratch() -> None:
    pytest.importorskip("torch")
    from _lease_captures import scratch_bytes, touched_pages

    snapshot = {
        "stats": {"page_bytes": 2 * MIB, "reserved_bytes": 8 * MIB},
        "blocks": [{"pieces": [(7, 0, 512), (9, 512, 512)]}, {"pieces": [(7, 512, 512)]}],
        "ranges": [
            {"address": 64 * MIB, "pages": [7, 8]},
            {"address": 128 * MIB, "pages": [9, 7, 10]},
        ],
    }
    assert scratch_bytes(snapshot) == 4 * MIB
    entries = [
        {"action": "alloc", "addr": 65 * MIB, "size": MIB + 512},
        {"action": "free_completed", "addr": 132 * MIB, "size": MIB},
        {"action": "alloc", "addr": 130 * MIB, "size": 2 * MIB},
        {"action": "alloc", "addr": 512 * MIB, "size": 2 * MIB},
    ]
    assert touched_pages(entries, snapshot) == {7, 8}


def test_a_step_of_the_unet(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from _unet import Unet

    assert len(Unet.keys) == 20
    monkeypatch.setattr(Unet, "shapes", ((8, 2), (16, 1)))
    unet = Unet(torch.device("cpu"), widths=(32, 64), blocks=1)
    unet.fill(1, seed=1)
    unet.step(1)
    (image,) = unet.outputs(1)
    assert image.shape == (1, 4, 16, 16)
    assert image.isfinite().all()
    assert image.std() > 0.01
