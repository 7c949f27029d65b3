"""Which of CUDA graphs, torch.compile, activation checkpoints and several GPUs go together.

Trains a small transformer for some steps in each combination, under PyTorch's own allocator and
under cudagraph_pool, on as many GPUs as there are up to two. It works if the losses are those of
eager training with the same parallelism, as far as kernels of the compiler allow. Prints a table as
Markdown, which docs/combinations.md shows, and writes JSON. Exit code 0 if ours works wherever
stock does, 1 if not, 2 without a GPU.

    python benchmarks/combinations.py --output results/combinations.json
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from _command import add_common, add_some, markdown, new_parser, new_report, positive, write_report

PARALLEL = ("none", "ddp", "fsdp2")
GRAPHS = ("step", "compiled step", "reduce-overhead", "runner")
ALLOCATORS = ("stock", "ours")
_WORKER = Path(__file__).parent / "_combinations_worker.py"
_TOLERANCE = 2e-3  # relative, of a loss


class Combination(NamedTuple):
    """What _combinations_worker.py takes, as JSON."""

    parallel: str
    checkpoints: bool
    graphs: str
    allocator: str


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser(__doc__)
    add_some(parser, "--parallel", PARALLEL)
    add_some(parser, "--graphs", GRAPHS)
    parser.add_argument("--jobs", type=positive, default=4, help="combinations at a time")
    add_common(parser, timeout=240)
    options = parser.parse_args(argv)
    report = new_report(options)
    import torch

    report["gpus"] = gpus = min(2, torch.cuda.device_count())
    asked = combinations(options.parallel, options.graphs)
    with ThreadPoolExecutor(options.jobs) as executor:
        ran = executor.map(lambda c: run(c, gpus, options.timeout), asked)
        for combination, row in zip(asked, ran, strict=True):
            report["rows"].append({**combination._asdict(), **row})
            print(*combination, row.get("error", "done"), file=sys.stderr, flush=True)
            write_report(report, options.output)
    print("\n".join(table(report["rows"])))
    found = by_combination(report["rows"])
    return 0 if all(no_worse(found, combination) for combination in asked) else 1


def combinations(parallel: Sequence[str], graphs: Sequence[str]) -> list[Combination]:
    """Those that there are, and eager training for each to be held against."""
    made = []
    for how, checkpoints in itertools.product(parallel, (False, True)):
        made.append(Combination(how, checkpoints, "eager", "stock"))
        for kind, allocator in itertools.product(graphs, ALLOCATORS):
            # A GraphRunner runs on ours alone, and a module that it stands for is no module.
            if kind != "runner" or (allocator == "ours" and how == "none"):
                made.append(Combination(how, checkpoints, kind, allocator))
    return made


def run(combination: Combination, gpus: int, timeout: float) -> dict[str, Any]:
    """Its losses and what its pools hold, or the error."""
    ranks = 1 if combination.parallel == "none" else gpus
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(_WORKER), json.dumps(combination)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as torchrun:
        try:
            output, errors = torchrun.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            torchrun.terminate()  # not killed: it ends the ranks, which are not of its session
            return {"error": f"no end in {timeout:.0f} s"}
    if torchrun.returncode:
        return {"error": first_error(errors)}
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def first_error(said: str) -> str:
    """The line that names it, of the rank that failed first."""
    lines = [line.partition("]:")[2] or line for line in said.splitlines()]
    named = [line.strip() for line in lines if "Error:" in line or "Exception:" in line]
    return (named or [line.strip() for line in lines if line.strip()] or ["nothing was said"])[0]


def works(found: dict[Combination, dict[str, Any]], combination: Combination) -> bool:
    own = found[combination]
    eager = found[combination._replace(graphs="eager", allocator="stock")]
    if "error" in own or "error" in eager:
        return False
    pairs = zip(own["losses"], eager["losses"], strict=True)
    return all(math.isclose(a, b, rel_tol=_TOLERANCE) for a, b in pairs)


def no_worse(found: dict[Combination, dict[str, Any]], combination: Combination) -> bool:
    if combination.allocator == "stock" or works(found, combination):
        return True
    stock = combination._replace(allocator="stock")
    return stock in found and not works(found, stock)


def by_combination(rows: Sequence[dict[str, Any]]) -> dict[Combination, dict[str, Any]]:
    """The rows of a report."""
    return {Combination(*(row[name] for name in Combination._fields)): row for row in rows}


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown of a report's rows; what the pools of graphs hold in MiB, and errors below."""
    found = by_combination(rows)
    lines: list[list[str]] = []
    errors: list[str] = []

    def told(combination: Combination) -> str:
        row = found.get(combination)
        if row is None:
            return ""
        if works(found, combination):
            held: int = row["graph_pool_bytes"]
            return f"{held / 2**20:,.0f} MiB" if held else "without graphs"
        why = row.get("error", "losses that differ from eager's")
        if why not in errors:
            errors.append(why)
        return f"no ({errors.index(why) + 1})"

    for how, checkpoints, kind, _ in dict.fromkeys(c._replace(allocator="") for c in found):
        if kind != "eager":
            cells = [told(Combination(how, checkpoints, kind, name)) for name in ALLOCATORS]
            lines.append([how, "yes" if checkpoints else "no", kind, *cells])
    head = ["GPUs", "checkpoints", "graphs", "stock", "ours"]
    said = [f"{n}. `{why}`" for n, why in enumerate(errors, 1)]
    return [*markdown(head, lines), *([""] if said else []), *said]


if __name__ == "__main__":
    sys.exit(main())
