"""One rank of two_streams.py's training on two GPUs, under one allocator.

Started as torchrun starts ranks; writes one JSON file.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _worker import require_settings
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cudagraph_pool._measure import FreshPool, PoolHandle, digest_of, recorded_minimum

# DistributedDataParallel times its first eleven steps with events, which no capture may query.
_WARM_UP_STEPS = 12
_COMPARED_STEPS = 6
_CAPTURES = 3
_ROUNDS = 7
_REPLAYS = 5


class Block(nn.Module):  # type: ignore[misc]
    """Adds to its input what a feed-forward layer makes of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.narrow(nn.functional.gelu(self.wide(self.norm(x))))
        return x + made


class Training:
    """Steps of a model that both ranks train, warmed up on the stream that captures it."""

    def __init__(self, rank: int, blocks: int = 6, width: int = 1024, rows: int = 512) -> None:
        self._rank = rank
        self._stream = torch.cuda.Stream()
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(width) for _ in range(blocks))).cuda()
        self._x = torch.empty(rows, width, device="cuda")
        self._target = torch.empty_like(self._x)
        self._loss = torch.zeros((), device="cuda")
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._net = DistributedDataParallel(model, device_ids=[rank], bucket_cap_mb=8)
            self._optimizer = torch.optim.AdamW(self._net.parameters(), lr=1e-3, capturable=True)
            for step in range(_WARM_UP_STEPS):
                self.fill(step)
                self.drop_gradients()
                self._step()
        torch.cuda.current_stream().wait_stream(self._stream)

    def fill(self, step: int) -> None:
        """The data of one step, another for each rank."""
        generator = torch.Generator().manual_seed(2 * step + self._rank)
        for static in (self._x, self._target):
            static.copy_(torch.randn(static.shape, generator=generator))

    def drop_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def capture(self, pool: PoolHandle) -> torch.cuda.CUDAGraph:
        """A graph of one step, its gradients in the pool."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            self._step()
        return graph

    def state(self) -> list[Tensor]:
        """All that a step writes."""
        parameters = list(self._net.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        if len(gradients) != len(parameters):
            raise RuntimeError("a parameter has no gradient")
        return [self._loss, *(p.detach() for p in parameters), *gradients]

    def _step(self) -> None:
        loss = nn.functional.mse_loss(self._net(self._x), self._target)
        loss.backward()
        self._optimizer.step()
        self._loss.copy_(loss.detach())


class Measured:
    """The training's graph, in a fresh pool each time."""

    def __init__(self, rank: int, ours: bool) -> None:
        self._device = torch.device("cuda", rank)
        self._ours = ours
        self._training = Training(rank)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._pool: FreshPool | None = None

    def capture(self) -> float:
        """Captures one step; returns the seconds."""
        self.release()
        self._pool = FreshPool(self._device, self._ours)
        gc.collect()
        torch.cuda.synchronize()
        dist.barrier(device_ids=[self._device.index])
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self._graph = self._training.capture(self._pool.id)
        return time.perf_counter() - begin

    @property
    def pool(self) -> FreshPool:
        """The one captured into last."""
        assert self._pool is not None
        return self._pool

    def release(self) -> None:
        torch.cuda.synchronize()
        self._training.drop_gradients()  # they lie in the pool
        if self._graph is not None:
            self._graph.reset()
        self._graph = self._pool = None
        gc.collect()
        torch.cuda.empty_cache()

    def digest(self) -> str:
        """Of all that some steps on new data leave."""
        assert self._graph is not None
        for step in range(_COMPARED_STEPS):
            self._training.fill(_WARM_UP_STEPS + step)
            self._graph.replay()
        torch.cuda.synchronize()
        state = self._training.state()
        if not all(bool(tensor.isfinite().all()) for tensor in state):
            raise RuntimeError("the training has values that are not finite")
        return digest_of(state)

    def replay(self) -> float:
        """Seconds of one step."""
        assert self._graph is not None
        self._graph.replay()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_REPLAYS):
            self._graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3 / _REPLAYS

    def minimum_bytes(self) -> int:
        """The most that is live at once, by PyTorch's own record of one more capture."""

        def capture() -> PoolHandle:
            self.capture()
            return self.pool.id

        return recorded_minimum(self._device, capture)


def measure(rank: int, allocator: str) -> dict[str, Any]:
    measured = Measured(rank, ours=allocator == "ours")
    seconds, reserved = [], []
    for _ in range(_CAPTURES):
        seconds.append(measured.capture())
        reserved.append(measured.pool.reserved_bytes())
    result = {
        "reserved_bytes": max(reserved),
        "capture_seconds": statistics.median(seconds),
        "digest": measured.digest(),
        "replay_seconds": statistics.median(measured.replay() for _ in range(_ROUNDS)),
        "minimum_bytes": measured.minimum_bytes() if allocator == "stock" else None,
    }
    measured.release()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--allocator", required=True)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    if options.allocator == "ours":
        import cudagraph_pool

        cudagraph_pool.enable()
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    require_settings(options.allocator)
    options.output.write_text(json.dumps(measure(rank, options.allocator)))
    # What a graph captured of a communicator is gone before it.
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
