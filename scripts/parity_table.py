"""Prints what passes on PyTorch's own allocator and on ours, by topic, from pytest's XML reports.

pytest tests/gpu/parity --junitxml=parity.xml
python scripts/parity_table.py parity.xml
"""

from __future__ import annotations

import argparse
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

from both_sides import SIDES, outcome


def outcomes(report: Path) -> Counter[tuple[str, str, str]]:
    """How often each (topic, side, outcome) is in a report."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for case in ET.parse(report).iter("testcase"):
        topic = case.get("classname", "").rpartition(".")[2].removeprefix("test_")
        side = re.search(r"[\[-](native|ours)\b", case.get("name", ""))
        if side is None:
            continue
        counts[topic, side.group(1), outcome(case)] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", type=Path, nargs="+")
    counts: Counter[tuple[str, str, str]] = Counter()
    for report in parser.parse_args().reports:
        counts += outcomes(report)
    print("| topic | native: passed, failed, skipped | ours: passed, failed, skipped |")
    print("|---|---|---|")
    for topic in sorted({topic for topic, _, _ in counts}):
        cells = [
            ", ".join(str(counts[topic, side, ended]) for ended in ("passed", "failed", "skipped"))
            for side in SIDES
        ]
        print(f"| {topic.replace('_', ' ')} | {cells[0]} | {cells[1]} |")
    return 1 if any(ended == "failed" for _, _, ended in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
