"""What one executable for many graphs saves and costs: stock PyTorch, and pools that share.

Each workload is captured for all of its sizes, with an executable for each graph as PyTorch makes
them and into pools of ours with ``shared_exec=True``, for several ``max_execs``: each in a process
of its own, all side by side and one at a time, so that times are taken under the same clocks.
Prints the README's tables and writes one JSON file. Exit code 0 if everything was measured,
1 if not, 2 for wrong arguments or without a GPU.

    python benchmarks/shared_execs.py --output execs.json
    python benchmarks/shared_execs.py --sections decode --bounds 4 default --output e.json

The sections:

memory   Driver memory of all graphs: what the device has less after the captures and after
         replays of all graphs in two orders (the most of these), without what PyTorch reports as
         reserved by pools. Everything was run, and captured without executables, before.
         Each figure is that of a fresh process: the driver keeps what destroyed executables held.
         ``execs`` of K=none is the number of groups of alike graphs.
decode   Steps per second of a loop whose size changes each step, every 10, every 100 steps, or as a
         server's load draws it (requests arrive and end at random); also where each step waits for
         a value that it computed.

That results are those of separate executables is for tests/gpu/test_shared_exec.py to say.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from _command import add_common, add_some, new_parser, new_report, write_report
from _exec_rows import BOUNDS, SECTIONS, WORKLOADS, Found, JobRun, jobs_of
from _team import Team
from readme_table import table


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if not jobs_of(options):
        parser.error("none of these sections measures any of these workloads with these bounds")
    return 0 if measure(options, new_report(options)) else 1


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    add_some(parser, "--sections", SECTIONS)
    add_some(parser, "--workloads", WORKLOADS)
    said = "values of max_execs; default: all, with the pool's own default among them"
    add_some(parser, "--bounds", BOUNDS, help=said)
    parser.add_argument(
        "--seconds", type=_seconds, default=0.3, help="that one decode loop takes about"
    )
    add_common(parser, rounds=3, seed=0, timeout=120)
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 60:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 60, is {value}")
    return value


def measure(options: argparse.Namespace, report: dict[str, Any]) -> bool:
    """Measures everything, prints the tables and writes the report; returns whether all was
    measured.
    """
    jobs = jobs_of(options)
    found = Found()
    for job in jobs:
        began = time.monotonic()
        with Team(["execs", job.workload], job.configs, options.timeout) as team:
            JobRun(job, team, options, found).measure()
        report.update(asdict(found))
        write_report(report, options.output)
        print(f"{job.workload}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    print("\n".join(table(report)))
    for error in found.errors:
        print(f"{error['workload']}, max_execs {error['config']}: FAILED {error['error']}")
    return not found.errors


if __name__ == "__main__":
    sys.exit(main())
