"""What two_streams.py counts as good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import readme_table
import two_streams
from fake_team import faked
from test_benchmarks import FAKE_WORKER

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return faked(two_streams, FAKE_WORKER, tmp_path, monkeypatch)


def test_all_models(measure: Any, capsys: Capture) -> None:
    code, report = measure("")
    assert code == 0
    assert [(row["workload"], row["allocator"]) for row in report["rows"]] == [
        (model, allocator)
        for model in ("streaming", "branches")
        for allocator in ("stock", "option", "ours")
    ]
    assert report["above"] == []
    assert capsys.readouterr().out.splitlines() == readme_table.table(report)


def test_table_of_the_readme(measure: Any) -> None:
    _, report = measure("")
    lines = readme_table.table(report)
    assert len(lines) == 2 + 2
    assert lines[3] == "| blocks of two branches, 8 sizes, smallest first | 4 | 8 (2.000) " + (
        "| 4 (1.000) | **4 (1.000)** |"
    )


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
    assert two_streams.above(rows) == ["w asc"] * (option < 5) + ["w desc"]
