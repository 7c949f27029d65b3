"""What captures on several streams cost: stock PyTorch, its option, and cudagraph_pool.

Random programs of alloc, free, kernel, record_stream, fork and join (stream_programs.py says what
they are and what of pytorch#162186 was taken over) are captured on 2, 4 and 8 streams, under each
allocator in a process of its own; the processes take turns. The option is PyTorch's
graph_capture_record_stream_reuse. Reserved memory is held against the most that a program has live
at once. Every sum that a program's kernels make is compared with what it must be. Prints the
README's table and writes one JSON file. Exit code 0 if everything was measured, all sums are right
and no graph has other nodes or edges than stock's; 1 if not; 2 for wrong arguments or without a
GPU.

    python benchmarks/multi_stream.py --output multi.json
    python benchmarks/multi_stream.py --configurations 8x1000-a0.3-f0.3 --seeds 1 2 --output m.json
    python benchmarks/multi_stream.py --configurations 4x78000-a0.3-f0.3 --output long.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from _command import add_common, add_some, new_parser, new_report, positive, write_report
from _stream_rows import measure_row, summarise
from _team import Team
from readme_table import table
from stream_programs import CONFIGURATIONS, LONG

ALLOCATORS = ("stock", "option", "ours")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    report = new_report(options)
    return 0 if _measure(options, report) else 1


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    names = [configuration.name for configuration in CONFIGURATIONS]
    said = f"streams x operations - alloc - free; default: all of {', '.join(names)}"
    of_programs = {"default": names, "metavar": "NAME", "help": said}
    add_some(parser, "--configurations", [*names, LONG.name], **of_programs)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of programs")
    said = "stock is always measured: the ratios need it"
    add_some(parser, "--allocators", ALLOCATORS, help=said)
    said = "timed captures of each program; of those with 10,000 operations at most 3"
    parser.add_argument("--repeats", type=positive, default=7, help=said)
    parser.add_argument(
        "--checks", type=positive, default=5, help="replays whose sums are compared, each program"
    )
    add_common(parser, rounds=7, timeout=120)
    return parser


def _measure(options: argparse.Namespace, report: dict[str, Any]) -> bool:
    rows: list[dict[str, Any]] = []
    report["rows"] = rows
    programs = [(name, seed) for name in options.configurations for seed in options.seeds]
    allocators = ["stock", *(name for name in options.allocators if name != "stock")]
    what = ["streams", *(f"{name}@{seed}" for name, seed in programs)]
    with Team(what, allocators, options.timeout) as team:
        team.at_once("prepare")
        for key, (name, seed) in enumerate(programs):
            began = time.monotonic()
            rows.append(measure_row(team, key, name, seed, options))
            report["summary"] = summarise(rows)
            write_report(report, options.output)
            print(f"{name} seed {seed}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    print("\n".join([*table(report), *report["summary"]["problems"]]))
    for name in report["summary"]["not_below_option"]:
        print(f"{name}: not below the option")
    return not report["summary"]["problems"]


if __name__ == "__main__":
    sys.exit(main())
