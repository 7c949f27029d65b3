"""What models take eagerly, compiled, with CUDA graphs and with graphs of dynamic shapes.

Eight models of torchvision, timm and transformers, inference and training, three batch sizes each,
smallest first; with graphs on PyTorch's own allocator and on cudagraph_pool. Each way of each runs
in a process of its own, some beside each other, after others that fill the compiler's caches.
Prints a table for each, writes JSON and a picture. Where the JSON is there already, only what it
lacks is run. Exit code 0 if no way with graphs holds more on the pool than on PyTorch's own
allocator, 1 if one does or a way fails but for the compiler, 2 without a GPU.

    python benchmarks/footprint.py --output results/footprint.json --picture ../docs/footprint.svg
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import fields
from pathlib import Path

from _command import add_some, device, new_parser, positive, write_report

from cudagraph_pool._footprint import (
    WAYS,
    Footprint,
    Found,
    as_json,
    draw,
    measure_apart,
    needing_kernels,
    table,
    used_by,
)

MODELS = "resnet50 vit_b_16 convnext_tiny mobilenetv3 bert gpt2 llama qwen2".split()
MODES = ("inference", "training")
Case = tuple[str, str]  # a model and a mode
_NAMES = [", ".join(case) for case in itertools.product(MODELS, MODES)]

# What the driver holds differs by so much from run to run.
_DRIVER_NOISE = 4 << 20


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser(__doc__)
    add_some(parser, "--models", MODELS)
    add_some(parser, "--modes", MODES)
    parser.add_argument("--jobs", type=positive, default=8, help="processes at a time")
    parser.add_argument(
        "--caches", type=Path, metavar="FOLDER", help="of kernels, kept for the next run"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="png, svg or pdf")
    options = parser.parse_args(argv)
    machine = device()
    import torch

    found = _found_before(options.output, machine)
    cases = [
        case
        for case in itertools.product(options.models, options.modes)
        if not _is_whole(found.get(", ".join(case)))
    ]
    jobs = _most_at_a_time(options.jobs)
    with tempfile.TemporaryDirectory() as folder:
        environment = _environment(options.caches or Path(folder), min(jobs, len(cases) or 1))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else map(str, range(torch.cuda.device_count()))
        runs = Runs(environment, jobs, list(gpus))
        for name, of_case in runs.all(cases):
            found[name] = of_case
            print(f"{name}\n{table(of_case)}\n", flush=True)
            found = {name: found[name] for name in _NAMES if name in found}
            if options.output is not None:
                rows = {name: as_json(of_case) for name, of_case in found.items()}
                write_report({**machine, "rows": rows}, options.output)
    if options.picture is not None:
        draw(found, options.picture)
    problems = [f"{name}: {what}" for name, of_case in found.items() for what in judge(of_case)]
    print(*problems, sep="\n")
    return 1 if problems else 0


class Runs:
    """Processes, some at a time, that measure a way of a model each, on the GPUs in turn."""

    def __init__(self, environment: Mapping[str, str], jobs: int, gpus: Sequence[str]) -> None:
        self._environment = environment
        self._jobs = jobs
        self._gpus = itertools.cycle(gpus)

    def all(self, cases: Sequence[Case]) -> Iterator[tuple[str, Found]]:
        """Each case, as soon as it is measured."""
        with ThreadPoolExecutor(self._jobs) as executor:
            # First in the executor's queue, so that none that waits for one keeps it from running.
            kernels = {case: executor.submit(self._fill_caches, case) for case in cases}
            measuring = {
                executor.submit(self._measure, case, way, kernels[case]): (case, way)
                for case, way in itertools.product(cases, WAYS)
            }
            found: dict[Case, dict[str, Footprint | str]] = {case: {} for case in cases}
            for done in as_completed(measuring):
                case, way = measuring[done]
                found[case][way] = done.result()
                if len(found[case]) == len(WAYS):
                    yield ", ".join(case), {way: found[case][way] for way in WAYS}

    def _fill_caches(self, case: Case) -> None:
        """Ways that are compiled alike have the same kernels, and the others many of them: one
        after the other, none is made twice.
        """
        for way in needing_kernels(list(WAYS)):
            self._run(case, way)

    def _measure(self, case: Case, way: str, kernels: Future[None]) -> Footprint | str:
        if WAYS[way].compile is not None:
            kernels.result()
        return self._run(case, way)

    def _run(self, case: Case, way: str) -> Footprint | str:
        began = time.perf_counter()
        model, mode = case
        environment = {**self._environment, "CUDA_VISIBLE_DEVICES": next(self._gpus)}
        found = measure_apart(f"_footprint_models:{model}", way, mode == "training", environment)
        seconds = time.perf_counter() - began
        print(f"{model}, {mode}, {way}: {seconds:.0f} s", file=sys.stderr, flush=True)
        return found


def _found_before(path: Path | None, machine: Mapping[str, str]) -> dict[str, Found]:
    """What an earlier call wrote."""
    if path is None or not path.exists():
        return {}
    report = json.loads(path.read_text())
    if any(report[name] != value for name, value in machine.items()):
        raise SystemExit(f"{path} is not of {machine}: name another --output")
    figures = [field.name for field in fields(Footprint)]
    return {
        case: {
            way: row.get("error") or Footprint(*(row[name] for name in figures))
            for way, row in ways.items()
        }
        for case, ways in report["rows"].items()
    }


def _is_whole(found: Found | None) -> bool:
    return found is not None and not any(isinstance(of_way, str) for of_way in found.values())


def _environment(caches: Path, compiling: int) -> dict[str, str]:
    folder = str(Path(__file__).parent)
    paths = [folder, os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TORCHINDUCTOR_CACHE_DIR": str(caches),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // compiling)),
    }


def _most_at_a_time(jobs: int) -> int:
    """One, where it is not known which process has what of the device."""
    import torch

    torch.cuda.synchronize()  # from here on this process has a context
    if used_by(os.getpid()) is not None:
        return jobs
    print("footprint.py: nvidia-smi does not say what each process has: one at a time")
    return 1


def judge(found: Found) -> list[str]:
    """What is not as it should be."""
    problems = []
    for way, own in found.items():
        graphs, _, allocator = way.partition(", ")
        other = found.get(f"{graphs}, {'stock' if allocator == 'ours' else 'ours'}")
        if isinstance(own, str):
            if not (_is_compilers(own) and _is_compilers(other)):
                problems.append(f"{way} {own}")
        elif WAYS[way].ours and isinstance(other, Footprint):
            problems += [f"{way}: {what}" for what in _larger(own, other)]
    return problems


def _is_compilers(found: Footprint | str | None) -> bool:
    """Whether it is an error of the compiler, who knows nothing of allocators."""
    return isinstance(found, str) and "torch._inductor.exc." in found


def _larger(ours: Footprint, stock: Footprint) -> Iterator[str]:
    for figure in ("held", "reserved", "graph_pool"):
        own, other = getattr(ours, figure), getattr(stock, figure)
        if own > other + (_DRIVER_NOISE if figure == "held" else 0):
            yield f"{figure} {own:,} bytes, {other:,} on stock"


if __name__ == "__main__":
    sys.exit(main())
