"""What one executable for many graphs saves and costs: stock PyTorch, and pools that share.

Each workload is captured for all of its sizes, with an executable for each graph as PyTorch makes
them and into pools of ours with ``shared_exec=True``, for several ``max_execs``: each in a process
of its own, all side by side and one at a time, so that times are taken under the same clocks.
Prints the docs' tables and writes one JSON file. Exit code 0 if everything was measured,
1 if not, 2 for wrong arguments or without a GPU.

    python benchmarks/shared_execs.py --output execs.json
    python benchmarks/shared_execs.py --sections decode --bounds 4 default --output e.json

The sections:

memory   Driver memory of all graphs: what the device has less after the captures and after
         replays of all graphs in two orders (the most of these), without what PyTorch reports as
         reserved by pools. Everything was run, and captured without executables, before.
         Each figure is that of a fresh process: the driver keeps what destroyed executables held.
decode   Steps per second of a loop whose size changes each step, every 10, every 100 steps, or as a
         server's load draws it (requests arrive and end at random); also where each step waits for
         a value that it computed.

That results are those of separate executables is for tests/gpu/test_shared_exec.py to say.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from _command import add_common, add_some, new_parser, new_report, verdict, write_report
from _exec_schedules import SCHEDULES, schedule, steps_for
from _team import Team, median, median_ratio, ratio
from readme_table import table

BOUNDS = ("none", "1", "2", "4", "8", "16", "default")

# Which workloads each section measures; stock is always held against them.
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "memory": ("llama", "resnet50", "mlp", "seed", "deep"),
    "decode": ("llama", "deep"),
}
WORKLOADS = SECTIONS["memory"]

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser(__doc__)
    add_some(parser, "--sections", SECTIONS)
    add_some(parser, "--workloads", WORKLOADS)
    said = "values of max_execs; default: all, with the pool's own default among them"
    add_some(parser, "--bounds", BOUNDS, help=said)
    said = "that one decode loop takes about"
    parser.add_argument("--seconds", type=float, default=0.3, help=said)
    add_common(parser, rounds=3, seed=0, timeout=120)
    options = parser.parse_args(argv)
    measured = [name for name in options.workloads if sections_of(name, options)]
    if not measured:
        parser.error("none of these sections measures any of these workloads")
    report = {**new_report(options), "errors": []}
    configs = ["stock", *(bound for bound in BOUNDS if bound in options.bounds)]
    for workload in measured:
        began = time.monotonic()
        with Team(["execs", workload], configs, options.timeout) as team:
            report["rows"] += measure(team, workload, options)
        report["errors"] += [
            f"{workload}, max_execs {config}: FAILED {error}"
            for config, error in team.errors.items()
        ]
        write_report(report, options.output)
        print(f"{workload}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    print("\n".join(table(report)))
    return verdict(report["errors"])


def sections_of(workload: str, options: argparse.Namespace) -> list[str]:
    """Those that were asked for and measure this workload."""
    return [name for name in SECTIONS if name in options.sections and workload in SECTIONS[name]]


def measure(team: Team, workload: str, options: argparse.Namespace) -> list[Row]:
    """The rows of one workload, with its section each."""
    keys: list[int] = []
    for sizes in team.at_once("prepare").values():
        keys = sizes
    rows: list[Row] = []
    for section in sections_of(workload, options) if keys else []:
        if section == "memory":
            answers = team.ask("memory", seed=options.seed)
            found = [{"config": config, **answer} for config, answer in answers.items()]
        else:
            found = measure_decode(team, keys, options)
        rows += [{"section": section, "workload": workload, **row} for row in found]
    return rows


def measure_decode(team: Team, keys: Sequence[int], options: argparse.Namespace) -> list[Row]:
    """A row for each schedule, without and with what each step computes being read."""
    step_seconds = _step_seconds(team, keys)
    if step_seconds is None:
        return []
    rows = []
    for read_back, name in itertools.product((False, True), SCHEDULES):
        steps = steps_for(name, options.seconds, step_seconds)
        drawn = schedule(name, keys, steps, options.seed)
        asked = {"before": drawn.before, "timed": drawn.timed, "read_back": read_back}
        seconds = team.in_turn(options.rounds, "decode", **asked)
        configs = {
            config: {
                "steps_per_second": ratio(steps, median(own)),
                "vs_stock": median_ratio(seconds["stock"], own),
            }
            for config, own in seconds.items()
        }
        row = {"schedule": name, "read_back": read_back, "steps": steps}
        rows.append({**row, "switches": drawn.switches, "configs": configs})
    return rows


def _step_seconds(team: Team, keys: Sequence[int]) -> float | None:
    """Of stock, of the sizes in turn, once all of them have run."""
    for _ in range(2):
        answers = team.ask("decode", before=[], timed=keys, read_back=False)
    return answers["stock"] / len(keys) if "stock" in answers else None


if __name__ == "__main__":
    sys.exit(main())
