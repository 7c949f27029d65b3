"""A graph for each layer, forward and backward: stock PyTorch against cudagraph_pool.

A model of transformer layers is captured layer by layer, in three ways:

each      ``torch.cuda.make_graphed_callables(layer)`` for one layer after the other. Each call
          names a new pool, as TransformerEngine's does unless it is told one (NeMo Automodel#2932).
together  One call with all layers: one pool. All forwards are captured, then all backwards in
          reverse, as TransformerEngine's and Megatron's own captures are.
unnamed   Captures in that same order that name no pool. ``shared`` is
          ``enable(share_captures=True)``: they get one.

Captures in the order of the replays may share memory. What a forward saves, autograd holds until
its backward is captured, so no capture in between gets that memory; one that comes later may, and
so does its replay. In the order of *each*, the second forward would get what the first one saved.
Its pools are therefore left apart, by ``share_captures`` too.

Each way has a process of its own. Prints a table and writes JSON. Exit code 0 if outputs and
gradients are those of eager PyTorch bit for bit, every capture of ours was in a pool of ours, and
the shared pool is at most 1.01 of the minimum; 1 if not, 2 without a GPU.

    python benchmarks/layer_graphs.py --output results/layer_graphs.json

pool     MiB that graph pools reserve in the end.
minimum  MiB: the most that was ever live at once in each pool, in whole pages, added up.
÷all     Pool ÷ the minimum of the shared pool, which is that of all captures as one program.
capture  Milliseconds of all captures with their warm-ups; step: of a forward and a backward pass.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _apart import measure_apart, run_script
from _command import add_common, new_parser, new_report, positive, verdict, write_report
from _measure import digest_of
from _pools import cells, count_captures, measure_pools
from torch import Tensor, nn

import cudagraph_pool as cgp
from cudagraph_pool._table import format_table

WAYS = (
    ("eager", "stock"),
    *itertools.product(("each", "together", "unnamed"), ("stock", "ours")),
    ("unnamed", "shared"),
)
_BATCH, _LENGTH, _WIDTH, _HEADS = 4, 512, 1024, 16

# From an input to the output and all gradients, that of the input first.
Step = Callable[[Tensor], list[Tensor]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--layers", type=positive, default=24)
    parser.add_argument("--steps", type=positive, default=20, help="that are timed in a run")
    add_common(parser)
    options = parser.parse_args(argv)
    report = new_report(options)
    for way in WAYS:
        found = measure_apart(__file__, *way, options.layers, options.steps)
        print(f"{', '.join(way)}: {found}", file=sys.stderr, flush=True)
        report["rows"].append({"way": way[0], "allocator": way[1], **found})
        write_report(report, options.output)
    print(_table(report["rows"]))
    return verdict(judge(report["rows"]))


def measure(captures: str, allocator: str, layers: int, steps: int) -> dict[str, Any]:
    """One run, in a process of its own."""
    if allocator != "stock":
        cgp.enable(share_captures=allocator == "shared")
    captures_made = count_captures()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.ModuleList(Layer() for _ in range(layers)).to(torch.bfloat16)
    samples = [_input(seed=0).requires_grad_() for _ in model]
    through(model)(_input(seed=0))  # loads what it needs
    model.zero_grad()
    began = time.perf_counter()
    step = new_step(captures, model, samples)
    torch.cuda.synchronize()
    capture_seconds = time.perf_counter() - began
    gc.collect()
    torch.cuda.empty_cache()
    found = {"captures": captures_made(), **measure_pools()}
    step(_input(seed=1))
    results = step(_input(seed=2))
    if not all(bool(result.isfinite().all()) for result in results):
        raise RuntimeError("gradients that are not finite: their equality says little")
    digest = digest_of(results)[:16]
    x = _input(seed=3)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        step(x)
    end.record()
    end.synchronize()
    return {
        **found,
        "capture_seconds": capture_seconds,
        "digest": digest,
        "step_seconds": start.elapsed_time(end) * 1e-3 / steps,
    }


class Layer(nn.Module):  # type: ignore[misc]
    """Of a transformer; attention is spelled out, since fused ones add up in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, _HEADS, _WIDTH // _HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) * (_WIDTH // _HEADS) ** -0.5).softmax(dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(x.shape))
        result: Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return result


def _input(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(_BATCH, _LENGTH, _WIDTH, generator=generator).to("cuda", torch.bfloat16)


def new_step(captures: str, layers: nn.ModuleList, samples: Sequence[Tensor]) -> Step:
    """A step by graphs that are captured here; ``samples`` are their inputs, one for each layer."""
    if captures == "each":
        for layer, sample in zip(layers, samples, strict=True):
            torch.cuda.make_graphed_callables(layer, (sample,))
    elif captures == "together":
        torch.cuda.make_graphed_callables(tuple(layers), tuple((sample,) for sample in samples))
    elif captures == "unnamed":
        return LayerGraphs(layers, samples[0]).step
    return through(layers)


def through(layers: nn.ModuleList) -> Step:
    """A step through all layers, by autograd."""
    parameters = list(layers.parameters())

    def step(x: Tensor) -> list[Tensor]:
        for parameter in parameters:
            parameter.grad = None
        x = x.detach().requires_grad_()
        y = x
        for layer in layers:
            y = layer(y)
        y.backward(2 * y.detach())
        gradients = [tensor.grad for tensor in (x, *parameters)]
        return [y.detach(), *(g for g in gradients if g is not None)]

    return step


class LayerGraphs:
    """Two graphs for each layer, in the order of TransformerEngine's (pytorch/graph.py) and
    Megatron's (core/transformer/cuda_graphs.py). A layer reads the output of the one before where
    it lies, which Megatron does as well, and outputs and gradients between layers go as soon as
    they were read, which TransformerEngine does if ``_reuse_graph_input_output_buffers`` is given.
    """

    def __init__(self, layers: nn.ModuleList, x: Tensor) -> None:
        self._warm_up(layers, x)
        self._input = x
        self._forwards = [torch.cuda.CUDAGraph() for _ in layers]
        self._backwards = [torch.cuda.CUDAGraph() for _ in layers]
        passes: list[tuple[Tensor, Tensor]] = []
        for layer, graph in zip(layers, self._forwards, strict=True):
            with torch.cuda.graph(graph):
                y = layer(x)
            passes.append((x, y))
            x = y.detach().requires_grad_()
        self._output = y.detach()
        self._output_gradient = gradient = torch.empty_like(self._output)
        self._gradients: list[Tensor] = []
        for layer, graph in zip(reversed(layers), self._backwards, strict=True):
            x, y = passes.pop()
            with torch.cuda.graph(graph):
                gradient, *own = torch.autograd.grad(y, (x, *layer.parameters()), gradient)
            self._gradients = [*own, *self._gradients]
        self._gradients.insert(0, gradient)

    def _warm_up(self, layers: nn.ModuleList, x: Tensor) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                through(layers)(x)
        torch.cuda.current_stream().wait_stream(stream)
        layers.zero_grad()

    def step(self, x: Tensor) -> list[Tensor]:
        self._input.detach().copy_(x)
        for graph in self._forwards:
            graph.replay()
        self._output_gradient.copy_(2 * self._output)
        for graph in self._backwards:
            graph.replay()
        return [self._output, *self._gradients]


def judge(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is not as it should be."""
    problems = []
    for row in rows:
        name = f"{row['way']}, {row['allocator']}"
        if row["digest"] != rows[0]["digest"]:
            problems.append(f"{name}: other gradients than eager's")
        if row["allocator"] != "stock" and row["captures_of_ours"] != row["captures"]:
            counts = f"{row['captures_of_ours']} of {row['captures']}"
            problems.append(f"{name}: {counts} captures in pools of ours")
        if row["allocator"] == "shared" and row["pool"] > 1.01 * row["minimum"]:
            ratio = row["pool"] / row["minimum"]
            problems.append(f"{name}: the pool is {ratio:.3f} of the minimum")
    return problems


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = "captures allocator graphs of_ours pool minimum ÷all capture step digest"
    lines = [head.split()]
    minimum = next(row["minimum"] for row in rows if row["allocator"] == "shared")
    for row in rows:
        ratio = f"{row['pool'] / minimum:.3f}" if row["captures"] else "-"
        times = [f"{row[f'{what}_seconds'] * 1e3:.2f}" for what in ("capture", "step")]
        lines.append([row["way"], row["allocator"], *cells(row), ratio, *times, row["digest"]])
    return format_table(lines, left_columns=(0, 1), width=sys.maxsize)


if __name__ == "__main__":
    sys.exit(run_script(main, measure))
