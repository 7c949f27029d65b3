"""What models on two streams cost: stock PyTorch, its option, and cudagraph_pool.

A feed-forward stack whose weights are copied on a side stream while the layer before computes, and
blocks of two branches, each captured for eight sizes into one pool; and a training step of
DistributedDataParallel on two GPUs. The option is PyTorch's graph_capture_record_stream_reuse.
Prints the README's table and writes one JSON file. Exit code 0 if everything was measured, every
output is right bit for bit (that of training: as stock's) and nothing reserves more than stock or
the option; 1 if not; 2 for wrong arguments or without the GPUs.

    python benchmarks/two_streams.py --output two.json
    python benchmarks/two_streams.py --models ddp --output ddp.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _command import device, new_report, positive, write_report
from _ddp import measure_ddp
from _row import ORDERS
from const_memory import measure_workloads
from readme_table import table

WORKLOADS = ("streaming", "branches")
MODELS = (*WORKLOADS, "ddp")
ALLOCATORS = ("stock", "option", "ours")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    machine = device()
    if machine is None:
        print("two_streams.py: no CUDA device", file=sys.stderr)
        return 2
    models = options.models or MODELS
    ddp = "ddp" in models
    if ddp and not _has_two_gpus():
        print("two_streams.py: ddp needs two GPUs", file=sys.stderr)
        if options.models:
            return 2
        ddp = False
    report = {**new_report(options, machine), "rows": [], "ddp": []}
    options.workloads = [model for model in models if model in WORKLOADS]
    problems = measure_workloads(options, report) if options.workloads else []
    if ddp:
        allocators = ["stock", *(name for name in options.allocators if name != "stock")]
        report["ddp"] = measure_ddp(allocators, options.timeout)
        problems += [problem for row in report["ddp"] for problem in problems_of(row)]
    report["above"] = above(report["rows"], "workload") + above(report["ddp"], "model")
    write_report(report, options.output)
    problems += [f"{name}: reserves MORE than stock or the option" for name in report["above"]]
    print("\n".join([*table(report), *problems]))
    return 1 if problems else 0


def _has_two_gpus() -> bool:
    import torch

    return bool(torch.cuda.device_count() >= 2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, help="default: all that there are GPUs for"
    )
    parser.add_argument(
        "--allocators",
        nargs="+",
        choices=ALLOCATORS,
        default=list(ALLOCATORS),
        help="stock is always measured: the minimum and the ratios need it",
    )
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=["asc"], help="of sizes")
    parser.add_argument("--repeats", type=positive, default=5, help="captures of each row")
    parser.add_argument("--rounds", type=positive, default=7, help="of replays, in turn")
    parser.add_argument("--seed", type=int, default=0, help="of shuffles and inputs")
    parser.add_argument(
        "--timeout", type=positive, default=120, help="seconds of one step, or of one training"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON")
    return parser


def above(rows: Sequence[dict[str, Any]], title: str) -> list[str]:
    """What of ours reserves more than stock or the option does."""
    reserved: dict[tuple[str, str], dict[str, int]] = {}
    for row in rows:
        if row.get("reserved_bytes") is not None:
            of = reserved.setdefault((row[title], row.get("order", "")), {})
            of[row["allocator"]] = row["reserved_bytes"]
    return [
        f"{name} {order}".strip()
        for (name, order), of in reserved.items()
        if "ours" in of and of["ours"] > min(of.values())
    ]


def problems_of(row: dict[str, Any]) -> list[str]:
    """What failed, or is wrong, in a training."""
    name = f"{row['model']} {row['allocator']}"
    if row["error"] is not None:
        return [f"{name}: FAILED {row['error']}"]
    return [] if row["equal_to_stock"] else [f"{name}: results DIFFER from stock's"]


if __name__ == "__main__":
    sys.exit(main())
