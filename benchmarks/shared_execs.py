"""What one executable for many graphs saves and costs: stock PyTorch, and pools that share.

Each workload is captured for all of its sizes, with an executable for each graph as PyTorch makes
them and into pools of ours with ``shared_exec=True``, for several ``max_execs``: each in a process
of its own, all side by side and one at a time, so that times are taken under the same clocks.
Prints a table for each section and writes one JSON file. Exit code 0 if everything was measured and
every output is right, 1 if not, 2 for wrong arguments or without a GPU.

    python benchmarks/shared_execs.py --output execs.json
    python benchmarks/shared_execs.py --sections memory ready --workloads llama --output e.json
    python benchmarks/shared_execs.py --sections decode --bounds 4 default --output e.json

The sections:

memory   Driver memory of all graphs: what the device has less after the captures and after
         replays of all graphs in two orders (the most of these), without what PyTorch reports as
         reserved by pools. Everything was run, and captured without executables, before.
         Each figure is that of a fresh process: the driver keeps what destroyed executables held.
         ``execs`` of K=none is the number of groups of alike graphs.
ready    Time until every graph can be replayed. Stock: instantiation of all graphs. Ours: what the
         ends of the captures take beyond those of captures with ``keep_graph=True``, which make no
         executable, and ``instantiate()`` of all graphs, which updates and uploads. ``made`` counts
         of the latter only those calls that made an executable; ``first`` is of the first time.
replay   The same graph again: the device's time, and the CPU's of one call.
switch   CPU time of one replay of two graphs of one group in turn, with ``max_execs=1``, beside the
         driver's bare calls (``cuGraphExecUpdate`` and ``cuGraphLaunch`` through ctypes, with
         arguments made before) on templates of the same kernels in the same process. ``ctypes`` is
         what a call takes that does nothing. The device is idle before each call.
decode   Steps per second of a loop whose size changes each step, every 10, every 100 steps, or as a
         server's load draws it (requests arrive and end at random); also where each step waits for
         a value that it computed.
results  Replays of random sizes, all that they leave in the outputs against what graphs with
         executables of their own leave there, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from _command import device, positive, write_report
from _exec_report import text
from _exec_rows import BOUNDS, SECTIONS, WORKLOADS, Found, JobRun, Plan, jobs_of
from _team import Team, Worker, end


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    plan = Plan(
        sections=options.sections,
        bounds=options.bounds,
        repeats=options.repeats,
        rounds=options.rounds,
        seconds=options.seconds,
        replays=options.replays,
        seed=options.seed,
    )
    if not jobs_of(options.workloads, plan):
        parser.error("none of these sections measures any of these workloads with these bounds")
    machine = device()
    if machine is None:
        print("shared_execs.py: no CUDA device", file=sys.stderr)
        return 2
    report: dict[str, Any] = {
        "options": {**vars(options), "output": str(options.output)},
        **machine,
    }
    return 0 if measure(options, plan, report) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sections, bounds = list(SECTIONS), list(BOUNDS)
    parser.add_argument("--sections", nargs="+", choices=sections, default=sections)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--bounds",
        nargs="+",
        choices=bounds,
        default=bounds,
        help="values of max_execs; default: all, with the pool's own default among them",
    )
    parser.add_argument("--repeats", type=positive, default=5, help="captures timed by ready")
    parser.add_argument(
        "--rounds",
        type=positive,
        default=5,
        help="of what is measured in turns; of decode loops, which take long, half as many",
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=0.3, help="that one decode loop takes about"
    )
    parser.add_argument(
        "--replays", type=positive, default=10_000, help="whose results are compared, each bound"
    )
    parser.add_argument("--seed", type=int, default=0, help="of orders, schedules and inputs")
    parser.add_argument(
        "--timeout", type=positive, default=120, help="seconds that one step of a worker may take"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 60:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 60, is {value}")
    return value


def measure(options: argparse.Namespace, plan: Plan, report: dict[str, Any]) -> bool:
    """Measures everything, prints the tables and writes the report; returns whether all was
    measured and every output is right.
    """
    jobs = jobs_of(options.workloads, plan)
    found = Found()
    workers: dict[str, Worker] = jobs[0].start(options.timeout)
    following: dict[str, Worker] = {}
    try:
        for number, job in enumerate(jobs):
            began = time.monotonic()
            if number + 1 < len(jobs):
                following = jobs[number + 1].start(options.timeout)
            # The following job's processes import while this one's prepare. What fails there is
            # found when they are asked again.
            beside = Team(following)
            run = JobRun(job, Team(workers), plan, found)
            run.measure(partial(beside.at_once, "imported"))
            end(workers.values())
            workers, following = following, {}
            report.update(asdict(found))
            write_report(report, options.output)
            print(f"{job.workload}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    finally:
        end(workers.values())
        end(following.values())
    print(text(report))
    wrong = any(row["wrong"] for row in found.rows.get("results", []))
    return not found.errors and not wrong


if __name__ == "__main__":
    sys.exit(main())
