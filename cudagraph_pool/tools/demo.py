"""``cudagraph-pool demo``: what N graphs cost on PyTorch's own allocator, and what on the pool."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .._lazy import torch
from ..integration.environment import VARIABLE
from ..pools import GraphPool, stats
from ..switch import enabled
from .costs import PoolCost, of_pool, of_trace
from .pool_report import PoolReport
from .snapshot import traces_of
from .trace import read_trace

if TYPE_CHECKING:
    from torch import Tensor

_TRACES: Final = Path(__file__).parents[1] / "traces"
_MODELS: Final = {"mlp_asc": "gated MLP", "resnet50_asc": "ResNet-50"}
_NO_GPU: Final = """
There is no GPU here: captures that were recorded on an H200 were replayed through the
pool's own code. What PyTorch's allocator takes is worked out by its rules.
"""
_NEXT: Final = """
Next, of your own program: cudagraph-pool record -o traces train.py, then
cudagraph-pool report --html report.html traces/*"""
_PASSES: Final = 10


def run() -> int:
    """Returns the exit code: 1 if an output is wrong. Raises what keeps it from capturing."""
    for changed in (VARIABLE, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        os.environ.pop(changed, None)  # before torch is imported: stock is compared as it comes
    print("Graphs of one model in one pool, one for each batch size, smallest first.\n")
    if importlib.util.find_spec("torch") and torch.cuda.is_available():
        return _on_gpu(torch.cuda.get_device_name())
    costs = [of_trace(read_trace(_TRACES / f"{name}.json.gz")) for name in _MODELS]
    print(PoolReport([replace(cost, name=_MODELS[cost.name], order="") for cost in costs]))
    print(_NO_GPU + _NEXT)
    return 0


# With a GPU.


class _Work(NamedTuple):
    """A model that is captured for many sizes."""

    name: str
    model: Callable[[Tensor], Tensor]
    inputs: Sequence[Tensor]  # of each size: the first rows of that of the largest


class _Measured(NamedTuple):
    """What one allocator did with one model."""

    cost: PoolCost
    capture: float  # seconds, of all graphs
    replay: float
    outputs: list[Tensor | None]  # of a graph None if they are what eager work computes


def _works() -> Iterator[_Work]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        # The device is slower with random numbers than with zeros, for all allocators alike.
        rows = torch.randn(2048, 4096, dtype=torch.bfloat16)
        yield _Work("gated MLP", _gated_mlp(), [rows[: 16 * n] for n in range(1, 129)])
        if importlib.util.find_spec("torchvision") is not None:
            from torchvision.models import resnet50

            images = torch.randn(64, 3, 224, 224, dtype=torch.float16)
            model = resnet50().half().eval()
            yield _Work("ResNet-50", model, [images[:n] for n in range(1, 65)])


def _gated_mlp(
    layers: int = 4, hidden: int = 4096, wide: int = 11008
) -> Callable[[Tensor], Tensor]:
    shapes = ((wide, hidden), (wide, hidden), (hidden, wide))
    made = (torch.randn(n, k, dtype=torch.bfloat16) * k**-0.5 for n, k in shapes * layers)
    parts = list(zip(made, made, made, strict=True))
    linear, silu = torch.nn.functional.linear, torch.nn.functional.silu

    def model(x: Tensor) -> Tensor:
        for gate, up, down in parts:
            x = x + linear(silu(linear(x, gate)) * linear(x, up), down)
            x = torch.rms_norm(x, (hidden,))
        return x

    return model


def _on_gpu(gpu: str) -> int:
    """Stock first: where its graphs differ from eager, ours are compared with them."""
    works = list(_works())
    stocks = [_measure(work, False) for work in works]
    with enabled():
        all_ours = [_measure(work, True) for work in works]
    costs, said, is_right = [], [], True
    names = ("minimum", "stock", "expandable", "primed")
    for work, stock, ours in zip(works, stocks, all_ours, strict=True):
        sizes = {name: getattr(stock.cost, name) for name in names}
        costs.append(replace(ours.cost, name=work.name, kind="-", **sizes))
        wrong, outputs = _judge(ours.outputs, stock.outputs)
        is_right = is_right and not wrong
        said.append(
            f"{work.name}: captured in {ours.capture:.2f} s (PyTorch {stock.capture:.2f}), "
            f"replayed in {ours.replay * 1e3:.1f} ms ({stock.replay * 1e3:.1f}); {outputs}"
        )
    print(PoolReport(costs))
    print("", f"{gpu}; every graph was replayed on fresh inputs.", *said, _NEXT, sep="\n")
    return 0 if is_right else 1


def _judge(ours: list[Tensor | None], stock: list[Tensor | None]) -> tuple[int, str]:
    """How many are wrong, their outputs neither eager's nor stock's graph's, and the words."""
    equal = ours.count(None)
    pairs = zip(ours, stock, strict=True)
    like_stock = sum(x is not None and y is not None and x.equal(y) for x, y in pairs)
    wrong = len(ours) - equal - like_stock
    parts = [f"outputs of {equal} of {len(ours)} graphs equal eager's bit for bit"]
    parts += [f"{like_stock} equal those of PyTorch's graphs, which differ"] * bool(like_stock)
    parts += [f"{wrong} are WRONG"] * bool(wrong)
    return wrong, ", ".join(parts)


def _measure(work: _Work, is_ours: bool) -> _Measured:
    memory: Any = torch.cuda.memory
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # libraries load what they need at their first use
            outputs = [work.model(x).clone() for x in reversed(work.inputs)][::-1]
        torch.cuda.synchronize()

        def capture() -> tuple[Any, list[torch.cuda.CUDAGraph]]:
            pool: Any = GraphPool() if is_ours else torch.cuda.graph_pool_handle()
            graphs = [torch.cuda.CUDAGraph() for _ in outputs]
            for x, output, graph in zip(work.inputs, outputs, graphs, strict=True):
                with torch.cuda.graph(graph, pool=pool.id if is_ours else pool, stream=stream):
                    output.copy_(work.model(x))
            return pool, graphs

        start = time.perf_counter()
        pool, graphs = capture()
        seconds = time.perf_counter() - start, replay_seconds(graphs, _PASSES)
        each = zip(work.inputs, graphs, outputs, strict=True)
        differing = [_differing(work.model, *captured) for captured in each]
        if is_ours:
            (found,) = (one for one in stats()["pools"] if one["id"] == pool.id)
            return _Measured(of_pool(found, None), *seconds, differing)
        del graphs
        torch.cuda.empty_cache()
        memory._record_memory_history("all", context=None, clear_history=True)
        kept = capture()
        (trace,) = traces_of(memory._snapshot())
        memory._record_memory_history(None)
        del kept
        torch.cuda.empty_cache()
    return _Measured(of_trace(trace), *seconds, differing)


def replay_seconds(graphs: Sequence[torch.cuda.CUDAGraph], passes: int) -> float:
    """The device's seconds for one pass over all of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for passed in range(passes + 1):
        if passed == 1:  # the first pass is not timed: the device wakes up
            torch.cuda.synchronize()
            start.record()
        for graph in graphs:
            graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / passes


def _differing(model: Any, x: Tensor, graph: Any, output: Tensor) -> Tensor | None:
    """The bits of what a graph computes of fresh inputs, if they are not those of eager work."""
    torch.manual_seed(len(x))
    expected = model(x.normal_()).clone()
    output.fill_(-77)  # a graph that does nothing is found out
    graph.replay()
    torch.cuda.synchronize()
    bits = output.view(torch.int16)
    return None if bits.equal(expected.view(torch.int16)) else bits.to("cpu", copy=True)
