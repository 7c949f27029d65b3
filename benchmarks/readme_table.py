"""Prints the README's tables of figures, in Markdown, from what the benchmarks wrote.

python benchmarks/readme_table.py benchmarks/results/const_memory.json
python benchmarks/readme_table.py benchmarks/results/compiled_models.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

WORKLOADS = {
    "seed": "pinned copies and `a**2 + b*2`, 128 sizes",
    "mlp": "gated MLP, 128 sizes",
    "llama": "Llama-like decode, 51 sizes",
    "resnet50": "ResNet-50 inference, 64 sizes",
    "gpt2": "GPT-2 training step, 8 lengths",
}
ORDERS = {"asc": "smallest first", "desc": "largest first", "shuffled": "shuffled"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    report = json.loads(parser.parse_args().results.read_text())
    print(f"Measured on one {report['gpu']} with torch {report['torch']}.\n")
    compiled = "model" in report["rows"][0]
    print("\n".join((compiled_table if compiled else table)(report["rows"])))
    return 0


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| reserved, MiB (÷ minimum) | order | minimum | **cudagraph_pool** | stock "
        "| expandable segments | capture time ÷ stock | replay time ÷ stock |",
        "|---|---|---|---|---|---|---|---|",
    ]
    found = {(row["workload"], row["order"], row["allocator"]): row for row in rows}
    for workload, name in WORKLOADS.items():
        for order, words in ORDERS.items():
            if (workload, order, "ours") not in found:
                continue
            ours, stock, expandable = (
                found[workload, order, allocator] for allocator in ("ours", "stock", "expandable")
            )
            lines.append(
                f"| {name if order == 'asc' else ''} | {words} | {mebibytes(ours['minimum_bytes'])}"
                f" | **{size(ours)}** | {size(stock)} | {size(expandable)}"
                f" | {ours['capture_vs_stock']:.2f} | {ours['replay_vs_stock']:.3f} |"
            )
    return lines


def mebibytes(count: int) -> str:
    return f"{count / (1 << 20):,.0f}"


def size(row: dict[str, Any]) -> str:
    return f"{mebibytes(row['reserved_bytes'])} ({row['ratio']:.3f})"


def compiled_table(rows: list[dict[str, Any]]) -> list[str]:
    """A column for each model of compiled_models.py."""

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


if __name__ == "__main__":
    sys.exit(main())
