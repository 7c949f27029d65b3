"""Prints tables of README and docs, in Markdown, from what the benchmarks wrote.

python benchmarks/readme_table.py benchmarks/results/const_memory.json

With --short that of const_memory.py is README's, a line for each workload. In full it has a column
of recorded captures in 100 orders, from what cgp_quality printed:

cgp_quality --orders 100 build/release/csrc/testing/traces/recorded > benchmarks/results/orders.txt
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _lease_figures
import combinations
from _command import markdown, number
from _engine import beside
from _quality import read_quality
from _team import median, ratio

Row = dict[str, Any]

_MIB = 1 / (1 << 20)

WORKLOADS = {
    "seed": "pinned copies and `a**2 + b*2`, 128 sizes",
    "mlp": "gated MLP, 128 sizes",
    "llama": "Llama-like decode, 51 sizes",
    "resnet50": "ResNet-50 inference, 64 sizes",
    "gpt2": "GPT-2 training step, 8 lengths",
}
RECORDED = {name: f"{name}_asc" for name in WORKLOADS} | {"gpt2": "gpt2_train_asc"}
RUNNER_MODELS = {
    **WORKLOADS,
    "script": "`a**2 + b*2`, 128 sizes",
    "gpt2": "GPT-2 training, 8 sizes",
}
ORDERS_TEXT = Path(__file__).parent / "results" / "orders.txt"
TWO_STREAMS = {
    "streaming": "weights copied while the layer before computes, 8 sizes",
    "branches": "blocks of two branches, 8 sizes",
}
CAPTURED = {
    "r3d_18": "R3D-18, 12 sizes",
    "convnextv2_tiny": "ConvNeXtV2-T, 20 sizes",
    "wav2vec2": "wav2vec2, 10 sizes",
    "fcn_resnet50": "FCN-ResNet50, 8 sizes",
    "bert": "BERT, 12 lengths",
    "swin_t": "Swin-T, 16 sizes",
    **{name: WORKLOADS[name] for name in ("mlp", "llama", "resnet50")},
}
# What no other benchmark or test here has.
UNSEEN = {
    "squeezenet1_1": "SqueezeNet, 8 sizes",
    "shufflenet_v2_x1_0": "ShuffleNetV2, 8 sizes",
    "hrnet_w18": "HRNet-W18, 8 sizes",
    "maxvit_t": "MaxViT-T, 8 sizes",
    "pvt_v2_b2": "PVTv2-B2, 8 sizes",
    "s3d": "S3D, 8 sizes",
    "segformer": "SegFormer-B0, 8 sizes",
    "distilbert": "DistilBERT, 8 lengths",
    "gpt_neox": "GPT-NeoX-like prefill, 8 lengths",
}
SHARED_EXECS = {**WORKLOADS, "deep": "Gemma-like decode, 16 sizes"}
ORDERS = {"asc": "smallest first", "desc": "largest first", "shuffled": "shuffled"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--short", action="store_true", help="README's, of const_memory.json")
    arguments = parser.parse_args()
    report = json.loads(arguments.results.read_text())
    try:
        lines = (short_table if arguments.short else table)(report)
    except (
        KeyError,
        TypeError,
        ValueError,
    ):  # what the last of the tables wants is not in its rows
        print(f"{arguments.results}: this script prints no table of it", file=sys.stderr)
        return 2
    gpus = f"{report.get('gpus', 'one')} {report['gpu']}"
    print(f"Measured on {gpus} with torch {report['torch']}.\n")
    print("\n".join(lines))
    return 0


def table(report: Row) -> list[str]:
    """That of a benchmark, told by what it alone writes. What was not measured is a dash."""
    rows = report["rows"]
    if isinstance(rows, dict):
        return footprint_table(report)
    first = rows[0] if rows else {}
    if "checkpoints" in first:
        return combinations.table(rows)
    if "lease" in first:
        return _lease_figures.table(rows)
    if "all_reduce" in first:
        return vllm_table(rows)
    if "mapped_by_round" in first:
        return capture_parts_table(rows)
    if "section" in first:
        return shared_execs_table(report)
    if "allocators" in first:
        return multi_stream_table(report)
    if rows and all(row.get("workload") in TWO_STREAMS for row in rows):
        return two_streams_table(report)
    return graph_runner_table(report) if "model" in first else const_memory_table(report)


def const_memory_table(report: Row) -> list[str]:
    orders = read_quality(ORDERS_TEXT.read_text())
    lines = []
    named = set()
    for (workload, order), of in by_allocator(report).items():
        ours, stock, primed = (of.get(name) for name in ("ours", "stock", "primed"))
        name = "" if workload in named else (WORKLOADS | UNSEEN).get(workload, workload)
        named.add(workload)
        recorded = orders.get(RECORDED.get(workload, "")) if name else None
        lines.append(
            {
                "reserved, MiB (÷ minimum)": name,
                "order": ORDERS[order],
                "minimum": figure(stock, "minimum_bytes", _MIB, ",.0f"),
                "**cudagraph_pool**": f"**{size(ours)}**",
                "worst of 100 orders": f"{recorded.worst:.3f}" if recorded else "",
                "stock": size(stock),
                "expandable segments": size(of.get("expandable")),
                "primed": size(primed),
                "primed with the minimum": size(_with_minimum(primed)),
                "capture time ÷ stock": figure(ours, "capture_vs_stock", 1, ".2f"),
                "replay time ÷ stock": figure(ours, "replay_vs_stock", 1, ".3f"),
            }
        )
    return _known(lines)


def _with_minimum(primed: Row | None) -> Row | None:
    """What a pool that was primed reserves with the first of the sizes that were tried."""
    if primed is None or primed.get("primed_bytes") is None:
        return None
    reserved = primed["primed_bytes"][0]
    return {"reserved_bytes": reserved, "ratio": ratio(reserved, primed["minimum_bytes"])}


def _known(lines: Sequence[dict[str, str]]) -> list[str]:
    """A table without columns of which nothing was measured."""
    head = dict.fromkeys(
        title for line in lines for title, cell in line.items() if cell not in ("", "-")
    )
    return markdown(list(head), [[line[title] for title in head] for line in lines])


def capture_parts_table(rows: Sequence[Row]) -> list[str]:
    """Of capture_parts.py: the time, and the handles mapped; behind it where the time goes."""
    head = ["capture ÷ stock (handles mapped)", *ORDERS.values()]
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        of = {row["order"]: row for row in rows if row["workload"] == workload}
        cells = [
            f"{r['ratio']:.2f} ({r['mapped']:,.0f})" if (r := of.get(o)) else "-" for o in ORDERS
        ]
        lines.append([CAPTURED.get(workload, workload), *cells])
    mean = statistics.mean(row["ratio"] for row in rows)
    worst = max(row["ratio"] for row in rows)
    lines.append(["mean and worst of all", f"{mean:.2f}, {worst:.2f}", "", ""])
    parts = ["driver", "mapping", "others", "after", "between"]
    titles = ["ms of all rows", "stock", "ours", "driver's calls", "our own, mapping"]
    titles += ["our own, else (stock's)", "torch right after mapping", "torch elsewhere"]
    total = {
        key: sum(row[key] for row in rows) * 1e-6 for key in ("stock", "ours", "allocator", *parts)
    }
    shown = [f"{total[key]:,.0f}" for key in ("stock", "ours", *parts)]
    shown[4] += f" ({total['allocator']:,.0f})"
    return [*markdown(head, lines), "", *markdown(titles, [[f"{len(rows)} rows", *shown]])]


def short_table(report: Row) -> list[str]:
    """Of const_memory.py: each workload in the order that is worst for the allocator, those first
    of which stock takes most.
    """
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["workload"] == workload]
        ours = _worst(rows, "ours")
        lines.append(
            {
                "MiB reserved, in the worst of three orders": WORKLOADS[workload],
                "minimum": figure(ours, "minimum_bytes", _MIB, ",.0f"),
                "**cudagraph_pool**": f"**{size(ours)}**",
                "stock": size(_worst(rows, "stock")),
                "stock, largest first": size(_worst(rows, "stock", ["desc"])),
                "expandable segments": size(_worst(rows, "expandable")),
                "primed": size(_worst(rows, "primed")),
            }
        )
    lines.sort(key=lambda line: _ratio(line["stock"]), reverse=True)
    return _known(lines)


def _ratio(cell: str) -> float:
    """That in the brackets of a size."""
    return float(cell.partition("(")[2].rstrip(")") or 0)


def _worst(
    rows: Sequence[Row], allocator: str, orders: Iterable[str] = tuple(ORDERS)
) -> Row | None:
    measured = (r for r in rows if r["allocator"] == allocator and r["order"] in orders)
    return max(filter(lambda r: r["ratio"], measured), key=lambda r: r["ratio"], default=None)


def by_allocator(report: Row) -> dict[tuple[str, str], dict[str, Row]]:
    """The rows of const_memory.py, of each workload in each order."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in report["rows"]:
        found.setdefault((row["workload"], row["order"]), {})[row["allocator"]] = row
    return found


def figure(row: Row | None, key: str, scale: float, form: str) -> str:
    return number(None if row is None else row.get(key), scale, form)


def size(row: Row | None) -> str:
    if row is None or row.get("reserved_bytes") is None:
        return "-"
    return f"{row['reserved_bytes'] * _MIB:,.0f} ({figure(row, 'ratio', 1, '.3f')})"


def graph_runner_table(report: Row) -> list[str]:
    """The models of graph_runner.py. Ours after what people write by hand."""
    head = ["by hand, **GraphRunner**", "memory, MiB", "the largest alone, MiB"]
    head += ["capture time ÷ by hand: first, again", "CPU time of a call, µs"]
    head += ["step time ÷ by hand"]
    lines = []
    for row in report["rows"]:
        hand, ours = row["stock"], row["ours"]
        memory, largest, call = (
            f"{hand[name]:,.0f}, **{ours[name]:,.0f}**" for name in ("memory", "largest", "call")
        )
        first, again, step = (ours[name] / hand[name] for name in ("first", "capture", "step"))
        times = [f"{first:.2f}, {again:.2f}", call, f"{step:.3f}"]
        lines.append([RUNNER_MODELS[row["model"]], memory, largest, *times])
    return markdown(head, lines)


def footprint_table(report: Row) -> list[str]:
    """The cases of footprint.py."""
    head = ["stock, **cudagraph_pool**", "eager", "compiled", "graphs: held", "of it pool"]
    head += ["dynamic graphs: held", "of it pool"]

    def held(*ways: Row) -> str:
        """Of one way, or of stock and ours."""
        if any("error" in way for way in ways):
            return "failed"
        stock, *ours = (f"{way['held'] * _MIB:,.0f}" for way in ways)
        ratio = ways[-1]["compression_ratio"]
        shown = "".join([stock, *(f", **{own}**" for own in ours)])
        return shown if ratio is None else f"{shown} ({ratio:.2f})"

    def pool(stock: Row, ours: Row) -> str:
        if "error" in stock or "error" in ours:
            return "-"
        return f"{stock['graph_pool'] * _MIB:,.0f}, **{ours['graph_pool'] * _MIB:,.0f}**"

    lines = []
    for case, ways in report["rows"].items():
        # Of itself eager's ratio is 1.
        cells = [case, held({**ways["eager"], "compression_ratio": None}), held(ways["compiled"])]
        for kind in ("graphs", "dynamic graphs"):
            both = ways[f"{kind}, stock"], ways[f"{kind}, ours"]
            cells += [held(*both), pool(*both)]
        lines.append(cells)
    return markdown(head, lines)


def multi_stream_table(report: Row) -> list[str]:
    """The programs of multi_stream.py, by number of streams and together."""
    rows = report["rows"]

    def spread(chosen: Sequence[Row], allocator: str, key: str) -> str:
        found = [row["allocators"].get(allocator, {}).get(key) for row in chosen]
        values = [value for value in found if value is not None]
        return f"{statistics.geometric_mean(values):.2f} ({max(values):.2f})" if values else "-"

    head = ["reserved ÷ peak, geometric mean (worst)", "stock", "its option"]
    head += ["**cudagraph_pool**", "capture time ÷ stock: its option", "capture time ÷ stock"]
    head += ["replay time ÷ stock"]
    counts = sorted({row["streams"] for row in rows})
    groups = [(f"{count} streams", [r for r in rows if r["streams"] == count]) for count in counts]
    lines = []
    for name, chosen in [*groups, ("all", rows)]:
        ratios = [spread(chosen, allocator, "ratio") for allocator in ("stock", "option", "ours")]
        times = [spread(chosen, allocator, "capture_vs_stock") for allocator in ("option", "ours")]
        times.append(spread(chosen, "ours", "replay_vs_stock"))
        lines.append([f"{len(chosen)} programs, {name}", *ratios[:2], f"**{ratios[2]}**", *times])
    return markdown(head, lines)


def vllm_table(rows: Sequence[Row]) -> list[str]:
    """The modes of vllm_engine.py: medians of stock, ours, and with shared executables."""
    head = ["stock, **cudagraph_pool**, with shared executables", "graphs", "pool, MiB"]
    head += ["device, MiB", "KV tokens ÷ stock", "capture time ÷ stock"]
    modes: dict[tuple[Any, ...], dict[str, list[Row]]] = {}  # by allocator
    for row in rows:
        name = tuple(row[key] for key in ("model", "parallel", "mode", "all_reduce"))
        modes.setdefault(name, {}).setdefault(row["allocator"], []).append(row)
    lines = []
    for (model, gpus, mode, all_reduce), of in modes.items():
        title = f"{model.upper()}, {mode.upper().replace('-', ' ')}"
        title += f", {gpus} GPUs, {all_reduce}" if gpus > 1 else ""
        cells = [title, f"{of['stock'][0]['captures']:,}"]
        for keys in (("pool",), ("device", "used_later")):  # replays make shared executables
            medians = {n: median([sum(row.get(k, 0) for k in keys) for row in of[n]]) for n in of}
            cells.append(_each({n: number(value, _MIB, ",.0f") for n, value in medians.items()}))
        for key in ("kv_tokens", "capture_seconds"):
            ratios = {n: beside(of[n], of["stock"], key) for n in of if n != "stock"}
            cells.append(_each({n: number(value, 1, ".3f") for n, value in ratios.items()}))
        lines.append(cells)
    return markdown(head, lines)


def _each(cells: Mapping[str, str]) -> str:
    """One cell of several allocators'."""
    return ", ".join(f"**{cell}**" if name == "ours" else cell for name, cell in cells.items())


def shared_execs_table(report: Row) -> list[str]:
    """The sections memory and decode of shared_execs.py."""
    memory = [row for row in report["rows"] if row["section"] == "memory"]
    found = {(row["workload"], row["config"]): row for row in memory}
    bounds = [c for c in dict.fromkeys(row["config"] for row in memory) if c != "default"]
    head = ["driver memory of all graphs, MiB", "nodes"]
    head += ["`max_execs=None`" if bound == "none" else bound for bound in bounds]
    head += ["**default (4)**"]
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in memory):
        least, most = next(row["nodes"] for row in memory if row["workload"] == workload)
        cells = [
            figure(found.get((workload, bound)), "driver_bytes", _MIB, ",.0f")
            for bound in (*bounds, "default")
        ]
        nodes = str(least) if least == most else f"{least} to {most}"
        lines.append([SHARED_EXECS[workload], nodes, *cells[:-1], f"**{cells[-1]}**"])
    decode = [row for row in report["rows"] if row["section"] == "decode" and not row["read_back"]]
    steps: dict[str, Row] = {}  # by workload and schedule
    for row in decode:
        cell = figure(row["configs"].get("default"), "vs_stock", 1, ".3f")
        steps.setdefault(row["workload"], {})[row["schedule"]] = cell
    said = markdown(head, lines) if lines else []
    if steps:
        schedules = dict.fromkeys(row["schedule"] for row in decode)
        head = ["steps per second ÷ stock, default, size changes"]
        head += ["as a server's load" if name == "load" else name for name in schedules]
        lines = [[SHARED_EXECS[name], *found.values()] for name, found in steps.items()]
        said += ["", *markdown(head, lines)]
    return said


def two_streams_table(report: Row) -> list[str]:
    """Models on two streams, of const_memory.py."""
    lines = []
    for (workload, order), of in by_allocator(report).items():
        stock, option, ours = (size(of.get(name)) for name in ("stock", "option", "ours"))
        minimum = figure(of.get("stock"), "minimum_bytes", _MIB, ",.0f")
        name = f"{TWO_STREAMS[workload]}, {ORDERS[order]}"
        lines.append([name, minimum, stock, option, f"**{ours}**"])
    head = ["reserved, MiB (÷ minimum)", "minimum", "stock", "its option", "**cudagraph_pool**"]
    return markdown(head, lines)


if __name__ == "__main__":
    sys.exit(main())
