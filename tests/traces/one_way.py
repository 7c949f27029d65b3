"""Makes up captures of streams of which one waits for another that never, or once, waits for it.

    python tests/traces/one_way.py --output FOLDER --seeds 20   # as text, for cgp_quality --one-way

Each stream allocates and frees its own blocks, as many live as ever, for different times. The same
seed makes the same program everywhere.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ALLOCATIONS = 4_000

# The others wait for the first; each for the one before; as a star, and once the first for them.
SHAPES = ("star", "chain", "once")
# Of the logarithm to base 2 of the bytes.
SIZES = {"small": (9, 20), "medium": (17, 22), "large": (20, 25.5), "mixed": (10, 25)}


def lines_of(shape: str, size: str, seed: int) -> Iterator[str]:
    """As csrc/testing/capture_trace.h reads them."""
    draw = random.Random(f"{shape}-{size}-{seed}")
    streams = draw.choice([2, 2, 3, 4])
    most, period = draw.choice([8, 20, 40]), draw.choice([1, 3, 10, 40])
    live: list[list[int]] = [[] for _ in range(streams)]
    yield "graph 0\nlaunch 0\n"
    for stream in range(1, streams):
        yield f"wait {stream} 0\nlaunch {stream}\n"
    for block in range(ALLOCATIONS):
        stream = draw.randrange(streams)
        yield f"alloc {block} {int(2 ** draw.uniform(*SIZES[size]))} {stream}\nlaunch {stream}\n"
        live[stream].append(block)
        while len(live[stream]) > most * draw.uniform(0.5, 1.2):
            position = draw.randrange(len(live[stream])) if draw.random() < 0.7 else -1
            yield f"launch {stream}\nfree {live[stream].pop(position)}\n"
        if block % period == 0:
            stream = draw.randrange(1, streams)
            other = stream - 1 if shape == "chain" else 0
            yield f"wait {stream} {other}\nlaunch {stream}\n"
        if shape == "once" and block == ALLOCATIONS // 3:
            yield from (f"wait 0 {other}\nlaunch 0\n" for other in range(1, streams))
    yield from (f"wait 0 {stream}\n" for stream in range(1, streams))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seeds", type=int, default=5, help="of each kind (default 5)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    for shape in SHAPES:
        for size in SIZES:
            for seed in range(options.first, options.first + options.seeds):
                path = options.output / f"{shape}_{size}_{seed}.txt"
                path.write_text("".join(lines_of(shape, size, seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
