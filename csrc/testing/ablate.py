"""Takes the rules of placement out, one at a time and two, and measures what each is worth.

    python csrc/testing/ablate.py > benchmarks/results/ablation.md
    python csrc/testing/ablate.py --only known         # those whose name contains "known"

`On("its name")` asks for a rule in the core; in cgp_ablation the environment takes it out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

# At the end: the package that is installed stands before the sources.
sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(sys.path[-1] + "/benchmarks")
sys.path.append(sys.path[-2] + "/tests/traces")
import generate
import one_way
import stream_programs
import trace_to_text
from _quality import read_quality

ROOT = Path(__file__).resolve().parents[2]
RULES = {
    "known-again": "what comes behind the same sizes as in an earlier scope goes where it lay then",
    "known-alike": "a block goes where one of as many pages lay in this scope",
    "ring": "what alternates with its like lies in a ring of its own",
    "slack": "a block may take a page more, unless much is wasted",
    "no-slack": "but not where a 40th of the most that ever lived is wasted",
    "large-handles": "new pages come in handles of a 56th of the pool and half the block at most",
    "partial": "a block begins in a partly used page once there are many of these",
    "extend-back": "a range is extended behind its end",
    "extend-front": "a range is extended before its start",
    "small-stitched": "a block below a page is stitched before a new page is made for it",
    "leases": "a stream gives no more leases to one that returned nothing while the pool grew",
    "made-ahead": "a pool that several streams grow is given up to a 128th of its pages ahead",
}
SEED = 5_301_000  # of programs that nothing was tuned on
LEAST = {"mean": 0.005, "mappings": 0.1, "unsettled": 0.1}  # the parts that are worth a rule
SETS = {  # options and row of cgp_quality
    "recorded": ("--orders 4", "large"),
    "models": ("--orders 4", "large"),
    "warm": ("--orders 4 --warm", "large"),
    "made up": ("", "large"),
    "hostile": ("--hostile", "large"),
    "streams": ("--streams", "all"),
    "one way": ("--one-way", "all"),
}
Cells = dict[str, float]  # by figure
HEAD = f"""\
# What each rule is worth

`csrc/testing/ablate.py` takes rules out of the core. The recorded traces and those of models
(`tests/traces/models`) are replayed as recorded, by key up and down, and shuffled; the latter also
behind warm-ups (*warm*). Programs of {SEED} and later seeds, which nothing was tuned on, are made
up: as they are written, *hostile*, of *streams*, and of streams of which one waits for another.
The table says of each set: mappings of a pool · reserved ÷ minimum in the mean · at worst. *Work*
is the basic blocks of the core that run for an operation. *Unsettled* are the traces of one stream
that still map when they are captured for the fourth time: with all dropped before, or one by one.
Pools of less than 64 MiB are left out, but not of several streams. In **bold** is what is worse
than with all rules by {LEAST["mean"]:.1%} of memory, or by {LEAST["mappings"]:.0%} of the rest.
"""
PAIRS = """
Two at once, where they are worth as much more or less than the sum of what each is worth alone.

| Without | with all rules, the sum → without both |
|---|---|"""


def write_traces(texts: Path, json: Path) -> None:
    generate.main(["--output", str(json), "--seeds", "8", "--first", str(SEED)])
    (json / "hostile").mkdir()
    for path in json.glob("*.json"):
        if path.stem.split("_")[0] in generate.HOSTILE:
            path.rename(json / "hostile" / path.name)
    traces = ROOT / "tests/traces"
    folders = (traces, traces / "models", traces / "models", json, json / "hostile")
    for name, folder in zip(SETS, folders, strict=False):
        trace_to_text.main(["--output", str(texts / name), str(folder)])
    stream_programs.main(["--output", str(texts / "streams"), "--seeds", str(SEED)])
    one_way.main(["--output", str(texts / "one way"), "--first", str(SEED), "--seeds", "2"])


def measure(texts: Path, rules: tuple[str, ...]) -> Cells:
    def run(options: str, *names: str) -> str:
        program = ROOT / "build/ablation/csrc/testing/cgp_ablation"
        command = [str(program), *options.split(), *(str(texts / name) for name in names)]
        without = {**os.environ, "CGP_WITHOUT": ",".join(rules)}
        done = subprocess.run(command, env=without, capture_output=True, text=True)
        if done.returncode not in (0, 1):  # 1: a bound is broken
            raise RuntimeError(f"{command}, without {rules}: {done.returncode}, {done.stderr}")
        return done.stdout

    found = {name: read_quality(run(options, name))[row] for name, (options, row) in SETS.items()}
    names = ("mappings", "mean", "worst")
    cells = {f"{s} {name}": float(getattr(found[s], name)) for s in SETS for name in names}
    cells["work"] = sum(figures.nanoseconds for figures in found.values()) / len(SETS)
    again = run("--repeat 6", "recorded", "models", "made up")
    return {**cells, "unsettled": again.count("BROKEN")}


def differs(figure: str, value: float, than: float) -> bool:
    return abs(value - than) >= LEAST.get(figure.split()[-1], float("inf")) * max(than, 1)


def show(figure: str, value: float) -> str:
    return f"{value:.4f}" if figure.endswith(("mean", "worst")) else f"{value:,.0f}"


def row_of(rule: str, cells: Cells, whole: Cells) -> str:
    bold = {f: "**" * (v > whole[f] and differs(f, v, whole[f])) for f, v in cells.items()}
    shown = [f"{bold[f]}{show(f, v)}{bold[f]}" for f, v in cells.items()]
    sets = [" · ".join(shown[i : i + 3]) for i in range(0, 3 * len(SETS), 3)]
    return f"| {' | '.join([rule, RULES.get(rule, '**all rules**'), *sets, *shown[-2:]])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="part of a rule's name; may be repeated")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time")
    options = parser.parse_args()
    chosen = [rule for rule in RULES if not options.only or any(o in rule for o in options.only)]
    taken = [rules for count in range(3) for rules in combinations(chosen, count)]
    subprocess.run(["cmake", "-B", "build/ablation"], cwd=ROOT, stdout=sys.stderr, check=True)
    make = ["cmake", "--build", "build/ablation", f"-j{options.jobs}", "-t", "cgp_ablation"]
    subprocess.run(make, cwd=ROOT, stdout=sys.stderr, check=True)
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(options.jobs) as pool:
        write_traces(texts := Path(directory), texts / "json")
        found = dict(zip(taken, pool.map(lambda r: measure(texts, r), taken), strict=True))
    whole = found[()]
    columns = ["Without", "the rule", *SETS, "work", "unsettled"]
    rows = [row_of("".join(r), cells, whole) for r, cells in found.items() if len(r) < 2]
    print(HEAD, f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows, PAIRS, sep="\n")
    for a, b in combinations(chosen, 2):
        sums = {f: found[a,][f] + found[b,][f] - v for f, v in whole.items()}
        both = found[a, b]
        odd = [f for f in both if differs(f, both[f], sums[f])]
        shown = [f"{f} {show(f, whole[f])}, {show(f, sums[f])} → {show(f, both[f])}" for f in odd]
        if shown:
            print(f"| {a}, {b} | {'; '.join(shown)} |")


if __name__ == "__main__":
    main()
