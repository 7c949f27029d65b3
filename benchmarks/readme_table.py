"""Prints the README's tables of figures, in Markdown, from what the benchmarks wrote.

python benchmarks/readme_table.py benchmarks/results/const_memory.json
python benchmarks/readme_table.py benchmarks/results/compiled_models.json
python benchmarks/readme_table.py benchmarks/results/multi_stream.json
python benchmarks/readme_table.py benchmarks/results/two_streams.json
python benchmarks/readme_table.py benchmarks/results/shared_execs.json

The first has a column of recorded captures in 100 orders, from what cgp_quality printed:

cgp_quality --orders 100 build/release/csrc/testing/traces/recorded > benchmarks/results/orders.txt
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _quality import read_quality

WORKLOADS = {
    "seed": "pinned copies and `a**2 + b*2`, 128 sizes",
    "mlp": "gated MLP, 128 sizes",
    "llama": "Llama-like decode, 51 sizes",
    "resnet50": "ResNet-50 inference, 64 sizes",
    "gpt2": "GPT-2 training step, 8 lengths",
}
RECORDED = {
    "seed": "seed_asc",
    "mlp": "mlp_asc",
    "llama": "llama_asc",
    "resnet50": "resnet50_asc",
    "gpt2": "gpt2_train_asc",
}
ORDERS_TEXT = Path(__file__).parent / "results" / "orders.txt"
TWO_STREAMS = {
    "streaming": "weights copied while the layer before computes, 8 sizes",
    "branches": "blocks of two branches, 8 sizes",
    "ddp": "DistributedDataParallel training step, two GPUs",
}
SHARED_EXECS = {**WORKLOADS, "deep": "Gemma-like decode, 16 sizes"}
ORDERS = {"asc": "smallest first", "desc": "largest first", "shuffled": "shuffled"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    report = json.loads(parser.parse_args().results.read_text())
    print(f"Measured on one {report['gpu']} with torch {report['torch']}.\n")
    print("\n".join(_table_for(report)(report)))
    return 0


def _table_for(report: dict[str, Any]) -> Callable[[dict[str, Any]], list[str]]:
    """By what the benchmark alone writes."""
    if "ddp" in report:
        return two_streams_table
    if isinstance(report["rows"], dict):
        return shared_execs_table
    row = report["rows"][0]
    if "allocators" in row:
        return multi_stream_table
    return compiled_table if "model" in row else table


def table(report: dict[str, Any]) -> list[str]:
    rows = report["rows"]
    lines = [
        "| reserved, MiB (÷ minimum) | order | minimum | **cudagraph_pool** | worst of 100 orders "
        "| stock | expandable segments | capture time ÷ stock | replay time ÷ stock |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    orders = read_quality(ORDERS_TEXT.read_text())
    found = {(row["workload"], row["order"], row["allocator"]): row for row in rows}
    for workload, name in WORKLOADS.items():
        for order, words in ORDERS.items():
            if (workload, order, "ours") not in found:
                continue
            ours, stock, expandable = (
                found[workload, order, allocator] for allocator in ("ours", "stock", "expandable")
            )
            worst = f"{orders[RECORDED[workload]].worst:.3f}" if order == "asc" else ""
            lines.append(
                f"| {name if order == 'asc' else ''} | {words} | {mebibytes(ours['minimum_bytes'])}"
                f" | **{size(ours)}** | {worst} | {size(stock)} | {size(expandable)}"
                f" | {ours['capture_vs_stock']:.2f} | {ours['replay_vs_stock']:.3f} |"
            )
    return lines


def mebibytes(count: int) -> str:
    return f"{count / (1 << 20):,.0f}"


def size(row: dict[str, Any]) -> str:
    return f"{mebibytes(row['reserved_bytes'])} ({row['ratio']:.3f})"


def compiled_table(report: dict[str, Any]) -> list[str]:
    """A column for each model of compiled_models.py."""
    rows = report["rows"]

    def reserved(row: dict[str, Any], allocator: str) -> int:
        return int(row[allocator]["reserved_bytes"]) >> 20

    ratios = [reserved(row, "ours") / reserved(row, "stock") for row in rows]
    return [
        "| | " + " | ".join(row["model"].replace("_", " ") for row in rows) + " |",
        "|---" * (len(rows) + 1) + "|",
        "| stock | " + " | ".join(f"{reserved(row, 'stock'):,}" for row in rows) + " |",
        "| **cudagraph_pool** | "
        + " | ".join(
            f"**{reserved(row, 'ours'):,}** ({ratio:.2f})"
            for row, ratio in zip(rows, ratios, strict=True)
        )
        + " |",
    ]


def multi_stream_table(report: dict[str, Any]) -> list[str]:
    """The programs of multi_stream.py, by number of streams and together."""
    rows = report["rows"]

    def spread(chosen: list[dict[str, Any]], allocator: str, figure: str) -> str:
        values = [row["allocators"][allocator][figure] for row in chosen]
        return f"{statistics.geometric_mean(values):.2f} ({max(values):.2f})"

    lines = [
        "| reserved ÷ peak, geometric mean (worst) | stock | its option | **cudagraph_pool** "
        "| capture time ÷ stock | replay time ÷ stock |",
        "|---|---|---|---|---|---|",
    ]
    counts = sorted({row["streams"] for row in rows})
    groups = [(f"{count} streams", [r for r in rows if r["streams"] == count]) for count in counts]
    for name, chosen in [*groups, ("all", rows)]:
        ratios = [spread(chosen, allocator, "ratio") for allocator in ("stock", "option", "ours")]
        times = [spread(chosen, "ours", f"{what}_vs_stock") for what in ("capture", "replay")]
        cells = [f"{len(chosen)} programs, {name}", *ratios[:2], f"**{ratios[2]}**", *times]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def shared_execs_table(report: dict[str, Any]) -> list[str]:
    """The sections memory and decode of shared_execs.py."""
    memory = report["rows"]["memory"]
    found = {(row["workload"], row["config"]): row for row in memory}
    bounds = [c for c in dict.fromkeys(row["config"] for row in memory) if c != "default"]
    titles = {"none": "`max_execs=None`"}
    lines = [
        "| driver memory of all graphs, MiB | nodes | "
        + " | ".join(titles.get(bound, bound) for bound in bounds)
        + " | **default (4)** |",
        "|---" * (len(bounds) + 3) + "|",
    ]
    for workload in dict.fromkeys(row["workload"] for row in memory):
        least, most = found[workload, "stock"]["nodes"]
        cells = [mebibytes(found[workload, bound]["driver_bytes"]) for bound in bounds]
        cells.append(f"**{mebibytes(found[workload, 'default']['driver_bytes'])}**")
        nodes = str(least) if least == most else f"{least} to {most}"
        lines.append(f"| {SHARED_EXECS[workload]} | {nodes} | {' | '.join(cells)} |")
    decode = [row for row in report["rows"]["decode"] if not row["read_back"]]
    schedules = list(dict.fromkeys(row["schedule"] for row in decode))
    names = [{"load": "as a server's load"}.get(schedule, schedule) for schedule in schedules]
    lines += [
        "",
        f"| steps per second ÷ stock, default, size changes | {' | '.join(names)} |",
        "|---" * (len(schedules) + 1) + "|",
    ]
    for workload in dict.fromkeys(row["workload"] for row in decode):
        cells = [
            f"{row['configs']['default']['vs_stock']:.3f}"
            for row in decode
            if row["workload"] == workload
        ]
        lines.append(f"| {SHARED_EXECS[workload]} | {' | '.join(cells)} |")
    return lines


def two_streams_table(report: dict[str, Any]) -> list[str]:
    """The models of two_streams.py."""
    rows = [{**row, "name": row["workload"]} for row in report["rows"]]
    rows += [{**row, "name": row["model"]} for row in report["ddp"]]
    lines = [
        "| reserved, MiB (÷ minimum) | minimum | stock | its option | **cudagraph_pool** |",
        "|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((row["name"], row.get("order", "")) for row in rows):
        of = {row["allocator"]: row for row in rows if (row["name"], row.get("order", "")) == key}
        words = TWO_STREAMS[key[0]] + (f", {ORDERS[key[1]]}" if key[1] else "")
        lines.append(
            f"| {words} | {mebibytes(of['stock']['minimum_bytes'])} | {size(of['stock'])} "
            f"| {size(of['option'])} | **{size(of['ours'])}** |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
