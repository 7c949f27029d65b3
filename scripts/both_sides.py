"""Runs a suite of tests on PyTorch's own allocator and on ours; says which tests end differently.

python scripts/both_sides.py test_cuda.py -k graph     # any arguments of pytest

The sides run one after the other, each in a process of its own. The exit code is 1 if a test ends
differently. PyTorch's own suites come with its sources, for instance with Debian's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

SIDES = {"native": [], "ours": ["-p", "cudagraph_pool.testing", "--cudagraph-pool"]}


def run(side: str, arguments: Sequence[str], report: Path) -> int:
    """pytest's exit code; the report is there unless the process came to a sudden end."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        *SIDES[side],
        f"--junitxml={report}",
        *arguments,
    ]
    return subprocess.run(command, check=False).returncode


def outcome(case: ET.Element) -> str:
    """``passed``, ``failed`` or ``skipped``."""
    found = {part.tag for part in case}
    if found & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in found else "passed"


def outcomes(report: Path) -> dict[str, str]:
    """How each test ended. One that fails when it is torn down is reported twice: it failed."""
    ended: dict[str, str] = {}
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if ended.get(name) != "failed":
            ended[name] = outcome(case)
    return ended


def differences(native: dict[str, str], ours: dict[str, str]) -> dict[str, tuple[str, str]]:
    """The tests that did not end alike; what one side has not run is ``missing`` there."""
    both = {
        name: (native.get(name, "missing"), ours.get(name, "missing"))
        for name in sorted(native.keys() | ours.keys())
    }
    return {name: sides for name, sides in both.items() if sides[0] != sides[1]}


def main(arguments: Sequence[str]) -> int:
    ended = {}
    with tempfile.TemporaryDirectory() as folder:
        for side in SIDES:
            report = Path(folder, f"{side}.xml")
            code = run(side, arguments, report)
            if not report.exists():
                print(f"both_sides.py: pytest wrote no report on {side}: exit code {code}")
                return 2
            ended[side] = outcomes(report)
    for side, tests in ended.items():
        print(f"{side}: {dict(sorted(Counter(tests.values()).items()))}")
    differing = differences(ended["native"], ended["ours"])
    for name, (native, ours) in differing.items():
        print(f"{name}: {native} on native, {ours} on ours")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
