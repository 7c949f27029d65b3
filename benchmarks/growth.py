"""Draws how the core's operations grow with what is there already: docs/growth.svg.

    cmake --preset release && cmake --build --preset release --target cgp_benchmark
    python benchmarks/growth.py

No GPU: cgp_benchmark times the core on a host driver that maps nothing. Driver calls are taken off,
and the clock's own time. An operation is an allocation and the free of the block.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from _command import new_parser

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "build/release/csrc/testing/cgp_benchmark"
LABELS = {
    "GrowthOfBlocks": "small block, beside N live blocks",
    "GrowthOfGraphs": "small block, beside what N graphs left",
    "GrowthOfPages": "block of a page, in a pool of N pages",
}

Points = dict[str, list[tuple[int, float]]]


def main() -> int:
    new_parser(__doc__).parse_args()
    options = ["--benchmark_filter=GrowthOf", "--benchmark_format=json"]
    if not PROGRAM.exists():
        print(f"growth.py: {PROGRAM} is not built", file=sys.stderr)
        return 2
    done = subprocess.run([PROGRAM, *options], stdout=subprocess.PIPE, check=True)
    draw(read(json.loads(done.stdout)["benchmarks"]), ROOT / "docs" / "growth.svg")
    return 0


def read(rows: list[dict[str, float | str]]) -> Points:
    """Of each line of the picture N and the median in nanoseconds."""
    points: Points = defaultdict(list)
    for row in rows:
        name, n, _ = str(row["name"]).split("/")
        points[LABELS[name]].append((int(n), float(row["median_ns"]) - float(row["clock_ns"])))
        if "new_page_ns" in row:
            label = "making the last of N pages, without the driver"
            points[label].append((int(n), float(row["new_page_ns"]) - float(row["clock_ns"]) / 2))
    return points


def draw(points: Points, path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.4), layout="constrained")
    axes = figure.subplots()
    for label, line in points.items():
        axes.plot(*zip(*line, strict=True), marker="o", label=label)
    axes.set(xscale="log", xlabel="N", ylabel="median, ns", ylim=(0, None))
    figure.legend(loc="outside upper center", ncols=2, fontsize=8, frameon=False)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "growth"}):
        figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
