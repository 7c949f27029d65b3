"""The command footprint: its figures, and what it says; its table and picture need no GPU."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import footprint as benchmark
import pytest

from cudagraph_pool.cli import footprint as command
from cudagraph_pool.cli.main import main
from cudagraph_pool.tools import footprint as _footprint
from cudagraph_pool.tools.footprint import COMPILING, WAYS, Footprint, as_json, ratio, table

MIB = 1 << 20

FOUND: dict[str, Footprint | str] = {
    "eager": Footprint(300 * MIB, 320 * MIB, 0, 60 * MIB),
    "compiled": Footprint(200 * MIB, 240 * MIB, 0, 70 * MIB),
    "graphs, stock": "ended with code 1: RuntimeError: out of memory",
    "graphs, ours": Footprint(250 * MIB, 256 * MIB, 100 * MIB, 80 * MIB),
}


def test_table_and_json() -> None:
    head, _, *rows, failed = table(FOUND).splitlines()
    assert head.split() == "way allocated ratio reserved graph pool driver held".split()
    assert [row.split()[-6:] for row in rows] == [
        ["300", "1.00", "320", "-", "60", "380"],
        ["200", "1.50", "240", "-", "70", "310"],
        ["250", "1.20", "256", "100", "80", "336"],
    ]
    assert failed == "graphs, stock: ended with code 1: RuntimeError: out of memory"
    rows_of = as_json(FOUND)
    assert rows_of["compiled"]["compression_ratio"] == 1.5
    assert ratio({"compiled": FOUND["compiled"]}, "compiled") is None
    assert rows_of["compiled"]["held"] == 310 * MIB
    assert rows_of["graphs, stock"] == {"error": "ended with code 1: RuntimeError: out of memory"}


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_picture(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"picture.{ending}"
    benchmark.draw({"a": FOUND, "b": FOUND, "c": {"eager": FOUND["eager"]}}, path)
    assert path.stat().st_size > 1000
    if ending == "svg":
        texts = re.findall(r">([^<>]*MiB|[^<>]*\(\d\.\d\d\))<", path.read_text())
        assert "380 (1.00)" in texts, "no blank before it, which SVG would drop"


def test_kernels_are_made_before_anything_is_measured() -> None:
    """By the first way of each set of arguments of torch.compile."""
    first = {str(how.compile): way for way, how in reversed([*WAYS.items()]) if how.compile}
    assert set(COMPILING) == set(first.values())


def test_what_a_function_may_return() -> None:
    def model(*tensors: Any) -> None: ...

    assert _footprint._made((model, (1, 2))) == (model, [(1, 2)])
    assert _footprint._made((model, [(1,), (2,)])) == (model, [(1,), (2,)])
    for wrong in (model, (model, 1), (model, [1]), ((1,), model)):
        with pytest.raises(TypeError, match="must return a model and the arguments of a call"):
            _footprint._made(wrong)


def test_what_can_be_trained() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.ones(2, requires_grad=True)
    assert _footprint._loss({"logits": weight * 3, "rest": None}) == 3
    with pytest.raises(RuntimeError, match="no output of the model requires gradients"):
        _footprint._loss((torch.ones(2), 1))


def test_a_way_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_check", lambda options: None)
    monkeypatch.setattr(command, "measure_apart", lambda function, way, train: FOUND.get(way))
    report = tmp_path / "report.json"
    for ways, code in ((["eager", "compiled"], 0), (["eager", "graphs, stock"], 1)):
        monkeypatch.setattr(command, "WAYS", {way: WAYS[way] for way in ways})
        assert main(["footprint", "a:b", "--json", str(report)]) == code
        assert set(json.loads(report.read_text())) == set(ways)
        said = capsys.readouterr()
        assert f"wrote {report}" in said.err
        assert ("out of memory" in said.out) == bool(code)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_a_process_that_fails_says_why() -> None:
    """Its last line on stderr: here that there is no such module."""
    found = _footprint.measure_apart("no_such_module:f", "eager", train=False)
    assert isinstance(found, str)
    assert "no_such_module" in found


def answering(code: int, seen: list[Any]) -> Any:
    """Stands for subprocess.run: all figures are 1, and what is said is in some encoding."""

    def run(command: list[str], env: dict[str, str], **_: Any) -> SimpleNamespace:
        seen.append((command, env))
        figures = dict.fromkeys(("allocated", "reserved", "graph_pool", "driver"), 1)
        answer = f"compiling\n{json.dumps(figures)}\n".encode()
        return SimpleNamespace(returncode=code, stdout=answer, stderr=b"first\ncaf\xe9\n")

    return run


def test_what_a_process_prints_may_be_in_any_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the file names in a compiler's messages."""
    monkeypatch.setattr("subprocess.run", answering(3, []))
    said = _footprint.measure_apart("models:f", "eager", False)
    assert said == "the process ended with code 3: caf\ufffd"


def test_what_is_measured_is_not_enabled_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or PyTorch's own allocator would be ours."""

    seen: list[Any] = []
    monkeypatch.setattr("subprocess.run", answering(0, seen))
    environment = {"CUDAGRAPH_POOL": "1", "ELSE": "1"}
    found = _footprint.measure_apart("models:f", "compiled", True, environment)
    assert found == Footprint(1, 1, 1, 1)
    ((command, given),) = seen
    assert command[-2:] == ["compiled", "train"]
    assert (given["CUDAGRAPH_POOL"], given["ELSE"]) == ("0", "1")
