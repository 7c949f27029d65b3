"""What a pool gives away while its graphs are idle: sleep, wake, trim and lend.

    python benchmarks/leases.py --output leases.json
    python benchmarks/leases.py --sections sleep --workloads llama --output llama.json

Prints the docs' tables, and what is worse than the figures below. Exit code 0 if all figures are
met, 1 if not, 2 without a GPU. torch_memory_saver does the same in the section sleep, in the same
process, if it can be imported (``PYTHONPATH``): on PyTorch's own pool, captured by its
``cuda_graph``; it is preloaded. The sections:

sleep    Every size of a workload is captured, smallest first. Then the pool sleeps and wakes some
         times; meanwhile other memory is written. By the device (``cuMemGetInfo``) and by the pool:
         the bytes given back; the seconds of sleep and wake; how many handles were made and
         mapped; the first replay of the largest graph, on the device, and one of every graph, by
         the wall, against those before. What the graphs compute is compared bit for bit. ``gpt2``
         has a batch for which the pool has more than 10 GiB, outputs of ``resnet50`` live in it.
trim     Of 50 sizes of an MLP the 40 largest go, for three orders of capture.
cycles   Sleeps between random replays and captures, whose outputs are compared; what the device,
         the host and the driver hold before and after.
lend     A training step that saves 1 GiB for its gradients, beside a pool of 2 GiB: the most that
         the device has less, with a loan and without; how much can be borrowed; whether the host
         waits for a graph of half a second.
replay   A replay where nothing ever slept or lent, in processes that take turns: stock; ours, where
         no module of leases is imported; where one is; and where a pool has slept once. Each pair
         of processes and rounds is a ratio; the spread is that of the pairs of processes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module, metadata, util
from pathlib import Path
from statistics import median
from typing import Any

from _apart import WorkerError, measure_apart, run_script
from _command import (
    add_common,
    add_some,
    new_parser,
    new_report,
    positive,
    verdict,
    write_report,
)
from _lease_figures import ORDERS, OURS, SAVER, SHARED, WAYS, WORKLOADS, Row, judge, table
from _team import Team

SECTIONS = ("sleep", "trim", "cycles", "lend", "replay")
PROCESSES, ROUNDS, CALLS = 3, 15, 50  # of the section replay


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser(__doc__)
    add_some(parser, "--sections", SECTIONS)
    add_some(parser, "--workloads", WORKLOADS)
    parser.add_argument("--cycles", type=positive, default=1000, help="of sleep and wake")
    add_common(parser, rounds=5, seed=0, timeout=120)
    options = parser.parse_args(argv)
    report = {**new_report(options), **saver_version()}
    problems: list[str] = []
    for section, *given in asked(options):
        began = time.monotonic()
        try:
            report["rows"] += rows_of(section, given, options, problems)
        except WorkerError as error:
            problems.append(f"{section} {given}: FAILED {error}")
        write_report(report, options.output)
        print(f"{section} {given}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    print("\n".join(table(report["rows"])))
    return verdict([*problems, *(said for row in report["rows"] for said in judge(row))])


def asked(options: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    """Sections, with what they are measured with."""
    for section in options.sections:
        if section == "sleep":
            yield from ((section, name, options.rounds) for name in options.workloads)
        elif section == "cycles":
            yield section, options.cycles
        else:
            yield (section,)


def rows_of(
    section: str, given: Sequence[Any], options: argparse.Namespace, problems: list[str]
) -> list[Row]:
    if section == "replay":
        return replay_rows(options.timeout, problems)
    arguments = (section, options.seed, *given)
    saver = saver_environment() if section == "sleep" else {}
    try:
        rows = measure_apart(__file__, *arguments, seconds=options.timeout, **saver)["rows"]
    except WorkerError as error:
        if not saver:
            raise
        # It ends the process where a call of the driver fails.
        problems.append(f"{section} {given[0]}, with {SAVER}: FAILED {error}")
        rows = measure_apart(__file__, *arguments, seconds=options.timeout)["rows"]
    return [{"lease": section, **row} for row in rows]


def saver_version() -> dict[str, str]:
    found = util.find_spec(SAVER)
    return {SAVER: metadata.version(SAVER) if found else "cannot be imported"}


def saver_environment() -> dict[str, str]:
    """What preloads it, ahead of the CUDA runtime that this process has; nothing if it is not
    there.
    """
    if util.find_spec(SAVER) is None:
        return {}
    library = import_module(f"{SAVER}.utils").get_binary_path_from_package(
        f"{SAVER}_hook_mode_preload"
    )
    mapped = Path("/proc/self/maps").read_text().split()
    runtime = next(path for path in mapped if "/libcudart" in path)
    others = os.environ.get("LD_PRELOAD")
    return {"LD_PRELOAD": ":".join(filter(None, (str(library), runtime, others)))}


def measure(section: str, seed: int, *given: Any) -> dict[str, Any]:
    """The rows of a section, measured in this process."""
    import torch

    device = torch.device("cuda", 0)
    return {"rows": MEASURED[section](device, seed, *given)}


def sleep_rows(device: Any, seed: int, workload: str, rounds: int) -> list[Row]:
    from _lease_captures import SLEEPING, Sleepers

    captures = Sleepers(SLEEPING[workload], device)
    captures.warm_up()
    ways = [OURS, SHARED] if workload == "llama" else [OURS]
    if SAVER in os.environ.get("LD_PRELOAD", ""):
        ways = [SAVER, *ways]  # before the allocator is another
    return [{"workload": workload, **captures.sleep(way, rounds, seed)} for way in ways]


def trim_rows(device: Any, seed: int) -> list[Row]:
    from _lease_captures import Trimmed
    from workloads import WORKLOADS

    captures = Trimmed(WORKLOADS["mlp"], device, ours=True)
    captures.warm_up()
    keys = list(captures.workload.keys)[1:100:2]
    rows = []
    for order in ORDERS:
        shuffled = random.Random(seed).sample(keys, len(keys))
        given = {"asc": keys, "desc": keys[::-1], "shuffled": shuffled}[order]
        rows.append({"order": order, **captures.trim(given, keys[:10], seed)})
    return rows


def cycles_rows(device: Any, seed: int, number: int) -> list[Row]:
    from _lease_programs import Cycles
    from workloads import WORKLOADS

    cycles = Cycles(WORKLOADS["mlp"], device)
    cycles.warm_up()
    return [cycles.run(number, seed)]


def lend_rows(device: Any, seed: int) -> list[Row]:
    from _lease_programs import Lending

    return [Lending(device, seed).run(steps=5)]


MEASURED: Mapping[str, Callable[..., list[Row]]] = {
    "sleep": sleep_rows,
    "trim": trim_rows,
    "cycles": cycles_rows,
    "lend": lend_rows,
}


def replay_rows(timeout: float, problems: list[str]) -> list[Row]:
    """Each way against the one before it."""
    names = [f"{way} {n}" for n in range(PROCESSES) for way in ("stock", *WAYS)]
    with Team(["replays", "mlp"], names, timeout) as team:
        team.at_once("prepare")
        modules = team.ask("modules")
        found = team.in_turn(ROUNDS, "replays", calls=CALLS)
    problems += [f"replay, {name}: FAILED {error}" for name, error in team.errors.items()]
    if team.errors:
        return []
    rows = []
    for base, way in itertools.pairwise(("stock", *WAYS)):
        more = sorted({*modules[f"{way} 0"]} - {*modules[f"{base} 0"]})
        row: Row = {"lease": "replay", "way": way, "modules": more if way != "ours" else []}
        for place, figure in enumerate(("call", "total")):
            pairs = []
            for n in range(PROCESSES):
                both = zip(found[f"{way} {n}"], found[f"{base} {n}"], strict=True)
                pairs.append([own[place] / other[place] for own, other in both])
            row[f"{figure}_ratio"] = median(itertools.chain(*pairs))
            row[f"{figure}_spread"] = [min(map(median, pairs)), max(map(median, pairs))]
            times = itertools.chain(*(found[f"{way} {n}"] for n in range(PROCESSES)))
            row[f"{figure}_seconds"] = median(one[place] for one in times) / CALLS
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(run_script(main, measure))
