"""benchmarks/leases.py without a GPU: with processes that stand in for its own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import leases
import pytest
import readme_table
from _lease_figures import OURS, SAVER, SHARED
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

# Calls of one that is slow take longer than the others'.
ANSWERS = """{
    "prepare": [1],
    "modules": "abcd"[: ["stock", "ours", "imported", "slept"].index(one.split()[0]) + 1],
    "replays": [
        request.get("calls", 0) * times * (1.01 if trouble == "slow" and "imported" in one else 1)
        for times in (1e-6, 1e-4)
    ],
}"""


def test_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: dict[str, list[dict[str, Any]]] = {
        "sleep": [{**SLEEP, "way": way, "exec_seconds": 0.01} for way in (OURS, SHARED)],
        "trim": [TRIM],
        "cycles": [CYCLES],
        "lend": [LEND],
    }

    def answer(script: str, section: str, *given: Any, **options: Any) -> dict[str, Any]:
        measured = copy.deepcopy(rows[section])
        if "LD_PRELOAD" in options:
            return {"rows": [{**measured[0], "way": SAVER, "scratch_bytes": None}, *measured]}
        return {"rows": measured}

    monkeypatch.setattr(leases, "measure_apart", answer)
    monkeypatch.setattr(leases, "saver_environment", lambda: {"LD_PRELOAD": "saver.so"})
    run = faked(leases, ANSWERS, tmp_path, monkeypatch)
    code, report = run("", "--workloads", "gpt2")
    assert code == 0
    said = capsys.readouterr().out
    assert said.splitlines() == readme_table.table(report)
    titles = ("sleep and wake", "trim, 10 of 50", "1,000 cycles", "eager steps", "replay")
    assert all(f"\n| {title}" in f"\n{said}" for title in titles)
    assert [row["way"] for row in report["rows"][:3]] == [SAVER, OURS, SHARED]
    assert [row["modules"] for row in report["rows"][-3:]] == [[], ["c"], ["d"]]
    assert {row["call_ratio"] for row in report["rows"][-3:]} == {1.0}
    assert run("slow", "--workloads", "gpt2")[0] == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "replay, imported: call 1.0100",
        "replay, imported: total 1.0100",
    ]
