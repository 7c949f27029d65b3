"""Work to capture, and what the tests import; without torch or the adapter they are skipped here.

Inputs come from the CPU's generator: a capture that failed leaves torch's CUDA generator unusable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor

    from cudagraph_pool import _torch as adapter
else:
    torch = pytest.importorskip("torch", reason="needs torch")
    adapter = pytest.importorskip(
        "cudagraph_pool._torch", reason="needs the adapter", exc_type=ImportError
    )

__all__ = [
    "PAGE",
    "WIDTH",
    "Captured",
    "adapter",
    "capture_all",
    "capture_chain",
    "chain",
    "fresh",
    "in_threads",
    "torch",
]

WIDTH = 256
PAGE = 2 << 20


def fresh(rows: int, seed: int, width: int = WIDTH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, width, generator=generator).cuda()


def chain(x: Tensor) -> Tensor:
    """Temporaries of several sizes and lifetimes, none of which survives."""
    wide = torch.cat([x, x * 2, x + 1, x - 1], dim=1)
    summed = wide.reshape(x.shape[0], 4, -1).sum(dim=1)
    squared = summed * summed
    halves = torch.sqrt(squared + 1) / 2
    return (halves + x).softmax(dim=1)


@dataclass
class Captured:
    """A graph of `chain` whose input and output lie outside the pool."""

    graph: torch.cuda.CUDAGraph
    x: Tensor
    y: Tensor

    def replay(self, x: Tensor) -> Tensor:
        self.x.copy_(x)
        self.y.fill_(float("nan"))
        self.graph.replay()
        return self.y.clone()


def capture_chain(rows: int, pool: tuple[int, int] | None) -> Captured:
    captured = Captured(torch.cuda.CUDAGraph(), fresh(rows, seed=0), fresh(rows, seed=1))
    with torch.cuda.graph(captured.graph, pool=pool):
        captured.y.copy_(chain(captured.x))
    return captured


def capture_all(sizes: Iterable[int], pool: tuple[int, int] | None) -> dict[int, Captured]:
    chain(fresh(1, seed=0))  # what is loaded and initialised at first use
    torch.cuda.synchronize()
    return {rows: capture_chain(rows, pool) for rows in sizes}


def in_threads(*work: Callable[[], object]) -> None:
    """Runs all at once; raises what one of them raised."""
    errors: list[BaseException] = []

    def guarded(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
