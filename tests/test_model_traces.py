"""Captures of models from fake tensors: ``benchmarks/model_traces.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from cudagraph_pool.tools.trace import Event, minimum_bytes, read_trace

pytest.importorskip("torch")
import model_traces
import torch

MIB = 1 << 20


class Model(torch.nn.Module):  # type: ignore[misc]  # as mypy sees it
    """Two products, of which the first goes when the second is there."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(512, 2048, bias=False)
        self.narrow = torch.nn.Linear(2048, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(x))


def new_input(size: int) -> torch.Tensor:
    return torch.zeros(size, 512, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_traces, "MODELS", {"tiny": (Model, new_input, (1024, 2048))})


def test_forward_passes(tmp_path: Path) -> None:
    assert model_traces.main(["--output", str(tmp_path)]) == 0
    trace = read_trace(tmp_path / "tiny.json.gz")
    for graph, rows, first in zip(trace.graphs, (1024, 2048), (0, 2), strict=True):
        assert graph.key == rows
        products = [Event(first, rows * 4096, 0), Event(first + 1, rows * 1024, 0)]
        frees = [Event(event.block, 0, 0) for event in products]
        assert graph.events == products + frees, "weights and inputs were made before"
    assert minimum_bytes(trace.graphs) == 10 * MIB
