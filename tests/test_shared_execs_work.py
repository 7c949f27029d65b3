"""What shared_execs.py runs, as far as that needs torch but no GPU."""

from __future__ import annotations

import importlib

import pytest
from shared_execs import BOUNDS

torch = pytest.importorskip("torch")
captures_of = importlib.import_module("_exec_captures")
workloads = importlib.import_module("workloads")

CPU = torch.device("cpu")


def test_pool_arguments() -> None:
    assert captures_of.pool_arguments("default") == {"shared_exec": True}
    assert captures_of.pool_arguments("none") == {"shared_exec": True, "max_execs": None}
    numbers = [bound for bound in BOUNDS if bound.isdigit()]
    assert [captures_of.pool_arguments(bound)["max_execs"] for bound in numbers] == [
        1,
        2,
        4,
        8,
        16,
    ]


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
