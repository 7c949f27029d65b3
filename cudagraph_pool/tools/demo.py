"""``cudagraph-pool demo``: what N graphs cost on stock PyTorch, also for a careful user, and what
they cost on the pool.

With a GPU it captures two workloads, each allocator in a process of its own. Without one it replays
recorded captures through the same core on the host.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from .._table import format_table
from ..integration.worker_process import ask

_TRACES: Final = Path(__file__).parents[1] / "traces"
# What the table calls them. The second and third are PyTorch's too, as a careful user has it.
_ALLOCATORS: Final = {
    "stock": "stock PyTorch",
    "expandable": "expandable segments",
    "primed": "primed pool",
    "ours": "cudagraph_pool",
}
_ROUNDS: Final = 5
_PASSES: Final = 10
_WORKER_SECONDS: Final = 300

_HEAD: Final = "captured graphs allocator reserved minimum ratio capture replay"


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of the table; None where there is nothing to tell.

    Times are of all graphs together.
    """

    workload: str
    graphs: int
    allocator: str
    reserved_bytes: int
    minimum_bytes: int
    capture_seconds: float | None
    replay_seconds: float | None
    outputs: str

    def cells(self) -> list[str]:
        return [
            self.workload,
            str(self.graphs),
            self.allocator,
            f"{self.reserved_bytes / (1 << 20):.0f} MiB",
            f"{self.minimum_bytes / (1 << 20):.0f} MiB",
            f"{self.reserved_bytes / self.minimum_bytes:.3f}",
            _milliseconds(self.capture_seconds, 0),
            _milliseconds(self.replay_seconds, 2),
        ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo and returns its exit code: 0, or 1 if something failed or an output is
    wrong.
    """
    parser = argparse.ArgumentParser(
        prog="cudagraph-pool demo",
        description="Captures a script and a transformer for many batch sizes, smallest first, on "
        "stock PyTorch and on the pool. Without a GPU: replays recorded captures.",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed for random inputs (default: 0)")
    parser.add_argument("--worker", choices=_ALLOCATORS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        return _work(options.worker, options.seed)
    gpu = _gpu_name()
    if gpu is None:
        return _demo_from_traces()
    return _demo_on_gpu(gpu, options.seed)


def _gpu_name() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _print_table(lines: Sequence[_Line]) -> None:
    print(format_table([_HEAD.split(), *(line.cells() for line in lines)], (0, 2)))
    print("minimum: the most that was allocated at once; no allocator can do with less")
    print("primed pool: stock, where one block comes first, of the best of three sizes")
    for line in lines:
        if line.outputs:
            print(f"{line.workload}, {line.allocator}: {line.outputs}")


def _milliseconds(seconds: float | None, digits: int) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.{digits}f} ms"


# Without a GPU.


def _demo_from_traces() -> int:
    from .replay import replay
    from .stock import primed_bytes, reserved_bytes
    from .trace import read_trace

    lines = []
    for path in sorted(_TRACES.glob("*.json.gz")):
        trace = read_trace(path)
        result = replay(trace)
        with gzip.open(path) as file:
            recorded = json.load(file)["stock"].get("capture_s")
        reserved = {
            "stock": reserved_bytes(trace.graphs),
            "expandable": reserved_bytes(trace.graphs, expandable=True),
            "primed": primed_bytes(trace.graphs),
            "ours": result["reserved_bytes"],
        }
        for name, size in reserved.items():
            seconds = recorded if name == "stock" else None
            common = trace.name, result["graphs"], _ALLOCATORS[name], size, result["minimum_bytes"]
            lines.append(_Line(*common, seconds, None, ""))
    _print_table(lines)
    print(
        "\nNo GPU here: the pool's core replayed recorded captures on the host; what PyTorch's\n"
        "own allocator reserves is worked out by its rules, and its time is an H200's."
    )
    return 0


# With a GPU.


def _demo_on_gpu(gpu: str, seed: int) -> int:
    """Stock first: where its graphs differ from eager, the others' are compared with them."""
    found: dict[str, list[dict[str, Any]]] = {}
    for allocator in _ALLOCATORS:
        answer = _run_worker(allocator, seed)
        if isinstance(answer, str):
            print(f"cudagraph-pool demo: {allocator}: {answer}", file=sys.stderr)
            return 1
        found[allocator] = answer
    lines = []
    good = True
    for rows in zip(*found.values(), strict=True):
        stock = rows[0]
        for allocator, own in zip(found, rows, strict=True):
            wrong, outputs = _judge(own["outputs"], None if own is stock else stock["outputs"])
            good = good and not (wrong and allocator == "ours")
            lines.append(
                _Line(
                    stock["workload"],
                    stock["graphs"],
                    _ALLOCATORS[allocator],
                    own["reserved_bytes"],
                    stock["minimum_bytes"],
                    own["capture_seconds"],
                    own["replay_seconds"],
                    outputs,
                )
            )
    print(
        f"{gpu}: one graph for each batch size, smallest first, all in one pool; every graph "
        "replayed on fresh inputs and compared bit for bit with eager.\n"
    )
    _print_table(lines)
    return 0 if good else 1


def _judge(
    own: dict[str, dict[str, Any]], stock: dict[str, dict[str, Any]] | None
) -> tuple[int, str]:
    """How many graphs are wrong, and the words for the table.

    A graph is right if its outputs equal eager's or, where those of stock's graph do not either,
    stock's.
    """
    eager = sum(graph["equal"] for graph in own.values())
    parts = [f"{eager} of {len(own)} equal eager"]
    if stock is None:
        return 0, parts[0]
    like_stock = sum(
        not graph["equal"] and not stock[key]["equal"] and graph["digest"] == stock[key]["digest"]
        for key, graph in own.items()
    )
    wrong = len(own) - eager - like_stock
    if like_stock:
        parts.append(f"{like_stock} equal stock's graph, which differs")
    if wrong:
        parts.append(f"{wrong} WRONG")
    return wrong, ", ".join(parts)


def _run_worker(allocator: str, seed: int) -> list[dict[str, Any]] | str:
    """What one allocator did with each workload, or what went wrong."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    }
    if allocator == "expandable":
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    module = ["cudagraph_pool.tools.demo", "--worker", allocator, "--seed", str(seed)]
    answer: list[dict[str, Any]] | str = ask(module, environment, _WORKER_SECONDS)
    return answer


def _work(allocator: str, seed: int) -> int:
    """The worker process: measures both workloads under one allocator; its last line on stdout
    is JSON.
    """
    import torch

    from .measure import Captures
    from .workloads import SeedScript, small_decode_step

    device = torch.device("cuda", torch.cuda.current_device())
    answer = []
    for make in (SeedScript, small_decode_step):
        captures = Captures(make, device, ours=allocator == "ours")
        captures.warm_up()
        keys = list(captures.workload.keys)
        if allocator == "primed":
            captures.prime(keys)
        cost = captures.capture(keys)
        replays = [captures.replay(_PASSES) for _ in range(_ROUNDS)]
        compared = captures.compare(list(reversed(keys)), seed)
        answer.append(
            {
                "workload": captures.workload.name,
                "graphs": len(keys),
                "reserved_bytes": cost.reserved_bytes,
                "minimum_bytes": captures.minimum_bytes(keys) if allocator == "stock" else None,
                "capture_seconds": cost.seconds,
                "replay_seconds": statistics.median(replays),
                "outputs": {key: asdict(comparison) for key, comparison in compared.items()},
            }
        )
        captures.release()
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
