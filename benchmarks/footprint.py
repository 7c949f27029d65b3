"""What models take eagerly, compiled, with CUDA graphs and with graphs of dynamic shapes.

Eight models of torchvision, timm and transformers, inference and training, three batch sizes each,
smallest first; with graphs on PyTorch's own allocator and on cudagraph_pool. Each way of each runs
in a process of its own, some beside each other, after a run of all that fills the compiler's
caches. What the driver holds for one is seen when it ends, all others being stopped. Prints a
table for each, writes JSON and a picture. Exit code 0 if no way with graphs holds more on the pool
than on PyTorch's own allocator, 1 if one does or fails, 2 without a GPU.

    python benchmarks/footprint.py --output results/footprint.json --picture ../docs/footprint.svg
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from _command import device, positive, write_report
from _lanes import Answer, Lanes

from cudagraph_pool._footprint import (
    WAYS,
    Footprint,
    Found,
    as_json,
    draw,
    measuring,
    needing_kernels,
    table,
)
from cudagraph_pool._worker_process import command, environment_for

MODELS = (
    "resnet50",
    "vit_b_16",
    "convnext_tiny",
    "mobilenetv3",
    "bert",
    "gpt2",
    "llama",
    "qwen2",
)
MODES = ("inference", "training")

# What a process has of the device before it does anything.
_CONTEXT = "import torch; torch.cuda.synchronize(); print('{}', flush=True); input()"
_SECONDS = 600  # for one process
# What the driver holds differs by so much from run to run.
_DRIVER_NOISE = 4 << 20


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--jobs", type=positive, default=8, help="processes at a time")
    parser.add_argument(
        "--caches", type=Path, metavar="FOLDER", help="of kernels, kept for the next run"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="png, svg or pdf")
    options = parser.parse_args(argv)
    machine = device()
    if machine is None:
        print("footprint.py: no CUDA device", file=sys.stderr)
        return 2
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(_environment(options.caches or Path(folder), options.jobs), options.jobs)
        for name, of_case in runs.all(options.models, options.modes):
            found[name] = of_case
            print(f"{name}\n{table(of_case)}\n", flush=True)
            if options.output is not None:
                rows = {name: as_json(of_case) for name, of_case in found.items()}
                write_report({**machine, "rows": rows}, options.output)
    if options.picture is not None:
        draw(found, options.picture)
    problems = [f"{name}: {what}" for name, of_case in found.items() for what in judge(of_case)]
    print(*problems, sep="\n")
    return 1 if problems else 0


class Runs:
    """Processes, some at a time, that measure a way of a model each."""

    def __init__(self, environment: Mapping[str, str], jobs: int) -> None:
        self._environment = environment
        self._jobs = jobs
        self._lanes = Lanes(_used)

    def all(self, models: Sequence[str], modes: Sequence[str]) -> Iterator[tuple[str, Found]]:
        """Each model in each mode, as soon as it and those before it are measured."""
        cases = list(itertools.product(models, modes))
        compiling = itertools.product(cases, needing_kernels(list(WAYS)))
        context = self._lanes.ask([sys.executable, "-c", _CONTEXT], self._environment, _SECONDS)
        if isinstance(context, str):
            raise RuntimeError(f"CUDA cannot be initialised: {context}")
        with ThreadPoolExecutor(self._jobs) as executor:
            for future in [executor.submit(self._compile, *of_way) for of_way in compiling]:
                future.result()
            measure = partial(self._measure, context.held_bytes)
            measuring = {
                case: {way: executor.submit(measure, case, way) for way in WAYS} for case in cases
            }
            for (model, mode), ways in measuring.items():
                yield f"{model}, {mode}", {way: found.result() for way, found in ways.items()}

    def _compile(self, case: tuple[str, str], way: str) -> None:
        began = time.perf_counter()
        self._ask(case, way)
        seconds = time.perf_counter() - began
        print(f"compiled {', '.join(case)}, {way}: {seconds:.0f} s", file=sys.stderr)

    def _measure(self, context_bytes: int, case: tuple[str, str], way: str) -> Footprint | str:
        answer = self._ask(case, way)
        if isinstance(answer, str):
            return answer
        # What it took for the driver's includes what those beside it took.
        driver = answer.held_bytes - context_bytes - answer.printed.pop("holds")
        return replace(Footprint(**answer.printed), driver=max(0, driver))

    def _ask(self, case: tuple[str, str], way: str) -> Answer | str:
        model, mode = case
        module = measuring(f"_footprint_models:{model}", way, mode == "training")
        return self._lanes.ask(command([*module, "--stay"]), self._environment, _SECONDS)


def _environment(caches: Path, jobs: int) -> dict[str, str]:
    folder = str(Path(__file__).parent)
    paths = [folder, os.environ.get("PYTHONPATH", "")]
    return environment_for(
        {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TORCHINDUCTOR_CACHE_DIR": str(caches),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // jobs)),
        }
    )


def _used() -> int:
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def judge(found: Found) -> list[str]:
    """What is not as it should be."""
    problems = [f"{way} {why}" for way, why in found.items() if isinstance(why, str)]
    for way, ours in found.items():
        stock = found.get(way.replace("ours", "stock"))
        if not WAYS[way].ours or isinstance(ours, str) or not isinstance(stock, Footprint):
            continue
        for figure in ("held", "reserved", "graph_pool"):
            own, other = getattr(ours, figure), getattr(stock, figure)
            if own > other + (_DRIVER_NOISE if figure == "held" else 0):
                problems.append(f"{way}: {figure} {own:,} bytes, {other:,} on stock")
    return problems


if __name__ == "__main__":
    sys.exit(main())
