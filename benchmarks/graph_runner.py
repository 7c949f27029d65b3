"""GraphRunner against graphs that are written by hand for PyTorch's own allocator.

By hand, as is done today: a buffer for each argument, a graph for each size, captured largest first
into one pool after three warm-ups, outputs kept; a call picks the next size, copies in, replays and
slices. Training: make_graphed_callables, likewise. Prints a table and writes JSON. Exit code 0 if
everything was measured, 2 without a GPU.

    python benchmarks/graph_runner.py --output results/graph_runner.json

memory    What the device has less than before: buffers, the pool, what the driver keeps, of the
          first capture of all sizes, each called once, in a process that has run each of them,
          its backward pass in either thread, and captured the smallest before: kernels, streams
          and what libraries keep for each thread were there, and executables are by then.
largest   The same for the largest size alone.
first     Seconds for all sizes, warm-ups included, of that capture: the median of the rounds, which
          have a process each.
capture   The same once more, the graphs before being gone: the median of five.
call      CPU microseconds of a call, of random sizes in rows of 16: the median of the rows.
idle      The same of one call when the CPU comes from a wait for the device, caches cold.
step      Milliseconds of a call in a row of all calls; training with backward: the median of rows.

What the device has less is measured in a process for each way. Times are measured in one process,
in turns, since a call takes what the CPU has left for it: the pool is disabled where graphs are
captured by hand.
"""

from __future__ import annotations

import bisect
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from _apart import measure_apart, run_script
from _command import add_common, add_some, new_parser, new_report, positive, write_report
from _runner_models import MODELS, Model
from readme_table import table
from torch import nn

import cudagraph_pool as cgp

WAYS = ("stock", "ours")
_CAPTURES = 5
_ROW = 16
_ROWS = 5
_WARM_UPS = 5


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser(__doc__)
    add_some(parser, "--models", MODELS)
    parser.add_argument("--calls", type=positive, default=300, help="that are timed")
    add_common(parser, rounds=3)
    options = parser.parse_args(argv)
    report = new_report(options)
    for model in options.models:
        timed = measure_apart(__file__, model, "turns", options.calls)
        rounds = [
            {way: measure_apart(__file__, model, way, options.calls) for way in WAYS}
            for _ in range(options.rounds)
        ]
        row = {way: timed[way] | merge([found[way] for found in rounds]) for way in WAYS}
        report["rows"].append({"model": model, **row})
        write_report(report, options.output)
        print(f"{model}: {row}", file=sys.stderr, flush=True)
    print("\n".join(table(report)))
    return 0


def merge(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of several first captures: the most memory, and the median of the seconds."""
    chosen: dict[str, Callable[..., float]]
    chosen = {"memory": max, "first": statistics.median, "largest": max}
    return {name: choose(found[name] for found in rounds) for name, choose in chosen.items()}


def measure(name: str, way: str, calls: int) -> dict[str, Any]:
    """Memory, in MiB, and the first capture of one way; or, by ``turns``, the times of each."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.set_grad_enabled(model.trains):
        for autograds_own in (True, False):
            with torch.autograd.set_multithreading_enabled(autograds_own):
                for size in model.sizes:
                    _run(model.function, model, size)
        for each in WAYS if way == "turns" else (way,):
            _captured(model, [min(model.sizes)], each)
        if way == "turns":
            return _in_turns(model, calls)
        memory, first, run = _captured(model, model.sizes, way)
        del run
        largest, _, _ = _captured(model, [max(model.sizes)], way)
    return {"memory": memory / 2**20, "first": first, "largest": largest / 2**20}


def _in_turns(model: Model, calls: int) -> dict[str, dict[str, float]]:
    """The times of each way."""
    runs: dict[str, Callable[..., Any]] = {}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(_CAPTURES):
        for way in WAYS:
            runs.pop(way, None)
            _, of_all, runs[way] = _captured(model, model.sizes, way)
            seconds[way].append(of_all)
    timed = _timed_calls(model, runs, calls)
    return {way: {"capture": statistics.median(seconds[way]), **timed[way]} for way in WAYS}


def _timed_calls(
    model: Model, runs: Mapping[str, Callable[..., Any]], calls: int
) -> dict[str, dict[str, float]]:
    """What is timed of each way, in turns."""
    chance = random.Random(1)
    sizes = [chance.randint(1, max(model.sizes)) for _ in range(calls)]
    arguments = {size: model.arguments(size) for size in {*sizes}}
    for run in runs.values():  # until each graph has all that it will have
        for _ in range(_WARM_UPS):
            for size in model.sizes:
                _run(run, model, size)
                torch.cuda.synchronize()
        for size in sizes:
            _finish(model, run(*arguments[size]))

    def medians(row: int) -> dict[str, float]:
        """The CPU's microseconds of a call, of rows of so many."""
        found: dict[str, list[float]] = {way: [] for way in runs}
        for at in range(0, calls - row + 1, row):
            for way, run in runs.items():
                torch.cuda.synchronize()
                began = time.perf_counter()
                for size in sizes[at : at + row]:
                    run(*arguments[size])
                found[way].append((time.perf_counter() - began) / row)
        return {way: statistics.median(seconds) * 1e6 for way, seconds in found.items()}

    call, idle = medians(_ROW), medians(1)
    steps: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(_ROWS):
        for way, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            for size in sizes:
                _finish(model, run(*arguments[size]))
            end.record()
            end.synchronize()
            steps[way].append(start.elapsed_time(end) / calls)
    return {
        way: {"call": call[way], "idle": idle[way], "step": statistics.median(steps[way])}
        for way in runs
    }


def _captured(
    model: Model, sizes: Sequence[int], way: str
) -> tuple[int, float, Callable[..., Any]]:
    """Bytes, seconds, and what runs a call."""
    if way == "ours":
        cgp.enable()
    else:
        cgp.disable()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    began = time.perf_counter()
    if way == "ours":
        runner = cgp.GraphRunner(model.function, sizes=sizes, progress=False)
        runner.capture(*model.arguments(max(sizes)))
        run: Callable[..., Any] = runner
    else:
        run = (_by_hand_for_training if model.trains else _by_hand)(model, sizes)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    for size in sizes:
        _run(run, model, size)
    gc.collect()
    torch.cuda.empty_cache()
    return free - torch.cuda.mem_get_info()[0], seconds, run


def _by_hand(model: Model, sizes: Sequence[int]) -> Callable[..., Any]:
    buffers = model.arguments(max(sizes))
    stream = torch.cuda.Stream()
    graphs, outputs = {}, {}
    pool = torch.cuda.graph_pool_handle()
    for size in sorted(sizes, reverse=True):
        static = [buffer[:size] for buffer in buffers]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                model.function(*static)
        torch.cuda.current_stream().wait_stream(stream)
        graphs[size] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[size], pool=pool, stream=stream):
            outputs[size] = model.function(*static)
    ascending = sorted(sizes)

    def run(*arguments: Any) -> Any:
        rows = len(arguments[0])
        size = ascending[bisect.bisect_left(ascending, rows)]
        for buffer, argument in zip(buffers, arguments, strict=True):
            buffer[:rows].copy_(argument)
        graphs[size].replay()
        return outputs[size][:rows]

    return run


class _Alone(nn.Module):  # type: ignore[misc]
    """What make_graphed_callables may change."""

    def __init__(self, model: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: Any) -> Any:
        return self.model(*arguments)


def _by_hand_for_training(model: Model, sizes: Sequence[int]) -> Callable[..., Any]:
    pool = torch.cuda.graph_pool_handle()
    graphed = {}
    for size in sorted(sizes, reverse=True):
        graphed[size] = torch.cuda.make_graphed_callables(
            _Alone(model.function), model.arguments(size), num_warmup_iters=3, pool=pool
        )
    ascending = sorted(sizes)

    def run(*arguments: Any) -> Any:
        rows = len(arguments[0])
        size = ascending[bisect.bisect_left(ascending, rows)]
        padded = [torch.nn.functional.pad(a, (0, 0, 0, size - rows)) for a in arguments]
        return graphed[size](*padded)[:rows]

    return run


def _run(function: Callable[..., Any], model: Model, size: int) -> None:
    _finish(model, function(*model.arguments(size)))


def _finish(model: Model, output: Any) -> None:
    if model.trains:
        output.float().square().mean().backward()


if __name__ == "__main__":
    sys.exit(run_script(main, measure))
