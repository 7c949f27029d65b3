"""Takes the time of captures apart: what of it is torch's, the driver's, and our own.

    python benchmarks/capture_parts.py --output capture_parts.json
    python benchmarks/capture_parts.py --workloads bert --orders asc --output bert.json

Stock and ours take turns with the same captures in one process. Each call of the allocator is
timed, and what torch does between two of them; the calls are the same, one by one, so the times of
each are compared with stock's of the same one. Each is the median over the repeats; a row's figures
are milliseconds for all of its graphs:

    stock, ours   the bodies of all captures
    allocator     stock's allocations and frees
    driver        CUDA's functions that ours called
    mapped        how many handles they mapped
    again         ours ÷ stock in the last of several rounds of the same captures in one pool, and
                  the handles mapped in that
    mapping       ours: allocations that mapped, without the driver's time: core and adapter
    others        ours: the other allocations, and the frees
    after         torch in the ten gaps after an allocation that mapped, beyond stock's there
    between       torch in all other gaps, beyond stock's there
    enter, exit   torch.cuda.graph's: ours, and stock's
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from _apart import WorkerError, measure_apart, run_script
from _command import (
    add_common,
    add_some,
    markdown,
    new_parser,
    new_report,
    positive,
    verdict,
    write_report,
)

ORDERS = ("asc", "desc", "shuffled")
WORKLOADS = ("r3d_18", "convnextv2_tiny", "wav2vec2", "fcn_resnet50", "bert", "swin_t", "resnet50")
KEPT = "-kept"
MAPS_NS = 15_000  # mapping a handle takes longer, nothing else does: a report has both counts
AFTER = 10  # gaps
HEAD = (
    "", "order", "graphs", "calls", "stock", "ours", "÷", "allocator", "driver", "mapped", "again",
    "mapping", "others", "after", "between", "enter", "exit",
)  # fmt: skip


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--workloads", nargs="+", default=[*WORKLOADS], metavar="NAME")
    add_some(parser, "--outputs", ("released", "kept"), default=["released"])
    parser.add_argument("--times", type=positive, default=4, help="the same captures in one pool")
    add_some(parser, "--orders", ORDERS)
    add_common(parser, repeats=7, seed=0)
    options = parser.parse_args()
    report = new_report(options)
    problems = []
    print("\n".join(markdown(HEAD, [])))
    ends = [KEPT if outputs == "kept" else "" for outputs in options.outputs]
    names = [name + end for name in options.workloads for end in ends]
    for workload in names:
        asked = (workload, options.orders, options.repeats, options.times, options.seed)
        try:
            rows = measure_apart(__file__, *asked)["rows"]
        except WorkerError as error:
            problems.append(f"{workload}: {error}")
            continue
        report["rows"] += rows
        print("\n".join(markdown(HEAD, map(cells, rows))[2:]), flush=True)
        write_report(report, options.output)
    for row in report["rows"]:
        print(calls_of(row))
    return verdict(problems)


def measure(
    workload: str, orders: Sequence[str], repeats: int, times: int, seed: int
) -> dict[str, Any]:
    """The rows of a workload, measured in this process."""
    import torch
    from _parts import TimedCaptures
    from workloads import WORKLOADS

    captures = TimedCaptures(WORKLOADS[workload], torch.device("cuda", 0))
    captures.warm_up()
    keys = captures.workload.keys
    rows = []
    for order in orders:
        wanted = in_order(keys, order, seed)
        found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        for number in range(2 * repeats):
            ours = number % 4 in (1, 2)  # stock, ours, ours, stock, ...
            found[ours].append(captures.parts(wanted, ours, times))
        row = {"workload": workload, "order": order, "graphs": len(keys)}
        rows.append({**row, **take_apart(found[False], found[True])})
    return {"rows": rows}


def in_order(keys: Sequence[int], order: str, seed: int) -> list[int]:
    if order == "shuffled":
        return random.Random(seed).sample(list(keys), len(keys))
    return sorted(keys, reverse=order == "desc")


def take_apart(stock: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a row, in nanoseconds, from what was measured in turn."""
    for number, run in enumerate([*stock, *ours]):
        if run["bytes"] != stock[-1]["bytes"]:
            calls = zip(run["bytes"], stock[-1]["bytes"], strict=False)
            first = next((i for i, (a, b) in enumerate(calls) if a != b), None)
            raise RuntimeError(
                f"run {number} asked for other blocks from call {first} on: "
                f"{len(run['bytes'])} and {len(stock[-1]['bytes'])} calls"
            )

    def each(runs: list[dict[str, Any]], figure: str) -> list[float]:
        """Of each call."""
        return [median(values) for values in zip(*(run[figure] for run in runs), strict=True)]

    def median_of(runs: list[dict[str, Any]], figure: str) -> float:
        return float(median(run[figure] for run in runs))

    def ratio(figure: Callable[[dict[str, Any]], float]) -> float:
        return float(median(figure(b) / figure(a) for a, b in zip(stock, ours, strict=True)))

    took, stock_took = each(ours, "took"), each(stock, "took")
    excess = [g - s for g, s in zip(each(ours, "gap"), each(stock, "gap"), strict=True)]
    long = [number for number, spent in enumerate(took) if spent > MAPS_NS]
    behind = [{i + distance for i in long if i + distance < len(took)} for distance in range(AFTER)]
    near = set().union(*behind)
    driver = {
        name: [median(run["driver"].get(name, (0, 0))[i] for run in ours) for i in (0, 1)]
        for name in ours[-1]["driver"]
    }
    in_driver = sum(spent for _, spent in driver.values())
    return {
        "calls": len(took),
        "stock": median_of(stock, "body"),
        "ours": median_of(ours, "body"),
        "ratio": ratio(lambda run: run["body"]),
        "allocator": sum(stock_took),
        "driver": in_driver,
        "mapped": driver.get("cuMemMap", [0, 0])[0],
        "again": ratio(lambda run: run["bodies"][-1]),
        "mapped_by_round": each(ours, "mapped"),
        "reserved_bytes": [max(run["reserved_bytes"]) for run in (stock[-1], ours[-1])],
        "mapping": sum(took[i] for i in long) - in_driver,
        "others": sum(took) - sum(took[i] for i in long),
        "after": sum(excess[i] for i in near),
        "after_by_distance": [sum(excess[i] for i in numbers) for numbers in behind],
        "between": sum(excess) - sum(excess[i] for i in near),
        "enter": [median_of(ours, "enter"), median_of(stock, "enter")],
        "exit": [median_of(ours, "exit"), median_of(stock, "exit")],
        "long_calls": len(long),
        "driver_calls": driver,
    }


def cells(row: dict[str, Any]) -> list[str]:
    def ms(value: float) -> str:
        return f"{value / 1e6:.1f}"

    both = [f"{ms(row[part][0])}, {ms(row[part][1])}" for part in ("enter", "exit")]
    head = [row["workload"], row["order"], str(row["graphs"]), str(row["calls"])]
    times = [ms(row["stock"]), ms(row["ours"]), f"{row['ratio']:.2f}"]
    times += [ms(row["allocator"]), ms(row["driver"])]
    again = f"{row['again']:.2f}, {row['mapped_by_round'][-1]:.0f}"
    parts = [ms(row[part]) for part in ("mapping", "others", "after", "between")]
    return [*head, *times, f"{row['mapped']:.0f}", again, *parts, *both]


def calls_of(row: dict[str, Any]) -> str:
    """What the table has no room for."""
    found = [call for call in row["driver_calls"].items() if call[1][0]]
    calls = [
        f"{name} {count:.0f} × {spent / count / 1e3:.1f} µs"
        for name, (count, spent) in sorted(found, key=lambda call: -call[1][1])
    ]
    after = " ".join(f"{value / 1e6:.1f}" for value in row["after_by_distance"])
    reserved = [size >> 20 for size in row["reserved_bytes"]]
    return (
        f"{row['workload']} {row['order']}: {', '.join(calls)}; "
        f"{row['long_calls']} allocations over {MAPS_NS // 1000} µs, gaps after: {after} ms; "
        f"mapped by round: {row['mapped_by_round']}; MiB of stock and ours: {reserved}"
    )


if __name__ == "__main__":
    sys.exit(run_script(main, measure))
