"""``cudagraph-pool footprint``: what a model takes eagerly, compiled, and with CUDA graphs.

Each way runs in a process of its own, on the same arguments.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from .._table import format_table, mib
from ..cli.errors import refuse
from ..integration.worker_process import ask

_MIB: Final = 1 << 20
# As often as PyTorch's dashboard runs a model for its memory. The first runs compile, and record.
_ROUNDS: Final = 5


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a model.

    Attributes:
        compile: Arguments of torch.compile; None: it is not compiled.
        has_graphs: Whether CUDA graphs run it.
        ours: Whether these are in our pool.
    """

    compile: Mapping[str, Any] | None = None
    has_graphs: bool = False
    ours: bool = False


_GRAPHS: Final = {"mode": "reduce-overhead", "dynamic": False}
WAYS: Final[Mapping[str, Way]] = {
    "eager": Way(),
    "compiled": Way(compile={"dynamic": False}),
    "graphs, stock": Way(_GRAPHS, has_graphs=True),
    "graphs, ours": Way(_GRAPHS, has_graphs=True, ours=True),
    "dynamic graphs, stock": Way({**_GRAPHS, "dynamic": True}, has_graphs=True),
    "dynamic graphs, ours": Way({**_GRAPHS, "dynamic": True}, has_graphs=True, ours=True),
}
# How the command line names them.
_WORDS: Final = {way.replace(",", "").replace(" ", "_"): way for way in WAYS}


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one way took, in bytes.

    Attributes:
        allocated: The peak of what tensors occupied, the model's own included.
        reserved: The peak of what PyTorch held.
        graph_pool: What pools of graphs hold in the end, of ``reserved``.
        driver: What the process has more in the end than with an empty context, beyond what PyTorch
            holds: kernels, and what the driver keeps for graphs. Where the driver does not say what
            a process has, it is what all have.
    """

    allocated: int
    reserved: int
    graph_pool: int
    driver: int

    @property
    def held(self) -> int:
        """What another program could not have had."""
        return self.reserved + self.driver


# By way; text where it failed.
Found = Mapping[str, "Footprint | str"]


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code: 1 if a way failed, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="cudagraph-pool footprint",
        description="What a model takes eagerly, compiled, with CUDA graphs and with graphs of "
        "dynamic shapes, these on PyTorch's own allocator and on the pool.",
    )
    parser.add_argument(
        "function",
        metavar="MODULE:FUNCTION",
        help="returns a model, or any function of tensors, and the arguments of a call on the GPU: "
        "a tuple, or a list of tuples for calls of several sizes",
    )
    parser.add_argument(
        "--train", action="store_true", help="run backward passes too, of the mean of the output"
    )
    parser.add_argument(
        "--ways",
        metavar="WAY,...",
        type=_ways,
        default=list(WAYS),
        help=f"some of these (default: all): {', '.join(_WORDS)}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures in bytes")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw them (needs matplotlib): png, svg, pdf"
    )
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.measure is not None:
        answer = sys.stdout
        sys.stdout = sys.stderr  # whatever the model prints
        make, measured = load(options.function), WAYS[options.measure]
        print(json.dumps(asdict(measure(make, measured, options.train))), file=answer)
        return 0
    problem = _problem(options)
    if problem is not None:
        return refuse(problem)
    for way in needing_kernels(options.ways):
        print(f"compiling {way}", file=sys.stderr)
        measure_apart(options.function, way, options.train)
    found = {}
    for way in options.ways:
        print(f"running {way}", file=sys.stderr)
        found[way] = measure_apart(options.function, way, options.train)
    print(table(found))
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(found), indent=1) + "\n")
    if options.picture is not None:
        draw({options.function: found}, options.picture)
    return 1 if any(isinstance(footprint, str) for footprint in found.values()) else 0


def _ways(text: str) -> list[str]:
    try:
        return [_WORDS[word] for word in text.split(",")]
    except KeyError as error:
        raise argparse.ArgumentTypeError(
            f"{error} is none of {', '.join(_WORDS)}, with commas between"
        ) from None


def _problem(options: argparse.Namespace) -> str | None:
    """What would fail only after minutes of measuring."""
    import importlib.util

    from .plot import FORMATS

    module, _, function = options.function.partition(":")
    if not module or not function:
        return f"{options.function!r} is not MODULE:FUNCTION, as in models:resnet"
    for file in filter(None, (options.json, options.picture)):
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            return f"{file}: no file can be written there"
    if options.picture and options.picture.suffix.lower() not in FORMATS:
        return f"--picture {options.picture} must end in one of {', '.join(FORMATS)}"
    for needed in ("torch", *(["matplotlib"] if options.picture else [])):
        if importlib.util.find_spec(needed) is None:
            return f"footprint needs {needed}, which is not installed here"
    import torch

    return (
        None if torch.cuda.is_available() else "footprint needs a GPU; torch finds no CUDA device"
    )


def needing_kernels(ways: Sequence[str]) -> list[str]:
    """One way for each set of kernels. To tune and compile them takes memory too, and only of the
    first process that needs them: one before those that are measured.
    """
    first: dict[str, str] = {}
    for way in ways:
        if WAYS[way].compile is not None:
            first.setdefault(json.dumps(WAYS[way].compile), way)
    return list(first.values())


def load(name: str) -> Callable[[], Any]:
    """The function that ``MODULE:FUNCTION`` names; modules of the current folder are found."""
    sys.path.insert(0, "")
    module, _, function = name.partition(":")
    found: Callable[[], Any] = getattr(importlib.import_module(module), function)
    return found


def measure_apart(
    function: str,
    way: str,
    train: bool,
    environment: Mapping[str, str] | None = None,
) -> Footprint | str:
    """What a way took in a process of its own, or what went wrong."""
    module = ["cudagraph_pool", "footprint", function, "--measure", way, *["--train"] * train]
    answer = ask(module, os.environ if environment is None else environment)
    return answer if isinstance(answer, str) else Footprint(**answer)


def measure(make: Callable[[], Any], way: Way, train: bool) -> Footprint:
    """What a way takes in this process, which has not used CUDA before."""
    import torch

    if way.ours:
        from cudagraph_pool import enable

        enable()
    torch.cuda.synchronize()  # from here on there is a context
    before = _used()
    model, calls = _made(make())
    if isinstance(model, torch.nn.Module):
        model.train(train)
    run = model if way.compile is None else torch.compile(model, **way.compile)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with torch.set_grad_enabled(train):
        for _ in range(_ROUNDS):
            for arguments in calls:
                if way.has_graphs:
                    torch.compiler.cudagraph_mark_step_begin()
                if train and isinstance(model, torch.nn.Module):
                    model.zero_grad(set_to_none=True)
                output = run(*arguments)
                if train:
                    _loss(output).backward()
                del output
    torch.cuda.synchronize()
    pools = [
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0)
    ]
    if way.has_graphs and not pools:
        raise RuntimeError("torch.compile made no CUDA graphs of it")
    return Footprint(
        allocated=torch.cuda.max_memory_allocated(),
        reserved=torch.cuda.max_memory_reserved(),
        graph_pool=sum(pools) if way.has_graphs else 0,
        driver=max(0, _used() - before - torch.cuda.memory_reserved()),
    )


def _made(returned: Any) -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
    match returned:
        case (model, tuple() as arguments) if callable(model):
            return model, [arguments]
        case (model, [*calls]) if callable(model) and all(isinstance(c, tuple) for c in calls):
            return model, calls
    raise TypeError(
        "the function must return a model and the arguments of a call, as (model, (x, y)), or of "
        "several: (model, [(x, y), ...])"
    )


def _loss(output: Any) -> Any:
    """A number to be made smaller: the output itself, or the mean of its first tensor that a
    gradient can come from.
    """
    from torch.utils._pytree import tree_leaves

    for first in tree_leaves(output):
        if getattr(first, "requires_grad", False):
            return first if first.numel() == 1 else first.float().mean()
    raise RuntimeError("no output of the model requires gradients, so that --train has no loss")


def used_by(process: int) -> int | None:
    """Bytes of devices that a process has, as the driver counts them, in MiB; None where it does
    not say.
    """
    query = ["nvidia-smi", "--query-compute-apps=pid,used_gpu_memory"]
    try:
        done = subprocess.run(
            [*query, "--format=csv,noheader,nounits"], capture_output=True, text=True
        )
    except OSError:
        return None
    rows = (line.split(", ") for line in done.stdout.splitlines())
    sizes = [int(row[1]) for row in rows if row[0] == str(process) and row[1].isdecimal()]
    return sum(sizes) * _MIB if sizes else None


def _used() -> int:
    import torch

    own = used_by(os.getpid())
    if own is not None:
        return own
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def ratio(found: Found, way: str) -> float | None:
    """The compression ratio, as PyTorch's dashboard has it: the peak of what is allocated eagerly,
    divided by this one's.
    """
    eager, own = found.get("eager"), found[way]
    if not isinstance(eager, Footprint) or not isinstance(own, Footprint):
        return None
    return eager.allocated / own.allocated


def table(found: Found) -> str:
    """Sizes in MiB."""
    rows = [["way", "allocated", "ratio", "reserved", "graph pool", "driver", "held"]]
    failed = []
    for way, footprint in found.items():
        if isinstance(footprint, str):
            failed.append(f"{way}: {footprint}")
            continue
        compression = ratio(found, way)
        rows.append(
            [
                way,
                mib(footprint.allocated),
                "-" if compression is None else f"{compression:.2f}",
                mib(footprint.reserved),
                mib(footprint.graph_pool) if WAYS[way].has_graphs else "-",
                mib(footprint.driver),
                mib(footprint.held),
            ]
        )
    return "\n".join([format_table(rows), *failed])


def as_json(found: Found) -> dict[str, Any]:
    """By way, in bytes, with the compression ratio; of a way that failed the error."""
    return {
        way: {"error": footprint}
        if isinstance(footprint, str)
        else {**asdict(footprint), "held": footprint.held, "compression_ratio": ratio(found, way)}
        for way, footprint in found.items()
    }


def draw(models: Mapping[str, Found], path: Path) -> None:
    """A picture: for each model what each way holds, and of it what tensors occupied at the peak,
    with the compression ratio beside it.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = min(2, len(models))
    rows = -(-len(models) // columns)
    height = 0.6 + 0.34 * max(map(len, models.values()))
    figure = Figure(figsize=(6.2 * columns, height * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, (name, found) in zip(panels, models.items(), strict=False):
        _draw_model(panel, name, found)
    for panel in panels[len(models) :]:
        panel.set_axis_off()
    parts, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        parts, labels, loc="outside upper right", ncols=len(parts), fontsize=8, frameon=False
    )
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "footprint"}):
        figure.savefig(path, dpi=150)


# What each stretch of a bar stands for, in the order in which they follow.
_COLOURS: Final = {
    "tensors": "#3b6ea5",
    "reserved beyond them": "#a9c4e0",
    "driver": "#d9d9d9",
}


def _draw_model(panel: Any, name: str, found: Found) -> None:
    ways = [way for way, footprint in found.items() if isinstance(footprint, Footprint)]
    for place, way in enumerate(ways):
        own = found[way]
        assert isinstance(own, Footprint)
        parts = (own.allocated, own.reserved - own.allocated, own.driver)
        begin = 0.0
        for size, (label, colour) in zip(parts, _COLOURS.items(), strict=True):
            panel.barh(
                place, size / _MIB, left=begin, color=colour, label=label if place == 0 else None
            )
            begin += size / _MIB
        compression = ratio(found, way)
        if compression is not None:
            panel.text(begin, place, f" {compression:.2f}", va="center", fontsize=8)
    panel.set_yticks(range(len(ways)), ways, fontsize=8)
    panel.invert_yaxis()
    panel.margins(x=0.12)
    panel.set_title(name, fontsize=9, loc="left")
    panel.set_xlabel("MiB (the number: compression ratio)", fontsize=7)
    panel.tick_params(axis="x", labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)
