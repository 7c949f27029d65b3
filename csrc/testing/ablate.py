"""Takes the rules of prediction and placement out, one at a time, and measures what each is worth.

    python csrc/testing/ablate.py > docs/ablation.md
    python csrc/testing/ablate.py --only plan      # those whose name contains "plan"

A rule is an entry of rules.py: a text of the core, and what stands there when it is taken out. Each
build replays the recorded traces in 100 orders each. Exit code 2 if a rule's text is not there.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from altered_tree import ROOT, StaleError, build, copy_tree, planted, run
from mutants.mutant import Mutant
from rules import RULES

sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))
import trace_to_text
from _quality import Figures, read_quality

ORDERS = 100
HEAD = f"""\
# What each rule is worth

`csrc/testing/ablate.py` takes one rule of prediction or placement (`csrc/testing/rules.py`) out of
the core at a time and replays the recorded traces in {ORDERS} orders each (`cgp_quality`). The
mappings are those of one pool in the mean, and a capture pays 25 to 40 µs for each. Pools of less
than 64 MiB are left out.

| without the rule | | mappings | reserved ÷ minimum: mean | 99th percentile | worst |
|---|---|---|---|---|---|"""


def measure(work: Path, texts: Path, mutant: Mutant | None, jobs: int) -> Figures:
    """The figures of large pools, with the mutant in place. Raises StaleError."""
    if mutant is not None:
        with planted(mutant, work):
            return measure(work, texts, None, jobs)
    errors = build(work, "build", ["cgp_quality"], jobs)
    if errors:
        raise StaleError(f"does not compile\n{errors[-2000:]}")
    program = str(work / "build/csrc/testing/cgp_quality")
    _, output = run([program, "--orders", str(ORDERS), str(texts)], work, seconds=600)
    rows = read_quality(output)
    if "large" not in rows:
        raise StaleError(f"cgp_quality did not end: {output[-2000:]}")
    return rows["large"]


def measure_all(mutants: Sequence[Mutant], jobs: int) -> dict[str, Figures]:
    """By name; "" is the core as it is. Raises StaleError."""
    with tempfile.TemporaryDirectory(prefix="cgp-rules-") as directory:
        work = Path(directory)
        copy_tree(work)
        texts = work / "traces"
        trace_to_text.main(["--output", str(texts), str(ROOT / "tests/traces")])
        figures = {"": measure(work, texts, None, jobs)}
        for mutant in mutants:
            figures[mutant.name] = measure(work, texts, mutant, jobs)
            print(f"{mutant.name}: {figures[mutant.name]}", file=sys.stderr, flush=True)
    return figures


def row(name: str, what: str, figures: Figures, whole: Figures) -> str:
    more = f" ({figures.mappings / whole.mappings - 1:+.0%})" if name else ""
    return (
        f"| {name} | {what} | {figures.mappings:,.0f}{more} | {figures.mean:.4f} "
        f"| {figures.p99:.4f} | {figures.worst:.4f} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="part of a rule's name; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="for the build (default 2)")
    options = parser.parse_args()
    chosen = [r for r in RULES if not options.only or any(o in r.name for o in options.only)]
    try:
        figures = measure_all(chosen, options.jobs)
    except StaleError as error:
        print(error, file=sys.stderr)
        return 2
    print(HEAD)
    print(row("", "**all rules**", figures[""], figures[""]))
    for rule in chosen:
        print(row(rule.name, rule.what, figures[rule.name], figures[""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
