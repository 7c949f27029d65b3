"""How many product files one allocation in a capture runs through when nothing is mapped, by gcov.

    scripts/allocation_files.py [--torch-python PYTHON] [--most N]

Builds the adapter with fakes for CUDA and the base into build/coverage, runs
csrc/torch/testing/one_allocation.cc, and lists each file with its executed lines. A header and its
source are two files. Of csrc/torch/runtime.cc the fake stands in: one more. Fails above --most.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "coverage"
TARGET = "cgp_torch_one_allocation"


def build(python: str) -> None:
    ask = "import torch, pybind11; print(torch.__path__[0], pybind11.__path__[0])"
    torch, pybind11 = subprocess.check_output([python, "-c", ask], text=True).split()
    subprocess.check_call(
        [
            *("cmake", "-G", "Ninja", "-S", ROOT, "-B", BUILD, "-DCMAKE_BUILD_TYPE=Debug"),
            *("-DCMAKE_CXX_FLAGS=--coverage", "-DCGP_WARNINGS_AS_ERRORS=OFF"),
            *("-DCGP_BUILD_PYTHON=ON", f"-DPython_EXECUTABLE={python}", f"-DCGP_TORCH_DIR={torch}"),
        ],
        env={**os.environ, "PYTHONPATH": str(Path(pybind11).parent)},
        stdout=subprocess.DEVNULL,
    )
    subprocess.check_call(
        ["cmake", "--build", BUILD, "--target", TARGET], stdout=subprocess.DEVNULL
    )


def executed() -> dict[str, int]:
    """The product files that the one allocation ran through, each with how many of its lines."""
    for data in BUILD.rglob("*.gcda"):
        data.unlink()
    subprocess.check_call([BUILD / "csrc" / "torch" / TARGET])
    lines: dict[str, set[int]] = defaultdict(set)
    for data in BUILD.rglob("*.gcda"):
        report = subprocess.check_output(["gcov", "--json-format", "--stdout", data])
        for document in report.splitlines():
            told = json.loads(document)
            for file in told["files"]:
                # A compiler cache may have made the path relative.
                name = os.path.normpath(Path(told["current_working_directory"], file["file"]))
                lines[name] |= {line["line_number"] for line in file["lines"] if line["count"]}
    counts = {}
    for name, ran in lines.items():
        path = Path(name)
        if ran and path.is_relative_to(ROOT / "csrc") and "testing" not in path.parts:
            counts[str(path.relative_to(ROOT / "csrc"))] = len(ran)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--most", type=int, default=1000)
    arguments = parser.parse_args()
    build(arguments.torch_python)
    counts = executed()
    for name, ran in sorted(counts.items()):
        print(f"{ran:5} lines of {name}")
    by_folder: dict[str, int] = defaultdict(int)
    for name in counts:
        by_folder[name.partition("/")[0]] += 1
    concepts = len({name.rpartition(".")[0] for name in counts})
    print(f"{len(counts)} files ({concepts} without telling .h from .cc): {dict(by_folder)}")
    return int(len(counts) > arguments.most)


if __name__ == "__main__":
    sys.exit(main())
