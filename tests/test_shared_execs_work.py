"""What shared_execs.py runs, as far as that needs torch but no GPU."""

from __future__ import annotations

import importlib

import pytest

torch = pytest.importorskip("torch")
workloads = importlib.import_module("workloads")

CPU = torch.device("cpu")


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
