"""One rank of combinations.py: some training steps in one combination; the first prints JSON.

Started by torchrun.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from _pools import measure_pools
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cudagraph_pool as cgp

# DistributedDataParallel times its first eleven steps with events, which no capture may query.
_WARM_UPS = 12
_STEPS = 6
_ROWS, _LENGTH, _WIDTH = 8, 256, 512


class Checkpoint(nn.Module):  # type: ignore[misc]
    """What a block computes is computed again for the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        # There is no random state to keep, and a capture may not read it.
        y: Tensor = checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)
        return y


class Blocks(nn.Module):  # type: ignore[misc]
    """A transformer without dropout, whose blocks may be checkpoints."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        layers = [
            nn.TransformerEncoderLayer(_WIDTH, 8, 4 * _WIDTH, dropout=0.0, batch_first=True)
            for _ in range(4)
        ]
        self.blocks = nn.ModuleList(map(Checkpoint, layers) if checkpoints else layers)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Training:
    """Steps of one combination.

    Arguments:
        parallel: ``none``, ``ddp`` or ``fsdp2``.
        graphs: ``eager``: none; ``step``: the whole step is one graph; ``compiled step``: the same
            of a compiled model; ``reduce-overhead``: those of torch.compile; ``runner``: those of
            a GraphRunner, of the forward and the backward pass.
    """

    def __init__(self, parallel: str, checkpoints: bool, graphs: str, ours: bool) -> None:
        torch.manual_seed(0)
        self._ours = ours
        # Each rank has data of its own, or a graph without its collectives would seem right.
        self._generator = torch.Generator("cuda").manual_seed(1 + dist.get_rank())
        self._x = torch.zeros(_ROWS, _LENGTH, _WIDTH, device="cuda")
        self._loss = torch.zeros((), device="cuda")
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            model = Blocks(checkpoints).cuda()
            self._run = self._make(model, parallel, graphs)
            # After that: FSDP2 replaces the parameters.
            self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
            for _ in range(_WARM_UPS):
                self._fill()
                self._optimizer.zero_grad(set_to_none=True)
                self._step()
        torch.cuda.synchronize()
        if graphs in ("step", "compiled step"):
            self._capture()

    def _make(self, model: nn.Module, parallel: str, graphs: str) -> Any:
        if parallel == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            # Compiled block by block, before: what gathers a block's weights is cut out of what is
            # compiled, and of a model that is compiled as a whole nothing is left. With the
            # checkpoint in it: torch 2.11's graphs do not run a forward pass again.
            for name, block in list(model.blocks.named_children()):
                model.blocks.set_submodule(name, fully_shard(_compiled(block, graphs)))
            return fully_shard(model)
        model = _compiled(model, graphs)
        if parallel == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        if graphs == "runner":
            return cgp.GraphRunner(model, sizes=[_ROWS], progress=False)
        return model

    def _capture(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._graph = torch.cuda.CUDAGraph()
        # NCCL's own thread asks for events meanwhile.
        options = {"stream": self._stream, "capture_error_mode": "thread_local"}
        if self._ours:
            context = cgp.graph(self._graph, cgp.GraphPool(), **options)
        else:
            context = torch.cuda.graph(self._graph, **options)
        with context:
            self._step()

    def _fill(self) -> None:
        self._x.normal_(generator=self._generator)

    def _step(self) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        loss = (self._run(self._x) - self._x.flip(1)).square().mean()
        loss.backward()
        self._optimizer.step()
        self._loss.copy_(loss.detach())

    def run(self) -> float:
        """Trains on new data, and returns the loss."""
        self._fill()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._optimizer.zero_grad(set_to_none=True)
            self._step()
        return float(self._loss)

    def release(self) -> None:
        """Graphs that hold collectives must go before their process group does."""
        torch.cuda.synchronize()
        self._graph = None


def _compiled(module: nn.Module, graphs: str) -> nn.Module:
    if graphs == "compiled step":
        return torch.compile(module)
    if graphs == "reduce-overhead":
        return torch.compile(module, mode="reduce-overhead")
    return module


def main() -> None:
    parallel, checkpoints, graphs, allocator = json.loads(sys.argv[1])
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    ours = allocator == "ours"
    if ours:
        cgp.enable()
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    training = Training(parallel, checkpoints, graphs, ours)
    losses = [training.run() for _ in range(_STEPS)]
    if rank == 0:
        print(json.dumps({"losses": losses, "graph_pool_bytes": measure_pools()["pool"]}))
    training.release()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
