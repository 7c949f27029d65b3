"""A training step of GPT-2's size on two GPUs: compiled, with checkpoints, as CUDA graphs.

Data-parallel training with activation checkpoints, for two lengths of sequences, in three ways:
eager; compiled, with each whole step (forward, backward, all-reduce, optimizer) captured into one
pool; and compiled with mode="reduce-overhead". What is compiled is the block that the model
repeats, in seconds where the whole model would take minutes. Each way has processes of its own, one
for each GPU, or one if there is but one. Prints a table, and of a way that fails why.

    python examples/train_ddp.py
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import cudagraph_pool as cgp

WAYS = ("eager", "compiled, captured", "compiled, reduce-overhead")
HIDDEN, HEADS, LAYERS, VOCABULARY = 768, 12, 12, 50304
BATCH, LENGTHS = 4, (512, 1024)
WARM_UPS = 12  # DistributedDataParallel times its first eleven steps, which no capture may


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.feed = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(2, (3 * HEADS, -1)).transpose(1, 2)
        query, key, value = heads.chunk(3, 1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed(self.norms[1](x))


class Checkpoint(nn.Module):  # type: ignore[misc]
    """What a block computes is computed again for the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        # No dropout, so that there is no random state to keep: a capture may not read it.
        y: Tensor = checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)
        return y


class Gpt(nn.Module):  # type: ignore[misc]
    """Returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Embedding(max(LENGTHS), HIDDEN)
        self.blocks = nn.ModuleList(Checkpoint(Block()) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.T
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Training:
    """One rank's steps, of each length."""

    def __init__(self, way: str, rank: int) -> None:
        torch.manual_seed(0)
        # Gradients are reduced block by block as it is; no compiled block need be cut for that.
        torch._dynamo.config.optimize_ddp = False
        model = Gpt().cuda()
        for checkpointed in model.blocks:
            if way == "compiled, captured":
                checkpointed.block.compile(dynamic=False)
            elif way == "compiled, reduce-overhead":
                # With the checkpoint in it: torch 2.11's graphs do not run a forward pass again.
                checkpointed.compile(mode="reduce-overhead", dynamic=False)
        self.generator = torch.Generator("cuda").manual_seed(rank)
        self.tokens = {n: torch.zeros(BATCH, n, dtype=torch.long, device="cuda") for n in LENGTHS}
        self.losses: dict[int, Tensor] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # A capture must find all of it on its own stream: what DDP sets up, too.
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.model = DistributedDataParallel(model)
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, capturable=True)
            for _ in range(WARM_UPS):
                for length in LENGTHS:
                    self.run(length)
        torch.cuda.synchronize()
        if way == "compiled, captured":
            self.capture(stream)

    def capture(self, stream: torch.cuda.Stream) -> None:
        pool = cgp.GraphPool()
        for length in sorted(LENGTHS, reverse=True):
            self.optimizer.zero_grad(set_to_none=True)  # gradients are the pool's
            graph = torch.cuda.CUDAGraph()
            # NCCL's own thread asks for events meanwhile.
            with cgp.graph(graph, pool, stream=stream, capture_error_mode="thread_local"):
                self.step(length)
            self.graphs[length] = graph

    def step(self, length: int) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            loss = self.model(self.tokens[length])
        loss.backward()
        self.optimizer.step()
        self.losses[length] = loss.detach()

    def run(self, length: int) -> Tensor:
        """Trains on new data, and returns the loss."""
        self.tokens[length].random_(VOCABULARY, generator=self.generator)
        if length in self.graphs:
            self.graphs[length].replay()
        else:
            self.optimizer.zero_grad(set_to_none=True)
            self.step(length)
        return self.losses[length]


def train(way: str, steps: int) -> list[float]:
    """In each of the processes; a row of the table, of this one."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    if way == "compiled, captured":
        cgp.enable()
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    training = Training(way, rank)
    seconds: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for step in range(steps):
        length = LENGTHS[step % len(LENGTHS)]
        began = time.perf_counter()
        loss = training.run(length).item()
        seconds[length].append(time.perf_counter() - began)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    found = [
        *(statistics.median(of_length) * 1e3 for of_length in seconds.values()),
        torch.cuda.memory_reserved() / 2**20,
        (total - free) / 2**20,
        loss,
    ]
    training.graphs.clear()  # graphs with collectives go before their process group
    dist.destroy_process_group()
    return found


def launch(way: str, steps: int, ranks: int) -> list[float] | str:
    """A row of the table, of the first rank, or why there is none."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", __file__, "--way", way, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stderr)
        lines = [line.partition("]:")[2] or line for line in done.stderr.splitlines()]
        errors = [line.strip() for line in lines if "Error: " in line]
        return errors[0] if errors else f"exit code {done.returncode}"
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--way", choices=WAYS, help="in this process, as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("This example trains on GPUs, and torch finds no CUDA device here.", file=sys.stderr)
        return 1
    if options.way is not None:
        found = train(options.way, options.steps)
        if os.environ["RANK"] == "0":
            print(json.dumps(found))
        return 0
    ranks = min(2, torch.cuda.device_count())
    head = [*(f"ms, {n} tokens" for n in LENGTHS), "reserved MiB", "device MiB", "last loss"]
    print(f"{ranks} GPU(s)".ljust(28) + "".join(f"{name:>16}" for name in head))
    failed = False
    for way in WAYS:
        row = launch(way, options.steps, ranks)
        if isinstance(row, str):
            failed = True
            print(f"{way:28}  failed: {row}", flush=True)
        else:
            print(f"{way:28}" + "".join(f"{value:16,.2f}" for value in row), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
