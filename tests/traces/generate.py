"""Makes up captures: programs as they are written, and hostile ones.

    python tests/traces/generate.py --list
    python tests/traces/generate.py decode 3 > trace.json                # one program of a family
    python tests/traces/generate.py --output FOLDER --seeds 20           # of each family 20

The same family and seed make the same program everywhere. For cgp_quality:
benchmarks/trace_to_text.py --output TEXTS FOLDER
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hostile
import programs
from program import Program

Family = Callable[[Program, random.Random], None]

# The names are part of the seeds.
REAL: dict[str, Family] = {
    "decode": programs.decode,
    "prefill": programs.prefill,
    "mixed": programs.mixed,
    "training": programs.training,
    "train_keep": programs.train_keep,
    "train_seq": programs.train_lengths,
    "twomodels": programs.two_models,
    "cnn": programs.cnn,
    "cnn_res": programs.cnn_resolutions,
    "grid2d": programs.grid,
    "keepall": programs.keep_all,
    "latefree": programs.late_free,
    "recapture": programs.recapture,
    "streams": programs.streams,
    "moe": programs.moe,
    "diffusion": programs.diffusion,
}
HOSTILE: dict[str, Family] = {
    "rnd": hostile.anything,
    "sawtooth": hostile.sawtooth,
    "extremes": hostile.extremes,
    "tiny": hostile.tiny,
    "comb": hostile.comb,
    "pinned": hostile.pinned,
    "liar": hostile.liar,
    "alternate": hostile.alternate,
    "manygraphs": hostile.many_graphs,
    "edge": hostile.edges,
}
FAMILIES = {**REAL, **HOSTILE}


def generate(family: str, seed: int) -> dict[str, Any]:
    program = Program(f"{family}_{seed}")
    FAMILIES[family](program, random.Random(f"{family}-{seed}"))
    return program.trace()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", nargs="?", choices=FAMILIES)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the families and stop")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where to write them all")
    parser.add_argument("--seeds", type=int, default=20, help="of each family (default 20)")
    parser.add_argument("--only", choices=FAMILIES, help="of this family alone")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    options = parser.parse_args(argv)
    if options.list:
        print("real", *REAL)
        print("hostile", *HOSTILE)
    elif options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        for family in [options.only] if options.only else FAMILIES:
            for seed in range(options.first, options.first + options.seeds):
                path = options.output / f"{family}_{seed}.json"
                path.write_text(json.dumps(generate(family, seed)))
    elif options.family:
        json.dump(generate(options.family, options.seed), sys.stdout)
    else:
        parser.error("name a family, --list or --output")
    return 0


if __name__ == "__main__":
    sys.exit(main())
