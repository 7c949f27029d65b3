"""Draws what handles of more pages cost and save: docs/frontier.svg.

    python benchmarks/frontier.py

For each size of handles, as a part of the pool, the core is built in a copy of the tree and replays
the recorded traces in 100 orders each. Of pools of 64 MiB and more. A point says as well how many
of the made-up and worst traces take more than stitching without prediction may (see ablate.py).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "csrc" / "testing"))
from ablate import Measured, measure_all
from altered_tree import ROOT
from mutants import Mutant

PARTS = (32, 64, 128, 192, 384)
CONSTANT = "constexpr uint64_t kPartOfPool = {};"


def main() -> int:
    source = (ROOT / "csrc/core/placement/growth.cc").read_text()
    found = re.search(re.escape(CONSTANT).replace(r"\{\}", r"(\d+)"), source)
    if found is None:
        print("frontier.py: growth.cc has no kPartOfPool", file=sys.stderr)
        return 2
    mutants = [
        Mutant(str(part), "placement/growth.cc", "", found.group(), CONSTANT.format(part))
        for part in PARTS
    ]
    figures = measure_all(mutants, jobs=2)
    points = {part: figures[str(part)] for part in PARTS}
    draw(points, int(found.group(1)), ROOT / "docs" / "frontier.svg")
    return 0


def draw(points: dict[int, Measured], chosen: int, path: Path) -> None:
    """Mappings upwards, reserved ÷ minimum to the right: the mean and the 99th percentile."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.4), layout="constrained")
    axes = figure.subplots()
    for name in ("mean", "p99"):
        across = [getattr(measured.recorded, name) for measured in points.values()]
        up = [measured.recorded.mappings for measured in points.values()]
        axes.plot(across, up, marker="o", label=name)
        for part, x, y in zip(points, across, up, strict=True):
            above = f" ({points[part].above} above the bound)" if points[part].above else ""
            label = f"{part}{', chosen' if part == chosen else ''}{above}"
            axes.annotate(label, (x, y), (6, 6), textcoords="offset points", fontsize=8)
    axes.set(
        title="Handles of up to pool ÷ N: mappings against memory",
        xlabel="reserved ÷ minimum",
        ylabel="mappings a pool",
        ylim=(0, None),
    )
    axes.legend(frameon=False)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "frontier"}):
        figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
