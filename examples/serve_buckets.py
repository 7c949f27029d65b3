"""Requests of any batch size and length, served by a fixed number of CUDA graphs.

Each request is padded to the nearest of a few sizes that were captured once, into one pool. The
same requests are served by eager PyTorch, by torch.compile with dynamic shapes and CUDA graphs, and
by a GraphRunner, each in a process of its own. Prints a table.

    python examples/serve_buckets.py
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import cudagraph_pool as cgp

WAYS = ("eager", "compiled", "compiled, dynamic, reduce-overhead", "GraphRunner")
MAX_BATCH, MAX_LENGTH = 16, 256
HIDDEN, HEADS, LAYERS, VOCABULARY = 512, 8, 6, 8192


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.feed = nn.Sequential(
            nn.LayerNorm(HIDDEN),
            nn.Linear(HIDDEN, 4 * HIDDEN),
            nn.GELU(),
            nn.Linear(4 * HIDDEN, HIDDEN),
        )
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(2, (3 * HEADS, -1)).transpose(1, 2)
        query, key, value = heads.chunk(3, 1)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed(x)


class Scorer(nn.Module):  # type: ignore[misc]
    """Logits of what follows each of some sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor, is_token: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, is_token[:, None, None, :])
        last = (is_token.sum(1) - 1).clamp(min=0)
        return self.head(x[torch.arange(len(x), device=x.device), last])


def requests(count: int) -> list[tuple[Tensor, Tensor]]:
    """The same in every process."""
    chance = random.Random(0)
    made = []
    for _ in range(count):
        batch, length = chance.randint(1, MAX_BATCH), chance.randint(1, MAX_LENGTH)
        lengths = [chance.randint(1, length) for _ in range(batch - 1)] + [length]
        is_token = torch.tensor([[n < own for n in range(length)] for own in lengths])
        made.append((torch.randint(VOCABULARY, (batch, length)).cuda(), is_token.cuda()))
    return made


def serve(way: str, count: int) -> dict[str, float]:
    torch.manual_seed(0)
    model = Scorer().cuda().half().eval()
    run = model
    if way == "compiled":
        run = torch.compile(model, dynamic=True)
    elif way.startswith("compiled,"):
        run = torch.compile(model, dynamic=True, mode="reduce-overhead")
    elif way == "GraphRunner":
        cgp.enable()
        run = cgp.GraphRunner(
            model,
            sizes=cgp.sizes.grid([1, 2, 4, 8, 16], [32, 64, 128, 192, 256]),
            dim=(0, 1),  # of both arguments; pad is 0: token 0, and no token
            progress=False,
        )
    graphs = 0
    begin = torch.cuda.CUDAGraph.capture_begin

    def counted(*args: object, **kwargs: object) -> None:
        nonlocal graphs
        graphs += 1
        begin(*args, **kwargs)

    torch.cuda.CUDAGraph.capture_begin = counted
    arriving = requests(count)
    free = torch.cuda.mem_get_info()[0]
    with torch.inference_mode():
        for _ in range(3):  # compiles, records and captures
            for request in arriving:
                run(*request).argmax(1).tolist()
        latencies = []
        began = time.perf_counter()
        for request in arriving:
            sent = time.perf_counter()
            run(*request).argmax(1).tolist()
            latencies.append(time.perf_counter() - sent)
        seconds = time.perf_counter() - began
    torch.cuda.empty_cache()
    return {
        "requests/s": count / seconds,
        "p50 ms": statistics.median(latencies) * 1e3,
        "p99 ms": statistics.quantiles(latencies, n=100)[98] * 1e3,
        "MiB beside the model": (free - torch.cuda.mem_get_info()[0]) / 2**20,
        "graphs": graphs,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--way", choices=WAYS, help="in this process, as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "This example captures CUDA graphs, and torch finds no CUDA device here.",
            file=sys.stderr,
        )
        return 1
    if options.way is not None:
        print(json.dumps(serve(options.way, options.requests)))
        return 0
    for way in WAYS:
        command = [sys.executable, __file__, "--way", way, "--requests", str(options.requests)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        if way == WAYS[0]:
            print(f"{'':36}" + "".join(f"{name:>22}" for name in row))
        print(f"{way:36}" + "".join(f"{value:22,.1f}" for value in row.values()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
