"""How much slower the device runs an executable that was updated than one that was made.

An executable is made from graph a, updated to b and back to a, and timed after each step against
executables made from a and b: chains of small kernels that differ in one way, and two sizes of the
Llama-like decode step for which an update is safe. Prints a table in Markdown;
docs/graph_updates.md says what it means. Needs a GPU.

    python benchmarks/updated_replay.py --output updated_replay.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _command import device as this_device
from _command import write_report

_KERNELS = 360
_LAUNCHES = 30
_ROUNDS = 5
# Sizes whose kernels have equal cluster dimensions on Hopper: an update keeps those silently.
_LLAMA_SIZES = (16, 32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="the report, as JSON")
    options = parser.parse_args()
    machine = this_device()
    if machine is None:
        print("updated_replay.py: torch sees no CUDA GPU", file=sys.stderr)
        return 2
    report: dict[str, Any] = {**machine, "rows": _rows()}
    write_report(report, options.output)
    print(f"Measured on one {machine['gpu']} with torch {machine['torch']}.\n")
    heads = ("a to b", "nodes", "made from a, µs", "made from b", "a to b", "a to b to a")
    print("| " + " | ".join((*heads, "slower, µs a node")) + " |")
    print("|---|---|---|---|---|---|---|")
    for row in report["rows"]:
        times = (row[key] for key in ("made_a_us", "made_b_us", "to_b_us", "back_to_a_us"))
        slower = row["slower_us_a_node"]
        print(
            f"| {row['name']} | {row['nodes']} | " + " | ".join(f"{t:.1f}" for t in times), end=""
        )
        print(f" | {slower:.2f} |")
    return 0


def _rows() -> list[dict[str, Any]]:
    import torch
    from workloads import WORKLOADS

    stream = torch.cuda.Stream()
    x = torch.ones(1 << 20, device="cuda")

    def chain(
        op: str = "add", size: int = 4096, scalar: float = 1.0, every: int = 1, rest: str = "add"
    ) -> Callable[[], None]:
        """Kernels one behind the other, each ``every``-th of them an ``op``."""

        def run() -> None:
            y = x[:size]
            for i in range(_KERNELS):
                what = op if i % every == 0 else rest
                _OPS[what](y, scalar)

        return run

    llama = WORKLOADS["llama"](torch.device("cuda", torch.cuda.current_device()))
    for key in _LLAMA_SIZES:
        llama.fill(key, seed=key)
    pairs: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "parameters": (chain(), chain(scalar=2.0)),
        "grids": (chain(), chain(size=8192)),
        "functions": (chain(), chain("mul")),
        "functions of one kernel in nine": (chain(), chain("mul", every=9)),
        "Llama-like decode, batch {} to {}".format(*_LLAMA_SIZES): (
            lambda: llama.step(_LLAMA_SIZES[0]),
            lambda: llama.step(_LLAMA_SIZES[1]),
        ),
    }
    return [{"name": name, **_compare(a, b, stream)} for name, (a, b) in pairs.items()]


_OPS: dict[str, Callable[[Any, float], Any]] = {
    "add": lambda y, scalar: y.add_(scalar),
    "mul": lambda y, scalar: y.mul_(scalar),
}


def _compare(a: Callable[[], None], b: Callable[[], None], stream: Any) -> dict[str, Any]:
    from _exec_driver import BareSwitch
    from _graph_shape import shape_of

    templates = [_template(a, stream), _template(b, stream)]
    made = [BareSwitch([template], stream) for template in templates]
    shared = BareSwitch(templates, stream)  # has been both already, and is b now
    there = _device_us(shared, stream)
    shared.switch(0)
    back = _device_us(shared, stream)
    made_a, made_b = (_device_us(one, stream) for one in made)
    nodes = shape_of(templates[0]).nodes
    for one in (*made, shared):
        one.close()
    return {
        "nodes": nodes,
        "made_a_us": made_a,
        "made_b_us": made_b,
        "to_b_us": there,
        "back_to_a_us": back,
        "slower_us_a_node": (there - made_b) / nodes,
    }


def _template(run: Callable[[], None], stream: Any) -> Any:
    import torch

    with torch.cuda.stream(stream):
        run()  # what libraries load or make lazily is not part of a capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def _device_us(executable: Any, stream: Any) -> float:
    """The time on the device of one launch among several, the median of some rounds."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rounds: list[float] = []
    for _ in range(_ROUNDS):
        begin.record(stream)
        executable.launch(_LAUNCHES)
        end.record(stream)
        torch.cuda.synchronize()
        rounds.append(begin.elapsed_time(end) * 1000 / _LAUNCHES)
    return statistics.median(rounds)


if __name__ == "__main__":
    raise SystemExit(main())
