"""A training loop of accelerate with a captured step, unedited."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

import cudagraph_pool as cgp

from .work import WIDTH, adapter, fresh, torch

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 12
WARM_UPS = 3
BATCH = 256

pytestmark = [
    pytest.mark.usefixtures("warm"),
    pytest.mark.filterwarnings("default"),  # what it says of loaders
]


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 1024), torch.nn.GELU(), torch.nn.Linear(1024, WIDTH)
    )


def loader() -> Any:
    rows = fresh(BATCH * STEPS, seed=1).cpu()
    return torch.utils.data.DataLoader(rows, batch_size=BATCH)


def loss_of(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Of learning to reverse the features."""
    return (net(x).float() - x.flip(1)).square().mean()


class CapturedStep:
    """Runs a training step eagerly a few times on a stream of its own, then by a graph."""

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        self._step = step
        self._x = torch.zeros(BATCH, WIDTH, device="cuda")
        self._stream = torch.cuda.Stream()
        self._calls = 0
        self._graph: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        self._x.copy_(x)
        self._calls += 1
        if self._calls <= WARM_UPS:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                loss = self._step(self._x)
            torch.cuda.current_stream().wait_stream(self._stream)
            return loss
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._loss = self._step(self._x)
        self._graph.replay()
        return self._loss.clone()


def accelerate_with_a_captured_step() -> list[float]:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    # Casts that autocast has cached in a warm-up would be missing in the graph.
    keeps_no_casts = accelerate.utils.AutocastKwargs(cache_enabled=False)
    accelerator = accelerate.Accelerator(mixed_precision="bf16", kwargs_handlers=[keeps_no_casts])
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, capturable=True)
    net, optimizer, batches = accelerator.prepare(net, optimizer, loader())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        with accelerator.autocast():
            loss = loss_of(net, x)
        accelerator.backward(loss)
        optimizer.step()
        return loss.detach()

    captured = CapturedStep(step)
    losses = [captured(x) for x in batches]
    return [loss.item() for loss in losses]


def test_losses_are_those_of_stock() -> None:
    expected = accelerate_with_a_captured_step()
    assert len(expected) == STEPS
    assert expected[-1] < expected[0]
    before = adapter.capture_counts()
    with cgp.enabled():
        found = accelerate_with_a_captured_step()
        after = adapter.capture_counts()
        torch._C._cuda_clearCublasWorkspaces()  # those of the capture stream lie in the pool
        gc.collect()
        torch.cuda.empty_cache()
        assert adapter.pool_ids(torch.cuda.current_device()) == []
    assert found == expected
    assert after["ours"] - before["ours"] == 1
    assert after["base"] == before["base"]
