"""What multi_stream.py counts as right, what its figures come to, and that no failure is hidden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import multi_stream
import pytest
import readme_table
from fake_team import faked

Capture = pytest.CaptureFixture[str]

NAMES = ["2x1000-a0.1-f0.1", "4x1000-a0.3-f0.3", "8x1000-a0.3-f0.3"]

# Stands in for _worker.py: answers every command, or fails as the environment says.
FAKE_WORKER = """
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


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return faked(multi_stream, FAKE_WORKER, tmp_path, monkeypatch)


def test_rows_and_table(measure: Any, capsys: Capture) -> None:
    code, report = measure("", "--configurations", *NAMES, "--seeds", "0", "1")
    assert code == 0
    rows = report["rows"]
    assert [(row["configuration"], row["seed"]) for row in rows] == [
        (name, seed) for name in NAMES for seed in (0, 1)
    ]
    row = rows[0]
    assert list(row["allocators"]) == ["stock", "option", "ours"]
    ours = row["allocators"]["ours"]
    assert ours["ratio"] == (100 << 20) / row["peak_bytes"]
    assert ours["capture_vs_stock"] == pytest.approx(0.9)
    assert ours["replay_vs_stock"] == pytest.approx(1.05)
    assert (ours["captures"], ours["replay_rounds"]) == (7, 7)
    assert (ours["wrong_sums"], ours["driver_seconds"]) == (0, 0.01)
    assert capsys.readouterr().out.splitlines() == readme_table.table(report)


@pytest.mark.parametrize("allocator", ["stock", "option", "ours"])
def test_wrong_sums_fail(allocator: str, measure: Any, capsys: Capture) -> None:
    code, report = measure(f"wrong@{allocator}.wrong_sums", "--configurations", *NAMES)
    assert code == 1
    said = capsys.readouterr().out.splitlines()
    assert said[len(readme_table.table(report)) :] == [
        f"{NAMES[1]} seed 0, {allocator}: 17 WRONG sums"
    ]
