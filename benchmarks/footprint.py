"""What models take eagerly, compiled, with CUDA graphs and with graphs of dynamic shapes.

Eight models of torchvision, timm and transformers, inference and training, three batch sizes each,
smallest first; with graphs on PyTorch's own allocator and on cudagraph_pool. Each way of each runs
in a process of its own, after others that fill the compiler's caches; each GPU runs one at a time.
Prints a table for each, writes JSON and a picture. Where the JSON is there already, only what it
lacks is run. Exit code 0 if no way with graphs holds more on the pool than on PyTorch's own
allocator, 1 if one does or a way fails but for the compiler, 2 without a GPU.

    python benchmarks/footprint.py --output results/footprint.json --picture ../docs/footprint.svg
"""

from __future__ import annotations

import itertools
import os
import queue
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import fields
from pathlib import Path
from typing import Any

from _command import add_common, add_some, new_parser, resume, verdict, write_report

from cudagraph_pool.tools.footprint import (
    COMPILING,
    WAYS,
    Footprint,
    Found,
    as_json,
    measure_apart,
    ratio,
    table,
)
from cudagraph_pool.tools.plot import STYLE

MODELS = "resnet50 vit_b_16 convnext_tiny mobilenetv3 bert gpt2 llama qwen2".split()
MODES = ("inference", "training")
_NAMES = [", ".join(case) for case in itertools.product(MODELS, MODES)]

_MIB = 1 << 20
# What the driver holds differs by so much from run to run.
_DRIVER_NOISE = 4 << 20


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser(__doc__)
    add_some(parser, "--models", MODELS)
    add_some(parser, "--modes", MODES)
    parser.add_argument(
        "--caches", type=Path, metavar="FOLDER", help="of kernels, kept for the next run"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="png, svg or pdf")
    add_common(parser)
    options = parser.parse_args(argv)
    report = resume(options.output)
    found: dict[str, Found] = {
        case: {way: _from_json(row) for way, row in ways.items()}
        for case, ways in dict(report["rows"]).items()
    }
    asked = map(", ".join, itertools.product(options.models, options.modes))
    cases = [name for name in asked if not _is_whole(found.get(name))]
    gpus = _gpus()
    idle: queue.SimpleQueue[str] = queue.SimpleQueue()
    for gpu in gpus:
        idle.put(gpu)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(gpus)) as executor:
        environment = _environment(options.caches or Path(folder), min(len(gpus), len(cases) or 1))
        measuring = {executor.submit(_measure_on, idle, name, environment): name for name in cases}
        for done in as_completed(measuring):
            name = measuring[done]
            found[name] = done.result()
            print(f"{name}\n{table(found[name])}\n", flush=True)
            found = {name: found[name] for name in _NAMES if name in found}
            report["rows"] = {name: as_json(of_case) for name, of_case in found.items()}
            write_report(report, options.output)
    if options.picture is not None:
        draw(found, options.picture)
    return verdict(f"{name}: {what}" for name in found for what in judge(found[name]))


def _measure_on(idle: queue.SimpleQueue[str], name: str, environment: Mapping[str, str]) -> Found:
    """On a GPU that nothing else is measured on: what the driver has is that of all processes."""
    gpu = idle.get()
    try:
        return measure_case(name, {**environment, "CUDA_VISIBLE_DEVICES": gpu})
    finally:
        idle.put(gpu)


def measure_case(name: str, environment: Mapping[str, str]) -> Found:
    """All ways of one, each in a process of its own. Those that are compiled run after others that
    fill the compiler's caches.
    """
    model, mode = name.split(", ")

    def run(way: str) -> Footprint | str:
        began = time.perf_counter()
        found = measure_apart(f"_footprint_models:{model}", way, mode == "training", environment)
        seconds = time.perf_counter() - began
        print(f"{name}, {way}: {seconds:.0f} s", file=sys.stderr, flush=True)
        return found

    for way in COMPILING:
        run(way)
    return {way: run(way) for way in WAYS}


def _from_json(row: Mapping[str, Any]) -> Footprint | str:
    """What as_json() made of one way."""
    if "error" in row:
        return str(row["error"])
    return Footprint(*(row[field.name] for field in fields(Footprint)))


def _gpus() -> list[str]:
    """Those that the cases have in turn, by their names in CUDA_VISIBLE_DEVICES."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))


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


def draw(models: Mapping[str, Found], path: Path) -> None:
    """For each model what each way holds, and of it what tensors occupied at the peak."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns, rows = min(2, len(models)), (len(models) + 1) // 2
    height = 1.2 + 0.4 * max(map(len, models.values()))
    with rc_context(STYLE):
        figure = Figure(figsize=(5 * columns + 1, height * rows + 0.5), layout="constrained")
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for panel, (name, found) in zip(panels, models.items(), strict=False):
            _draw_model(panel, name, found)
        for panel in panels[len(models) :]:
            panel.set_axis_off()
        parts, labels = panels[0].get_legend_handles_labels()
        figure.legend(parts, labels, loc="outside upper left", ncols=len(parts), frameon=False)
        figure.savefig(path, dpi=120)


def _draw_model(panel: Any, name: str, found: Found) -> None:
    measured = {way: own for way, own in found.items() if isinstance(own, Footprint)}
    for label, colour, begins, ends in (
        ("driver", "#d9d9d9", "reserved", "held"),
        ("reserved beyond them", "#a9c4e0", "allocated", "reserved"),
        ("tensors", "#3b6ea5", "", "allocated"),
    ):
        left = [getattr(own, begins, 0) / _MIB for own in measured.values()]
        sizes = [getattr(own, ends) / _MIB for own in measured.values()]
        widths = [size - begin for size, begin in zip(sizes, left, strict=True)]
        bars = panel.barh(list(measured), widths, left=left, color=colour, label=label)
        if ends == "held":
            ratios = [f" ({r:.2f})" if (r := ratio(found, way)) else "" for way in measured]
            labels = [f"{size:,.0f}{said}" for size, said in zip(sizes, ratios, strict=True)]
            panel.bar_label(bars, labels, padding=3)
    panel.invert_yaxis()
    panel.margins(x=0.35)
    panel.set_title(name, loc="left", fontsize=11)
    panel.set_xlabel("MiB (compression ratio)")


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
