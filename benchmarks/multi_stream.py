"""What captures on several streams cost: stock PyTorch, its option, and cudagraph_pool.

Random programs of alloc, free, kernel, record_stream, fork and join (stream_programs.py says what
they are and what of pytorch#162186 was taken over) are captured on 2, 4 and 8 streams, under each
allocator in a process of its own; the processes take turns. The option is PyTorch's
graph_capture_record_stream_reuse. Reserved memory is held against the most that a program has live
at once. Every sum that a program's kernels make is compared with what it must be. Prints the docs'
table and writes one JSON file. Exit code 0 if everything was measured and all sums are right, 1 if
not, 2 for wrong arguments or without a GPU.

    python benchmarks/multi_stream.py --output multi.json
    python benchmarks/multi_stream.py --configurations 8x1000-a0.3-f0.3 --seeds 1 2 --output m.json
    python benchmarks/multi_stream.py --configurations 4x78000-a0.3-f0.3 --output long.json
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from _command import add_common, add_some, new_parser, new_report, verdict, write_report
from _team import Team, ratio
from readme_table import table
from stream_programs import BY_NAME, CONFIGURATIONS, LONG, generate

ALLOCATORS = ("stock", "option", "ours")

# Of so many replays the sums are compared.
_CHECKS = 5

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser(__doc__)
    names = [configuration.name for configuration in CONFIGURATIONS]
    said = f"streams x operations - alloc - free; default: all of {', '.join(names)}"
    of_programs = {"default": names, "metavar": "NAME", "help": said}
    add_some(parser, "--configurations", [*names, LONG.name], **of_programs)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of programs")
    add_common(parser, repeats=7, rounds=7, timeout=120)
    options = parser.parse_args(argv)
    report = new_report(options)
    programs = list(itertools.product(options.configurations, options.seeds))
    what = ["streams", *(f"{name}@{seed}" for name, seed in programs)]
    with Team(what, ALLOCATORS, options.timeout) as team:
        team.at_once("prepare")
        for key, (name, seed) in enumerate(programs):
            began = time.monotonic()
            report["rows"].append(measure_row(team, key, name, seed, options))
            write_report(report, options.output)
            print(f"{name} seed {seed}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    print("\n".join(table(report)))
    return verdict(problem for row in report["rows"] for problem in problems_of(row))


def measure_row(team: Team, key: int, name: str, seed: int, options: argparse.Namespace) -> Row:
    """One object with what all have in common and, under ``allocators``, one for each."""
    configuration = BY_NAME[name]
    costs = team.costs([key], options.repeats, options.rounds)
    wrong = team.at_once("wrong_sums", key=key, times=_CHECKS)
    team.at_once("release")
    peak = generate(configuration, seed).peak_bytes()
    return {
        "configuration": name,
        "seed": seed,
        "streams": configuration.streams,
        "peak_bytes": peak,
        "allocators": {
            allocator: {
                "error": team.errors.get(allocator),
                "ratio": ratio(own["reserved_bytes"], peak),
                **own,
                "wrong_sums": wrong.get(allocator),
            }
            for allocator, own in costs.items()
        },
    }


def problems_of(row: Row) -> Iterator[str]:
    """What failed, or is wrong."""
    for allocator, measured in row["allocators"].items():
        name = f"{row['configuration']} seed {row['seed']}, {allocator}"
        if measured["error"]:
            yield f"{name}: FAILED {measured['error']}"
        elif measured["wrong_sums"]:
            yield f"{name}: {measured['wrong_sums']} WRONG sums"


if __name__ == "__main__":
    sys.exit(main())
