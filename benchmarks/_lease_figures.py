"""What leases.py must find, and how its tables say what it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from _command import markdown, number

Row = dict[str, Any]

WORKLOADS = {
    "llama": "Llama-like decode, 51 sizes",
    "resnet50": "ResNet-50 inference, 64 sizes",
    "unet": "latent-diffusion-like UNet, 20 shapes",
    "gpt2": "GPT-2 training, 8 lengths",
}
ORDERS = {"asc": "smallest first", "desc": "largest first", "shuffled": "shuffled"}
SAVER, OURS, SHARED = "torch_memory_saver", "ours", "ours, shared executables"
WAYS = {
    "ours": "no module of leases ÷ stock",
    "imported": "modules imported ÷ not imported",
    "slept": "slept once, awake ÷ never slept",
}

_MIB = 1 / (1 << 20)
_GIB = 1 << 30
_NOISE = 4 << 20  # the driver's own memory comes and goes
_HOST_NOISE = 16 << 20


def wake_bound(row: Row) -> float:
    """The seconds that a wake may take."""
    return float(45e-6 * row["mappings"] + 11e-6 * row["handles"])


def judge(row: Row) -> list[str]:
    """What is worse than it must be, or wrong."""
    name, checks = CHECKS[row["lease"]](row)
    return [f"{name}: {said}" for said, met in checks.items() if not met]


def _judge_sleep(row: Row) -> tuple[str, Mapping[str, bool]]:
    name = f"sleep, {row['workload']}, {row['way']}"
    if row["way"] == SAVER:  # a finding
        return name, {}
    scratch, pages, device = (row[f"{what}_bytes"] for what in ("scratch", "pages", "device"))
    lost, seconds, first = -row["back_bytes"], row["wake_seconds"], row["first_ratio"]
    bound = 0.3 if row["reserved_bytes"] >= 10 * _GIB else float("inf")
    bound = min(bound, wake_bound(row))
    return name, {
        "outputs are not those before": row["equal"],
        f"{pages:,} of {scratch:,} bytes of scratch went": pages >= 0.99 * scratch,
        f"the device has {device:,} bytes more, of {scratch:,}": device >= 0.99 * scratch,
        f"{lost:,} bytes are gone after the wake": lost <= _NOISE,
        f"the first replay takes {first:.3f} of what it took": first <= 1.01,
        # Executables are made within the wake, and timed apart.
        f"a wake of {seconds:.4f} s, not {bound:.4f}": row["way"] == SHARED or seconds <= bound,
    }


def _judge_trim(row: Row) -> tuple[str, Mapping[str, bool]]:
    held, touched = row["reserved_bytes"], row["touched_bytes"]
    return f"trim, {row['order']}", {
        "outputs are not eager's": row["equal"],
        f"{held:,} bytes stay, and {touched:,} are touched": held <= 1.1 * touched,
    }


def _judge_cycles(row: Row) -> tuple[str, Mapping[str, bool]]:
    more = {name: after - row["before"][name] for name, after in row["after"].items()}
    return "cycles", {
        f"{row['wrong']} outputs are wrong": row["wrong"] == 0,
        f"{more['driver_bytes']:,} bytes of the driver lost": more["driver_bytes"] <= _NOISE,
        f"{more['host_bytes']:,} bytes of the host lost": more["host_bytes"] <= _HOST_NOISE,
        f"{more['host_maps']} maps of the host more": more["host_maps"] <= 8,
        f"{more['addresses'] - more['ranges']} addresses lost": (
            more["addresses"] == more["ranges"]
        ),
    }


def _judge_lend(row: Row) -> tuple[str, Mapping[str, bool]]:
    less = row["peak_bytes"]["alone"] - row["peak_bytes"]["lent"]
    lendable, free = row["lendable_bytes"], row["free_bytes"]
    return "lend", {
        f"a peak lower by {less:,} bytes": less >= 0.95 * _GIB,
        f"{lendable:,} of {free:,} free bytes lendable": lendable >= 0.95 * free,
        f"{row['extra_bytes']:,} bytes for a block of 95 %": row["extra_bytes"] <= _NOISE,
        "outputs differ": row["equal"],
        "the host waits for the device": not row["waited"],
        "what is lent is not ordered behind replays": row["ordered"],
    }


def _judge_replay(row: Row) -> tuple[str, Mapping[str, bool]]:
    ratios = {name: row[f"{name}_ratio"] for name in ("call", "total")}
    return f"replay, {row['way']}", {
        f"{name} {ratio:.4f}": abs(ratio - 1) <= 0.005 or row["way"] == "slept"
        for name, ratio in ratios.items()
    }


CHECKS = {
    "sleep": _judge_sleep,
    "trim": _judge_trim,
    "cycles": _judge_cycles,
    "lend": _judge_lend,
    "replay": _judge_replay,
}


def table(rows: Sequence[Row]) -> list[str]:
    """Of each section that was measured, with a line between."""
    lines: list[str] = []
    for section, made in TABLES.items():
        if of := [row for row in rows if row["lease"] == section]:
            lines += [*([""] if lines else []), *made(of)]
    return lines


def _sleep_table(rows: Sequence[Row]) -> list[str]:
    head = ["sleep and wake", "by", "pool, MiB", "given back, MiB", "÷ scratch"]
    head += ["executables: MiB, ms", "sleep, ms", "wake, ms", "its bound", "mappings, handles"]
    head += ["first replay ÷ before", "all ÷ before"]
    return markdown(head, map(_sleep_cells, rows))


def _sleep_cells(row: Row) -> list[str]:
    both = [number(row[name], _MIB, ",.0f") for name in ("reserved_bytes", "device_bytes")]
    apart = ["-", "-", "-", "-"]  # what is known of ours alone
    if row["way"] != SAVER:
        execs = "-"
        if row["way"] == SHARED:
            size, seconds = row["device_bytes"] - row["pages_bytes"], row["exec_seconds"]
            execs = f"{size * _MIB:,.0f}, {seconds * 1e3:,.1f}"
        bound = number(wake_bound(row), 1e3, ",.1f")
        counts = f"{row['mappings']:,.0f}, {row['handles']:,.0f}"
        apart = [f"{row['device_bytes'] / row['scratch_bytes']:.3f}", execs, bound, counts]
    given, execs, bound, counts = apart
    times = [number(row[name], 1e3, ",.1f") for name in ("sleep_seconds", "wake_seconds")]
    ratios = [f"{row[name]:.3f}" for name in ("first_ratio", "every_ratio")]
    names = [WORKLOADS[row["workload"]], row["way"]]
    return [*names, *both, given, execs, *times, bound, counts, *ratios]


def _trim_table(rows: Sequence[Row]) -> list[str]:
    head = ["trim, 10 of 50 graphs stay, captured", "before, MiB", "after, MiB"]
    head += ["pages that the ten touch, MiB", "÷ these", "the ten alone, MiB", "ms"]
    figures = ("before_bytes", "reserved_bytes", "touched_bytes")
    lines = [
        [
            ORDERS[row["order"]],
            *(number(row[name], _MIB, ",.0f") for name in figures),
            f"{row['reserved_bytes'] / row['touched_bytes']:.3f}",
            number(row["alone_bytes"], _MIB, ",.0f"),
            number(row["seconds"], 1e3, ",.1f"),
        ]
        for row in rows
    ]
    return markdown(head, lines)


def _cycles_table(rows: Sequence[Row]) -> list[str]:
    (row,) = rows
    names = {
        "driver_bytes": "driver, MiB",
        "host_bytes": "host, MiB",
        "reserved_bytes": "pool, MiB",
        "handles": "handles",
        "addresses": "address ranges",
    }
    head = [f"{row['cycles']:,} cycles, {row['wrong']} outputs wrong", *names.values()]
    scales = [_MIB if name.endswith("_bytes") else 1 for name in names]
    lines = [
        [when, *(number(row[when][n], s, ",.0f") for n, s in zip(names, scales, strict=True))]
        for when in ("before", "after")
    ]
    return markdown(head, lines)


def _lend_table(rows: Sequence[Row]) -> list[str]:
    (row,) = rows
    peaks = row["peak_bytes"]
    head = ["eager steps beside a pool", "device peak, MiB", "with `lend()`", "free bytes lendable"]
    head += ["step time ÷ without", "host waits"]
    cells = [
        number(row["reserved_bytes"], _MIB, ",.0f") + " MiB",
        *(number(peaks[way], _MIB, ",.0f") for way in ("alone", "lent")),
        f"{row['lendable_bytes'] / row['free_bytes']:.3f}",
        f"{row['step_ratio']:.3f}",
        "yes" if row["waited"] else "no",
    ]
    return markdown(head, [cells])


def _replay_table(rows: Sequence[Row]) -> list[str]:
    head = ["replay", "CPU time of a call, µs", "÷", "pairs of processes", "step, µs", "÷"]
    lines = [
        [
            WAYS[row["way"]],
            number(row["call_seconds"], 1e6, ".2f"),
            f"{row['call_ratio']:.4f}",
            " to ".join(f"{value:.4f}" for value in row["call_spread"]),
            number(row["total_seconds"], 1e6, ",.1f"),
            f"{row['total_ratio']:.4f}",
        ]
        for row in rows
    ]
    return markdown(head, lines)


TABLES = {
    "sleep": _sleep_table,
    "trim": _trim_table,
    "cycles": _cycles_table,
    "lend": _lend_table,
    "replay": _replay_table,
}
