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

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 80, 20, 50, 60


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
    (ROOT / "docs" / "frontier.svg").write_text(draw(points, chosen=int(found.group(1))))
    return 0


def draw(points: dict[int, Measured], chosen: int) -> str:
    """Mappings upwards, reserved ÷ minimum to the right: the mean and the 99th percentile."""
    recorded = {part: measured.recorded for part, measured in points.items()}
    most_ratio = max(figures.p99 for figures in recorded.values()) * 1.001
    most_mappings = max(figures.mappings for figures in recorded.values()) * 1.1

    def x(ratio: float) -> float:
        return LEFT + (ratio - 1) / (most_ratio - 1) * (WIDTH - LEFT - RIGHT)

    def y(mappings: float) -> float:
        return HEIGHT - BOTTOM - mappings / most_mappings * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(WIDTH / 2, 24, "Handles of up to pool ÷ N: mappings against memory", "middle"),
        _text(WIDTH / 2, HEIGHT - 14, "reserved ÷ minimum", "middle"),
        _text(12, TOP - 12, "mappings a pool", "start"),
    ]
    for i in range(6):
        ratio = 1 + (most_ratio - 1) * i / 5
        mappings = most_mappings * i / 5
        parts += [
            _line(x(ratio), y(0), x(ratio), y(most_mappings)),
            _line(x(1), y(mappings), x(most_ratio), y(mappings)),
            _text(x(ratio), y(0) + 20, f"{ratio:.3f}", "middle"),
            _text(LEFT - 8, y(mappings) + 4, f"{mappings:,.0f}", "end"),
        ]
    for name, colour in (("mean", "#1f77b4"), ("p99", "#d62728")):
        places = {part: (x(getattr(f, name)), y(f.mappings)) for part, f in recorded.items()}
        path = " ".join(f"{across:.1f},{up:.1f}" for across, up in places.values())
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
        for part, (across, up) in places.items():
            radius = 7 if part == chosen else 3.5
            parts.append(f'<circle cx="{across:.1f}" cy="{up:.1f}" r="{radius}" fill="{colour}"/>')
            label = f"{part}, chosen" if part == chosen else str(part)
            if points[part].above > 0:
                label += f" ({points[part].above} above the bound)"
            parts.append(_text(across + 10, up - 8, label, "start"))
        across, up = places[PARTS[0]]
        parts.append(_text(across, up + 22, name, "middle"))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


if __name__ == "__main__":
    sys.exit(main())
