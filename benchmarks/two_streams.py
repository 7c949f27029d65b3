"""What models on two streams cost: stock PyTorch, its option, and cudagraph_pool.

A feed-forward stack whose weights are copied on a side stream while the layer before computes, and
blocks of two branches, each captured for eight sizes into one pool. The option is PyTorch's
graph_capture_record_stream_reuse. Prints the README's table and writes one JSON file. Exit code 0
if everything was measured, every output is right bit for bit and nothing reserves more than stock
or the option; 1 if not; 2 for wrong arguments or without a GPU.

    python benchmarks/two_streams.py --output two.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _command import add_some, device, new_parser, new_report, positive, write_report
from _row import ORDERS
from const_memory import measure_workloads
from readme_table import table

MODELS = ("streaming", "branches")
ALLOCATORS = ("stock", "option", "ours")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    machine = device()
    if machine is None:
        print("two_streams.py: no CUDA device", file=sys.stderr)
        return 2
    report = {**new_report(options, machine), "rows": []}
    problems = measure_workloads(options, report)
    report["above"] = above(report["rows"])
    write_report(report, options.output)
    problems += [f"{name}: reserves MORE than stock or the option" for name in report["above"]]
    print("\n".join([*table(report), *problems]))
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    add_some(parser, "--models", MODELS, dest="workloads")
    said = "stock is always measured: the minimum and the ratios need it"
    add_some(parser, "--allocators", ALLOCATORS, help=said)
    add_some(parser, "--orders", ORDERS, default=["asc"], help="of sizes")
    parser.add_argument("--repeats", type=positive, default=5, help="captures of each row")
    parser.add_argument("--rounds", type=positive, default=7, help="of replays, in turn")
    parser.add_argument("--seed", type=int, default=0, help="of shuffles and inputs")
    parser.add_argument("--timeout", type=positive, default=120, help="seconds of one step")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON")
    return parser


def above(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What of ours reserves more than stock or the option does."""
    reserved: dict[tuple[str, str], dict[str, int]] = {}
    for row in rows:
        if row.get("reserved_bytes") is not None:
            of = reserved.setdefault((row["workload"], row["order"]), {})
            of[row["allocator"]] = row["reserved_bytes"]
    return [
        f"{name} {order}"
        for (name, order), of in reserved.items()
        if "ours" in of and of["ours"] > min(of.values())
    ]


if __name__ == "__main__":
    sys.exit(main())
