"""vLLM, unedited: stock PyTorch against cudagraph_pool, and with executables shared.

Models with random weights answer the same prompts in every mode of vLLM's graphs, by its V1 and V2
model runners, on one GPU and on two: like Llama, one of them with an EAGLE drafter, and like
Qwen2.5-VL with its encoder in graphs. Each run has a process of its own, which differs by
``CUDAGRAPH_POOL`` in its environment only; the runs of one comparison take turns. Prints a table of
medians and writes JSON. Where the file is there already, only what it lacks is run. Exit code 0 if
all tokens are equal and every capture of ours was in a pool of ours, 1 if not, 2 if something is
missing.

    python benchmarks/vllm_engine.py --output results/vllm_engine.json
    python benchmarks/vllm_engine.py --models 8b --parallel 2 --modes v1-default --output two.json

vLLM 0.33 and this package must be installed, or lie on PYTHONPATH as ``pip install --target``
leaves them: the package is enabled by its entry points. If the first run fails, it is the last.

all-reduce  On two GPUs: vLLM's own (custom), or it has disable_custom_all_reduce (nccl).
graphs      That capture_model() made, and how many of them in pools of ours.
pool        MiB that graph pools reserve after it.
÷min        By the minimum: the most that was ever live in pools of ours at once, in whole pages.
device      MiB that the device had less after capture_model() than before.
estimate    MiB that were set aside for graphs.
saved       MiB that vLLM's own estimate would have set aside on top, where our plugin forecasts.
capture     Seconds of capture_model().
÷stock      Of what stands before it, by stock's with vLLM's own all-reduce: the median of rounds.
digest      Of all tokens. On two GPUs all figures are of the one that took more.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from _apart import WorkerError, run_apart
from _command import (
    add_common,
    add_some,
    new_parser,
    number,
    positive,
    resume,
    verdict,
    write_report,
)
from _engine import REQUESTS, Row, beside, judge
from _team import in_turn, median, ratio

from cudagraph_pool._table import format_table

MODELS = ("1b", "1b-eagle", "vl", "8b")
MODES = ("v2-default", "v2-FULL", "v2-FULL_DECODE_ONLY", "v2-PIECEWISE", "v1-default")
ALL_REDUCES = ("custom", "nccl")
# What makes runs comparable, and one run another than that of another round.
GROUP = ("model", "parallel", "mode", "all_reduce")
KEY = (*GROUP, "allocator", "round")
BASE = ("stock", "custom")
_MIB = 1 / (1 << 20)
FIGURES = (
    ("captures", 1, ".0f"),
    ("captures_of_ours", 1, ".0f"),
    ("pool", _MIB, ",.0f"),
    ("device", _MIB, ",.0f"),
    ("estimate", _MIB, ",.0f"),
    ("saved", _MIB, ",.0f"),
    ("kv_tokens", 1, ",.0f"),
    ("capture_seconds", 1, ".2f"),
    ("tokens_per_second", 1, ",.0f"),
)
# These stand beside stock's too.
COMPARED = ("device", "kv_tokens", "capture_seconds", "tokens_per_second")
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and program are one process; workers are not
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # tokens are not sampled
    "VLLM_USE_DEEP_GEMM": "0",  # weights are bfloat16
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser(__doc__)
    add_some(parser, "--models", MODELS)
    add_some(parser, "--modes", MODES)
    add_some(parser, "--allocators", REQUESTS)
    add_some(parser, "--all-reduces", ALL_REDUCES)
    parser.add_argument("--parallel", nargs="+", type=positive, default=[1], help="GPUs of a run")
    parser.add_argument("--calls", type=positive, default=5, help="that a process times")
    parser.add_argument("--tokens", type=positive, default=128, help="of each of 64 prompts")
    add_common(parser, rounds=5, timeout=300)
    options = parser.parse_args(argv)
    lacks = missing(max(options.parallel))
    if lacks is not None:
        print(f"vllm_engine.py: {lacks}", file=sys.stderr)
        return 2
    report = resume(options.output, calls=options.calls, tokens=options.tokens)
    # What failed before is run again.
    report["rows"] = rows = [row for row in report["rows"] if "error" not in row]
    for run in _runs(options):
        if not any(all(row[key] == run[key] for key in KEY) for row in rows):
            rows.append({**run, **_measure(run, options)})
            write_report(report, options.output)
            if all("error" in row for row in rows):
                break  # what this run lacks, the others lack too
    problems = [f"{_title(row)}: {row['error']}" for row in rows if "error" in row]
    rows = [row for row in rows if "error" not in row]
    if rows:
        print(table(rows))
    problems += judge(rows, lambda row: " ".join(str(row[key]) for key in GROUP))
    return verdict(problems)


def missing(gpus: int) -> str | None:
    """Why nothing can be measured here."""
    for name in ("torch", "vllm"):
        if importlib.util.find_spec(name) is None:
            return f"there is no {name}: install vLLM 0.33, or put it on PYTHONPATH"
    if not metadata.entry_points(group="vllm.general_plugins", name="cudagraph_pool"):
        return "cudagraph_pool is not installed, so vLLM would not call it: pip install ."
    import torch

    found = torch.cuda.device_count()
    return None if found >= gpus else f"{gpus} GPUs are wanted, {found} found"


def _runs(options: argparse.Namespace) -> Iterator[Row]:
    compared = itertools.product(
        *(options.models, options.parallel, options.modes, options.all_reduces, options.allocators)
    )
    # One GPU has nothing to reduce.
    runs = dict.fromkeys(run if run[1] > 1 else (*run[:3], "custom", run[4]) for run in compared)
    for turn, run in in_turn(options.rounds, list(runs)):
        yield dict(zip(KEY, (*run, turn), strict=True))


def _measure(run: Row, options: argparse.Namespace) -> Row:
    runner, graphs = run["mode"].split("-")
    asked = {**run, "cudagraph_mode": graphs, "calls": options.calls, "tokens": options.tokens}
    script = Path(__file__).with_name("_vllm_run.py")
    environment = {
        **_ENVIRONMENT,
        **os.environ,
        "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2")),
        "CUDAGRAPH_POOL": REQUESTS[run["allocator"]],
    }
    print(f"{_title(run)} round {run['round']}", file=sys.stderr)
    try:
        return run_apart([str(script), json.dumps(asked)], environment, options.timeout)
    except WorkerError as error:
        return {"error": str(error)}


def _title(row: Row) -> str:
    return " ".join(str(row[key]) for key in (*GROUP, "allocator"))


def table(rows: Sequence[Row]) -> str:
    """Medians over the rounds. Rows are in the order in which they were first run."""
    head = (
        "model GPUs mode all-reduce allocator graphs of_ours pool ÷min device ÷stock estimate "
        "saved KV_tokens ÷stock capture ÷stock tokens/s ÷stock digest"
    )
    cells = [head.split()]
    for title in dict.fromkeys(map(_title, rows)):
        own = [row for row in rows if _title(row) == title]
        first = own[0]
        peers = [row for row in rows if all(row[key] == first[key] for key in GROUP[:3])]
        stock = [row for row in peers if (row["allocator"], row["all_reduce"]) == BASE]
        ours = [row for row in peers if row["all_reduce"] == first["all_reduce"] and row["minimum"]]
        line = [str(first[key]) for key in (*GROUP, "allocator")]
        for key, scale, form in FIGURES:
            line.append(number(_of(own, key), scale, form))
            if key == "pool":
                line.append(number(ratio(_of(own, "pool"), _of(ours, "minimum")), 1, ".3f"))
            elif key in COMPARED:
                line.append(number(beside(own, stock, key), 1, ".3f"))
        cells.append([*line, first["digest"]])
    return format_table(cells, left_columns=(0, 2, 3, 4), width=sys.maxsize)


def _of(rows: Sequence[Row], key: str) -> float | None:
    return median([row[key] for row in rows])


if __name__ == "__main__":
    sys.exit(main())
