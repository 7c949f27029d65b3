"""What N graphs in one pool cost: stock PyTorch, what a careful user makes of it, and
cudagraph_pool.

Each workload is captured for all of its sizes in each order, under each allocator in a process of
its own. The processes of one workload stand side by side and take turns, so that replay times are
compared under the same clocks. Prints the docs' table and writes one JSON file. Exit code 0 if
everything was measured and every output is right, 1 if not, 2 for wrong arguments or without a GPU.

    python benchmarks/const_memory.py --output results.json
    python benchmarks/const_memory.py --workloads mlp llama --orders asc --output results.json
    python benchmarks/const_memory.py --workloads two-streams --allocators stock option ours \
        --orders asc --output two_streams.json
    python benchmarks/const_memory.py --workloads unseen --orders asc --repeats 2 --rounds 1 \
        --output unseen.json

``expandable`` stands for stock's expandable segments. ``primed`` allocates one block in the pool
before all others, as SGLang and torch 2.15 can: as large as the minimum, or 1.1 or 1.25 times that,
whichever takes the least.
``unseen`` stands for models that no other benchmark or test here has.
``two-streams`` stands for a feed-forward stack whose weights are copied on a side stream while the
layer before computes, and for blocks of two branches. Of these ours may not reserve more than stock
or ``option``, which is PyTorch's graph_capture_record_stream_reuse.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from _command import add_common, add_some, new_parser, new_report, verdict, write_report
from _team import Team, ratio
from readme_table import TWO_STREAMS, UNSEEN, table

ALLOCATORS = ("stock", "expandable", "primed", "ours")
ORDERS = ("asc", "desc", "shuffled")
WORKLOADS = ("seed", "mlp", "llama", "resnet50", "gpt2")
GROUPS = {"unseen": tuple(UNSEEN), "two-streams": tuple(TWO_STREAMS)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser(__doc__)
    names = [*WORKLOADS, *(name for group in GROUPS.values() for name in group)]
    said = f"of {', '.join([*names, *GROUPS])}; default: the first five"
    of_workloads = {"default": list(WORKLOADS), "metavar": "NAME", "help": said}
    add_some(parser, "--workloads", (*names, *GROUPS), **of_workloads)
    add_some(parser, "--orders", ORDERS)
    said = f"default: {' '.join(ALLOCATORS)}; stock is always measured: the ratios need it"
    add_some(parser, "--allocators", (*ALLOCATORS, "option"), default=[*ALLOCATORS], help=said)
    add_common(parser, repeats=7, rounds=7, seed=0, timeout=90)
    options = parser.parse_args(argv)
    report = new_report(options)
    rows = report["rows"]
    asked = [name for given in options.workloads for name in GROUPS.get(given, (given,))]
    names = ["stock", *(name for name in options.allocators if name != "stock")]
    for workload in asked:
        began = time.monotonic()
        with Team(["graphs", workload], names, options.timeout) as team:
            sizes: Sequence[int] = next(iter(team.at_once("prepare").values()), ())
            for order in options.orders:
                rows.extend(measure_row(team, workload, order, sizes, options))
                write_report(report, options.output)
        print(f"{workload}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    print("\n".join(table(report)))
    return verdict([*(problem for row in rows for problem in problems_of(row)), *above(rows)])


def order_keys(keys: Sequence[int], order: str, seed: int) -> list[int]:
    result = sorted(keys, reverse=order == "desc")
    if order == "shuffled":
        random.Random(seed).shuffle(result)
    return result


def measure_row(
    team: Team, workload: str, order: str, sizes: Sequence[int], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One object for each allocator. What a worker that failed did not measure stays unset."""
    keys = order_keys(sizes, order, options.seed)
    primed = team.ask("prime", [name for name in team.names if name == "primed"], order=keys)
    costs = team.costs(keys, options.repeats, options.rounds)
    compared = _compare(team, keys, options.seed)
    minimum = team.ask("minimum_bytes", ["stock"], order=keys).get("stock")

    def found(name: str) -> dict[str, Any]:
        stock = None if name == "stock" else compared.get("stock")
        return {
            "workload": workload,
            "order": order,
            "allocator": name,
            "error": team.errors.get(name),
            "graphs": len(keys),
            "minimum_bytes": minimum,
            "ratio": ratio(costs[name]["reserved_bytes"], minimum),
            **costs[name],
            "primed_bytes": primed.get(name),
            "outputs": judge_outputs(compared[name], stock) if name in compared else None,
        }

    return [found(name) for name in team.names]


def _compare(team: Team, keys: Sequence[int], seed: int) -> dict[str, dict[str, Any]]:
    """Stock first: where its graphs differ from eager, the others are held against its graphs."""
    request = {"order": order_keys(keys, "shuffled", seed + 1), "seed": seed}
    found = team.ask("compare", ["stock"], digests=[], **request)
    digests = [int(key) for key, own in found.get("stock", {}).items() if not own["equal"]]
    others = [name for name in team.names if name != "stock"]
    return found | team.ask("compare", others, digests=digests, **request)


def judge_outputs(
    compared: dict[str, dict[str, Any]], stock: dict[str, dict[str, Any]] | None
) -> dict[str, Any]:
    """Counts the sizes whose graphs are right.

    That is: equal to eager or, only where stock's graph is not either, to stock's graph.

    Args:
        compared: by size, what the worker found.
        stock: the same of stock PyTorch; None if ``compared`` is stock's own.
    """
    judged: dict[str, Any]
    judged = {"equal_to_eager": 0, "equal_to_stock": 0, "unrepeatable": [], "differ": []}
    for key, own in compared.items():
        if own["equal"]:
            judged["equal_to_eager"] += 1
            continue
        other = stock[key] if stock else None
        if other and not other["equal"] and own["digest"] == other["digest"]:
            judged["equal_to_stock"] += 1
        elif not own["repeatable"] and (other is None or not other["repeatable"]):
            judged["unrepeatable"].append(int(key))
        else:
            judged["differ"].append(int(key))
    return judged


def problems_of(row: dict[str, Any]) -> list[str]:
    """What failed, or is wrong. That graphs of PyTorch's own allocator differ from eager is a
    finding, and stands in the report.
    """
    name = f"{row['workload']} {row['order']} {row['allocator']}"
    if row["error"] is not None:
        return [f"{name}: FAILED {row['error']}"]
    if row["allocator"] == "ours" and row["outputs"]["differ"]:
        return [f"{name}: WRONG at sizes {row['outputs']['differ']}"]
    return []


def above(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Which models on two streams reserve more on ours than on stock or with its option."""
    reserved: dict[tuple[str, str], dict[str, int]] = {}
    for row in rows:
        if row["workload"] in TWO_STREAMS and row["reserved_bytes"] is not None:
            of = reserved.setdefault((row["workload"], row["order"]), {})
            of[row["allocator"]] = row["reserved_bytes"]
    return [
        f"{workload} {order}: reserves MORE than stock or the option"
        for (workload, order), of in reserved.items()
        if any(of.get("ours", 0) > of[name] for name in ("stock", "option") if name in of)
    ]


if __name__ == "__main__":
    sys.exit(main())
