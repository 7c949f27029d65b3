"""What const_memory.py counts as good of models on two streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import const_memory
import pytest
import readme_table
from fake_team import faked
from test_benchmarks import FAKE_WORKER

Capture = pytest.CaptureFixture[str]
ASKED = ["--allocators", "stock", "option", "ours", "--orders", "asc", "--workloads"]


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return faked(const_memory, FAKE_WORKER, tmp_path, monkeypatch)


def test_all_models(measure: Any, capsys: Capture) -> None:
    code, report = measure("", *ASKED, "two-streams")
    assert code == 0
    assert [(row["workload"], row["allocator"]) for row in report["rows"]] == [
        (model, allocator)
        for model in ("streaming", "branches")
        for allocator in ("stock", "option", "ours")
    ]
    lines = readme_table.table(report)
    assert capsys.readouterr().out.splitlines() == lines
    assert len(lines) == 2 + 2
    assert lines[3] == "| blocks of two branches, 8 sizes, smallest first | 4 | 8 (2.000) " + (
        "| 4 (1.000) | **4 (1.000)** |"
    )


@pytest.mark.parametrize("option", [4, 5, 6])
def test_above_is_found_by_workload_and_order(option: int) -> None:
    rows = [
        {"workload": name, "order": order, "allocator": allocator, "reserved_bytes": reserved}
        for name in ("streaming", "mlp")
        for order, of in (("asc", (9, option, 5)), ("desc", (4, 4, 5)), ("shuffled", (9, 9, None)))
        for allocator, reserved in zip(("stock", "option", "ours"), of, strict=True)
    ]
    said = "reserves MORE than stock or the option"
    above = ["asc"] * (option < 5) + ["desc"]
    assert const_memory.above(rows) == [f"streaming {order}: {said}" for order in above]
