"""The benchmark of vLLM without vLLM: which runs it makes, what it makes of them; a GPU and vLLM do
the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _command
import pytest
import vllm_engine
from _engine import most

from cudagraph_pool.integration.worker_process import WorkerError

MIB = 1 << 20
MACHINE = {"torch": "2.11.0", "gpu": "H100"}


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
    monkeypatch.setattr(_command, "device", lambda: MACHINE)
    return made


def run(output: Path, *arguments: str) -> int:
    common = ["--models", "1b", "--modes", "v2-FULL", "--allocators", "stock", "ours"]
    return vllm_engine.main([*common, "--rounds", "2", "--output", str(output), *arguments])


def test_runs_take_turns_and_become_medians(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "rows.json") == 0
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
    assert run(path) == 1
    failed = "1b 1 v2-FULL custom ours: ended with code 1: out of memory"
    assert failed in capsys.readouterr().out
    engine.fails, engine.asked = None, []
    assert run(path, "--parallel", "1", "2") == 0
    assert engine.asked == [
        *(f"FULL {which}" for which in ("custom 0", "custom 1", "nccl 0", "nccl 1")),
        *(f"FULL {which}" for which in ("nccl 1", "nccl 0", "custom 1", "custom 0", "custom 1")),
    ]
    path.write_text(json.dumps({**json.loads(path.read_text()), "gpu": "H200"}))
    with pytest.raises(SystemExit, match="name another --output"):
        run(path)


def test_a_first_run_that_fails_is_the_last(engine: Engine, tmp_path: Path) -> None:
    engine.fails = ("0", 0)
    assert run(tmp_path / "rows.json") == 1
    assert engine.asked == ["FULL custom 0"]


def test_of_two_gpus_the_worse_one() -> None:
    ranks = [{"device": 3, "captures_of_ours": 5}, {"device": 4, "captures_of_ours": 4}]
    assert most(ranks) == {"device": 4, "captures_of_ours": 4}


def test_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "vllm" else 1)
    assert run(tmp_path / "rows.json") == 2
    assert capsys.readouterr().err == (
        "vllm_engine.py: there is no vllm: install vLLM 0.33, or put it on PYTHONPATH\n"
    )
