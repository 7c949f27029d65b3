"""What models take eagerly, compiled, with CUDA graphs and with graphs of dynamic shapes.

Eight models of torchvision, timm and transformers, inference and training, three batch sizes each,
smallest first; with graphs on PyTorch's own allocator and on cudagraph_pool. Each way of each runs
in a process of its own, alone on the GPU, after a run of all that fills the compiler's caches.
Prints a table for each, writes JSON and a picture. Exit code 0 if no way with graphs holds more on
the pool than on PyTorch's own allocator, 1 if one does or fails, 2 without a GPU.

    python benchmarks/footprint.py --output results/footprint.json --picture ../docs/footprint.svg
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _command import device, positive, write_report

from cudagraph_pool._footprint import (
    WAYS,
    Footprint,
    Found,
    as_json,
    draw,
    measure_apart,
    needing_kernels,
    table,
)

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
    cases = list(itertools.product(options.models, options.modes))
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = _environment(
            options.caches or Path(folder), threads=max(1, (os.cpu_count() or 1) // options.jobs)
        )

        def fill_caches(case: tuple[str, str], way: str) -> None:
            began = time.perf_counter()
            _measure(*case, way, environment)
            seconds = time.perf_counter() - began
            print(f"compiled {', '.join(case)}, {way}: {seconds:.0f} s", file=sys.stderr)

        # They wait for the GPU together, with all imported.
        lock = Path(folder, "gpu")
        with ThreadPoolExecutor(options.jobs) as executor:
            compiling = itertools.product(cases, needing_kernels(list(WAYS)))
            for future in [executor.submit(fill_caches, *of_way) for of_way in compiling]:
                future.result()
            running = {
                case: {
                    way: executor.submit(_measure, *case, way, environment, lock) for way in WAYS
                }
                for case in cases
            }
            for (model, mode), ways in running.items():
                name = f"{model}, {mode}"
                found[name] = {way: future.result() for way, future in ways.items()}
                print(f"{name}\n{table(found[name])}\n", flush=True)
                if options.output is not None:
                    rows = {name: as_json(of_case) for name, of_case in found.items()}
                    write_report({**machine, "rows": rows}, options.output)
    if options.picture is not None:
        draw(found, options.picture)
    problems = [f"{name}: {what}" for name, of_case in found.items() for what in judge(of_case)]
    print(*problems, sep="\n")
    return 1 if problems else 0


def _environment(caches: Path, threads: int) -> dict[str, str]:
    folder = str(Path(__file__).parent)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")])),
        "TORCHINDUCTOR_CACHE_DIR": str(caches),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
    }


def _measure(
    model: str, mode: str, way: str, environment: Mapping[str, str], lock: Path | None = None
) -> Footprint | str:
    return measure_apart(f"_footprint_models:{model}", way, mode == "training", environment, lock)


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
