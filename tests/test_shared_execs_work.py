"""What shared_execs.py runs, as far as that needs torch but no GPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from _exec_rows import BOUNDS, CHAINS

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")
captures_of = importlib.import_module("_exec_captures")
workloads = importlib.import_module("_exec_workloads")

CPU = torch.device("cpu")


class Doubling:
    """A workload. Size n: the first n inputs, doubled."""

    name = "doubling"
    keys = (1, 2, 5)

    def __init__(self) -> None:
        self.input = torch.zeros(5)
        self.result = torch.zeros(5)

    def fill(self, key: int, seed: int) -> None:
        self.input[:key].normal_(generator=torch.Generator().manual_seed(seed))

    def step(self, key: int) -> None:
        torch.mul(self.input[:key], 2, out=self.result[:key])

    def outputs(self, key: int) -> list[Tensor]:
        return [self.result[:key]]

    def clear(self, key: int) -> None:
        self.result[:key] = -77


class Step:
    """Stands in for a graph: does the step itself, of another size in the replays named."""

    def __init__(self, workload: Doubling, key: int, wrong: dict[int, int] | None = None) -> None:
        self._workload = workload
        self._key = key
        self._wrong = wrong or {}
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._workload.step(self._wrong.get(self.replays, self._key))


@pytest.mark.parametrize(
    ("key", "wrong", "found"),
    [(5, {}, 0), (5, {3: 2}, 1), (5, {3: 2, 4: 1}, 2), (2, {1: 5, 7: 1}, 2)],
)
def test_compare_finds_each_wrong_replay(
    key: int, wrong: dict[int, int], found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Doubling()
    captures = captures_of.ExecCaptures.__new__(captures_of.ExecCaptures)  # without a device
    captures._device = CPU
    captures.workload = workload
    captures._graphs = {size: Step(workload, size) for size in workload.keys}
    captures._graphs[key] = Step(workload, key, wrong)
    references = {size: Step(workload, size) for size in workload.keys}
    monkeypatch.setattr(captures, "_capture_all", lambda pool, kept: (references, 0.0))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(captures_of, "_EPOCH", 10)
    assert captures.compare_results(45, seed=1) == found
    assert sum(graph.replays for graph in captures._graphs.values()) == 45
    assert references[1].replays == 5  # once for each set of inputs


def test_results_are_compared_bit_for_bit() -> None:
    nan, zero = torch.tensor([float("nan"), 1.0]), torch.zeros(2)
    assert int(captures_of._differ([nan], [nan.clone()])) == 0
    assert int(captures_of._differ([zero], [-zero])) == 1
    assert int(captures_of._differ([zero, zero], [zero, zero + 1])) == 1


def test_pool_arguments() -> None:
    assert captures_of.pool_arguments("default") == {"shared_exec": True}
    assert captures_of.pool_arguments("none") == {"shared_exec": True, "max_execs": None}
    assert captures_of.pool_arguments("budget")["exec_budget"] > 0
    numbers = [bound for bound in BOUNDS if bound.isdigit()]
    assert [captures_of.pool_arguments(bound)["max_execs"] for bound in numbers] == [
        1,
        2,
        4,
        8,
        16,
    ]


def test_chains_are_as_long_as_they_say() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):  # type: ignore[misc]
        calls = 0

        def __torch_dispatch__(
            self, call: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.calls += 1
            return call(*args, **(kwargs or {}))

    assert {*CHAINS} <= {*workloads.EXEC_WORKLOADS}
    chain = workloads.Chain(CPU, 20)
    for key in chain.keys:
        chain.fill(key, seed=1)
        with Count() as count:
            chain.step(key)
        assert count.calls == 20
        assert chain.outputs(key)[0].isfinite().all()


def test_deep_decoder_depends_on_its_tokens_alone() -> None:
    pytest.importorskip("transformers")
    deep = workloads.DeepDecoder(CPU, layers=2)
    assert len(deep.keys) == 16
    deep.fill(8, seed=1)
    deep.clear(8)
    deep.step(4)
    (logits,) = deep.outputs(8)
    assert logits[:4].isfinite().all()
    assert (logits[4:] == -77).all()
    assert not torch.equal(logits[0], logits[1])
    first = logits[:4].clone()
    deep.step(4)
    assert torch.equal(first, logits[:4])
    deep.fill(4, seed=2)
    deep.step(4)
    assert not torch.equal(first, logits[:4])
