"""Takes the rules of placement out, one at a time or two, and measures what each is worth.

    python csrc/testing/ablate.py > docs/ablation.md
    python csrc/testing/ablate.py --only known         # those whose name contains "known"
    python csrc/testing/ablate.py --pairs              # each two of them too

A rule is an entry of mutants/rules.txt: a text of the core, and what stands there without it. Exit
code 2 if a rule's text is not there.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from altered_tree import ROOT, StaleError, build, copy_tree, planted, run
from mutants import RULES, Mutant

sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))
import stream_programs
import trace_to_text
from _quality import read_quality

SEED = 5_301_000  # of programs that nothing was tuned on
ROUNDS = 6
# Name, options, folder and row of cgp_quality.
SETS = (
    ("recorded", ["--orders", "12"], "recorded", "large"),
    ("models", ["--orders", "12"], "models", "large"),
    ("warm", ["--warm", "--orders", "4"], "models", "large"),
    ("made up", ["--hostile"], "made_up", "large"),
    ("streams", ["--streams"], "streams", "all"),
    ("one way", ["--one-way"], "one_way", "all"),
)
HEAD = f"""\
# What each rule is worth

`csrc/testing/ablate.py` takes rules of placement out of the core (`csrc/testing/mutants/rules.txt`).
`cgp_quality` then replays the recorded traces and those of models (`tests/traces/models`) in 12
orders, the latter in 4 behind warm-ups (*warm*), programs of {SEED} and later seeds that nothing was
tuned on (*made up*), and programs of several streams. Of each set it says the mappings of a pool and
reserved ÷ minimum in the mean; of all of them the nanoseconds of an operation, and how many traces
still map something from the fourth to the {ROUNDS}th time that they are captured in one pool.
Pools of less than 64 MiB are left out, but not of several streams.
"""


def measure(work: Path, texts: Path, mutants: Sequence[Mutant], jobs: int) -> list[str]:
    """The cells of a row, with the mutants in place. Raises StaleError."""
    with ExitStack() as stack:
        for mutant in mutants:
            stack.enter_context(planted(mutant, work))
        if errors := build(work, "build", ["cgp_quality"], jobs):
            raise StaleError(f"does not compile\n{errors[-2000:]}")
        program = str(work / "build/csrc/testing/cgp_quality")
        cells, times = [], []
        for _, options, folder, row in SETS:
            _, output = run([program, *options, str(texts / folder)], work, seconds=600)
            figures = read_quality(output).get(row)
            if figures is None:
                raise StaleError(f"cgp_quality did not end: {output[-2000:]}")
            cells += [f"{figures.mappings:,.0f}", f"{figures.mean:.4f}"]
            times.append(figures.nanoseconds)
        again = [str(texts / folder) for folder in ("recorded", "models", "made_up")]
        _, output = run([program, "--repeat", str(ROUNDS), *again], work, seconds=600)
        unsettled = len(re.findall("^BROKEN", output, re.MULTILINE))
    return [*cells, f"{sum(times) / len(times):.0f}", str(unsettled)]


def write_traces(texts: Path, json: Path) -> None:
    traces = ROOT / "tests/traces"
    for script, folder, options in (
        ("generate.py", json, ["--seeds", "8", "--first", str(SEED)]),
        ("one_way.py", texts / "one_way", []),
    ):
        command = [sys.executable, str(traces / script), "--output", str(folder), *options]
        code, output = run(command, ROOT, seconds=600)
        if code != 0:
            raise StaleError(f"no traces were made up: {output[-2000:]}")
    for name, folder in (("recorded", traces), ("models", traces / "models"), ("made_up", json)):
        trace_to_text.main(["--output", str(texts / name), str(folder)])
    stream_programs.main(["--output", str(texts / "streams"), "--seeds", "7", "8"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="part of a rule's name; may be repeated")
    parser.add_argument("--pairs", action="store_true", help="take out each two as well")
    parser.add_argument("--jobs", type=int, default=2, help="for the build (default 2)")
    options = parser.parse_args()
    chosen = [r for r in RULES if not options.only or any(o in r.name for o in options.only)]
    pairs = itertools.combinations(chosen, 2) if options.pairs else []
    columns = [f"{name}: mappings | mean" for name, *_ in SETS] + ["ns", "unsettled"]
    print(HEAD, f"| without the rule | | {' | '.join(columns)} |", sep="\n")
    print("|---" * (4 + 2 * len(SETS)) + "|", flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="cgp-rules-") as directory:
            work = Path(directory)
            copy_tree(work)
            write_traces(work / "traces", work / "json")
            for rules in [(), *((rule,) for rule in chosen), *pairs]:
                cells = measure(work, work / "traces", rules, options.jobs)
                name = ", ".join(rule.name for rule in rules)
                what = rules[0].what if len(rules) == 1 else "" if rules else "**all rules**"
                print(f"| {name} | {what} | {' | '.join(cells)} |", flush=True)
    except StaleError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
