"""Which properties of a CUDA graph cuGraphExecUpdate carries over, refuses, or silently keeps.

Needs a GPU and the nvcc of CUDA 13. Compiles graph_updates*.cu, starts the program once a case (a
case may hang the GPU or lose its context: that is a finding, not a failure), and prints tables in
Markdown; docs/graph_updates.md says what they mean.

    python benchmarks/graph_updates.py --output graph_updates.json
    python benchmarks/graph_updates.py --only cluster     # cases whose name holds the word
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _command import positive, write_report

SOURCES = sorted(Path(__file__).parent.glob("graph_updates*.cu"))
NODES = (20, 100, 360, 1000, 2000)
# With a node count, each in a process of its own: what an executable leaves stays with the process.
MEASUREMENTS: tuple[tuple[str, tuple[int | None, ...]], ...] = (
    ("in_flight", (None,)),
    ("costs", NODES),
    ("memory", NODES),
    ("destroy", (None,)),
    ("keys", (1000,)),
)
KILL_SECONDS = 10
Row = dict[str, Any]


class StuckError(RuntimeError):
    """A process that does not end when it is killed: the GPU is lost, there is no going on."""


def find_nvcc() -> str:
    folders = [os.environ[name] for name in ("CUDA_HOME",) if name in os.environ]
    for place in (
        *(f"{folder}/bin/nvcc" for folder in folders),
        "nvcc",
        "/usr/local/cuda/bin/nvcc",
    ):
        found = shutil.which(place)
        if found:
            return found
    raise FileNotFoundError("no nvcc on the path; set CUDA_HOME")


def gpu_architecture() -> str:
    """Of the first GPU, as nvcc names it: sm_90."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader", "--id=0"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return "sm_" + answer.strip().replace(".", "")


def build(folder: Path, architecture: str) -> Path:
    """Compiles the sources beside each other; returns the program."""
    nvcc = find_nvcc()
    flags = [f"-arch={architecture}", "-std=c++17", "-O2"]

    def compile_one(source: Path) -> str:
        compiled = folder / (source.stem + ".o")
        command = [nvcc, *flags, "-Xcompiler", "-Wall", "-c", str(source), "-o", str(compiled)]
        subprocess.run(command, check=True)
        return str(compiled)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, SOURCES))
    program = folder / "graph_updates"
    subprocess.run([nvcc, *flags, *objects, "-lcuda", "-o", str(program)], check=True)
    return program


def run_program(program: Path, words: Sequence[str], limit: float) -> tuple[list[Row], str | None]:
    """The rows that the program printed, and what went wrong if something did.

    Raises:
        StuckError: the program ran longer than `limit` seconds and cannot be ended.
    """
    # Files, not pipes: what was printed before a hang can be read whether the process ends or not.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([str(program), *words], stdout=output, stderr=errors)
        trouble: str | None = None
        try:
            code = process.wait(limit)
            if code != 0:
                errors.seek(0)
                last_words = errors.read().strip().splitlines()[-1:]
                trouble = ": ".join([f"exit code {code}", *last_words])
        except subprocess.TimeoutExpired:
            trouble = f"no end in {limit:g} s"
            process.kill()
            try:
                process.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                raise StuckError(f"{' '.join(words)}: {trouble}, and it cannot be killed") from None
        output.seek(0)
        lines = output.read().splitlines()
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:  # cut off by the end of the process
            trouble = trouble or f"unreadable output: {line[:80]}"
    return rows, trouble


def run_case(program: Path, case: Row, limit: float) -> Row:
    """What the steps of a case found; "trouble" where the process ended before the last one."""
    found: Row = {**case, "trouble": None}
    name = [case["group"], case["name"]]
    steps, trouble = run_program(program, ["case", *name], limit)
    for step in steps:
        found.update(step)
    if trouble is None:
        return found
    found["trouble"] = trouble
    # The graphs alone, which the case did not come to.
    controls, _ = run_program(program, ["control", *name], limit)
    for step in controls:
        found.update({key: value for key, value in step.items() if key in ("a", "b")})
    return found


def judge(row: Row) -> str:
    """What a row says of an update from a to b."""
    if row["trouble"] is not None:
        where = row.get("at", "start")
        reason = row.get("error", row["trouble"])
        if where in ("opening the GPU", "building a", "first launch", "building b", "start"):
            return f"not tried: {reason} ({where})"
        return f"LOST at {where}: {reason}"
    if row["first"] != row["a"]:
        return f"NOT REPEATABLE: {row['first']}, then {row['a']}"
    if row["update"] != "SUCCESS":
        if row["parameters"] != "old":
            return f"refused, DAMAGED: parameters {row['parameters']}"
        return "refused" if row["after"] == row["a"] else f"refused, DAMAGED: {row['after']}"
    if row["parameters"] != "new":
        return f"WRONG: parameters {row['parameters']}"
    if row["a"] == row["b"]:
        if row["after"] != row["b"]:
            return f"WRONG: {row['after']}"
        # Of some attributes a kernel sees nothing.
        return "taken, effect not seen" if row["group"] == "launch attribute" else "carried"
    if row["after"] == row["b"]:
        return "carried"
    return "SILENTLY KEPT" if row["after"] == row["a"] else f"WRONG: {row['after']}"


def judge_back(row: Row) -> str:
    """What a row says of the second update, to a graph like the one that it began with."""
    if row["trouble"] is not None or "back_after" not in row:
        return ""
    if row["back"] != "SUCCESS":
        return f"refused: {row['back'].rpartition(', ')[2]}"
    if row["back_parameters"] != "new":
        return f"WRONG: parameters {row['back_parameters']}"
    if row["back_after"] == row["a"]:
        return "carried" if row["update"] == "SUCCESS" else "works"
    return "SILENTLY KEPT" if row["back_after"] == row["b"] else f"WRONG: {row['back_after']}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


def case_table(cases: Sequence[Row]) -> list[str]:
    head = ["a to b", "cuda.h", "update said", "seen of a", "of b", "after the update", "**found**"]
    head += ["a second update, to a", "told apart by"]
    return markdown(
        head,
        [
            [
                f"{row['group']}: {row['name']}",
                row["documented"],
                row.get("update", "").rpartition(", ")[2],
                *(row.get(key, "") for key in ("a", "b", "after")),
                f"**{judge(row)}**",
                judge_back(row),
                row.get("told_apart_by", ""),
            ]
            for row in cases
        ],
    )


def measurement_table(rows: Sequence[Row]) -> list[str]:
    """Its columns are named by the keys."""
    if not rows:
        return ["nothing was measured"]
    head = list(rows[0])
    titles = [key.removesuffix("_us").removesuffix("_kib").replace("_", " ") for key in head]
    for place, key in enumerate(head):
        if key.endswith("_us"):
            titles[place] += ", µs"
        elif key.endswith("_kib"):
            titles[place] += ", KiB"
    return markdown(titles, [[row.get(key, "") for key in head] for row in rows])


def measure(program: Path, name: str, counts: Sequence[int | None], limit: float) -> Row:
    rows: list[Row] = []
    troubles: list[str] = []
    for count in counts:
        words = ["measure", name] if count is None else ["measure", name, str(count)]
        found, trouble = run_program(program, words, limit)
        rows += [row for row in found if "error" not in row]
        if trouble is not None:
            said = [row["error"] for row in found if "error" in row]
            troubles.append(": ".join([" ".join(words), trouble, *said]))
    return {"rows": rows, "troubles": troubles}


def run_all(program: Path, only: str, limit: float, report: Row) -> None:
    """Fills in the report, so that all that was found is in it if this is cut short."""
    cases, trouble = run_program(program, ["list"], limit)
    if trouble is not None:
        raise RuntimeError(f"graph_updates list: {trouble}")
    chosen = [case for case in cases if only in f"{case['group']}: {case['name']}"]
    if not chosen:
        raise ValueError(f"no case's name holds {only!r}")
    for number, case in enumerate(chosen, 1):
        row = run_case(program, case, limit)
        row["found"] = judge(row)
        report["cases"].append(row)
        said = f"{number}/{len(chosen)} {case['group']}: {case['name']}: {row['found']}"
        print(said, file=sys.stderr, flush=True)
    for name, counts in MEASUREMENTS if not only else ():
        print(name, file=sys.stderr, flush=True)
        report["measured"][name] = measure(program, name, counts, 4 * limit)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORD", help="these cases, no measurements")
    parser.add_argument("--limit", type=positive, default=10, help="seconds for a case; default 10")
    parser.add_argument("--arch", metavar="sm_NN", help="default: that of the first GPU")
    parser.add_argument("--build-only", action="store_true", help="compile, run nothing")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON")
    options = parser.parse_args(argv)
    report: Row = {"gpu": None, "cuda_driver": None, "cases": [], "measured": {}}
    stuck = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            program = build(Path(folder), options.arch or gpu_architecture())
            if options.build_only:
                print("graph_updates: built")
                return 0
            found, trouble = run_program(program, ["device"], options.limit)
            if trouble is not None:
                raise RuntimeError(f"no usable GPU: {[*found, trouble]}")
            report.update(found[0])
            run_all(program, options.only, options.limit, report)
        except StuckError as error:
            stuck = str(error)
        except (OSError, RuntimeError, ValueError, subprocess.CalledProcessError) as error:
            print(f"graph_updates.py: {error}", file=sys.stderr)
            return 2
    print(f"Measured on one {report['gpu']}, CUDA {report['cuda_driver']} (driver).\n")
    print("\n".join(case_table(report["cases"])))
    troubles = [stuck] if stuck else []
    for name, measured in report["measured"].items():
        print(f"\n{name}:\n")
        print("\n".join(measurement_table(measured["rows"])))
        troubles += measured["troubles"]
    if options.output:
        write_report({**report, "troubles": troubles}, options.output)
    for said in troubles:
        print(f"graph_updates.py: {said}", file=sys.stderr)
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
