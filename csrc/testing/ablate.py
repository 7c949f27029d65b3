"""Takes the rules of prediction and placement out, one at a time, and measures what each is worth.

    python csrc/testing/ablate.py > docs/ablation.md
    python csrc/testing/ablate.py --only plan      # those whose name contains "plan"

A rule is an entry of mutants/rules.txt: a text of the core, and what stands there without it. Each
build replays the recorded traces and the held-out models in 100 orders each, the latter warmed up
in the pool too, and the made-up and worst ones and programs of several streams in the order that
they come in. Exit code 2 if a rule's text is not there.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from altered_tree import ROOT, StaleError, build, copy_tree, planted, run
from mutants import RULES, Mutant

sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))
import stream_programs
import trace_to_text
from _quality import Figures, read_quality

ORDERS = 100
STREAM_SEEDS = "01234"
REPEATS = 4
HEAD = f"""\
# What each rule is worth

`csrc/testing/ablate.py` takes one rule of prediction or placement out of the core at a time
(`csrc/testing/mutants/rules.txt`). `cgp_quality` then replays the recorded traces and those of
models that nothing was tuned on (*held out*, `tests/traces/models`) in {ORDERS} orders each
(*warm*: each captured behind a warm-up in the pool), the made-up ones (25 families, 20 seeds)
and those of `tests/traces/worst` in their own, the 24 programs of several streams of
`benchmarks/stream_programs.py` with {len(STREAM_SEEDS)} seeds, and those of streams of which
one waits for another that does not wait for it (*one way*, `tests/traces/one_way.py`; *again*:
each captured {REPEATS} times in one pool).
The mappings are those of one pool in the mean, and a capture pays 25 to 40 µs for each. Pools of
less than 64 MiB are left out, but not of several streams, nor in the column *above the bound*:
how many of the made-up and worst traces take more than 1.01 of what the same pool takes without
prediction, and a page.

| without the rule | | mappings | reserved ÷ minimum: mean | 99th percentile | worst \
| held out: mappings | mean | worst | warm: mappings | mean | worst \
| made up: mean | worst | above the bound \
| several streams: mappings | mean | worst | one way: mean | worst | again: mean | worst |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Measured:
    """What one core takes: pools of 64 MiB and more, or of several streams, and how many traces are
    above their bound.
    """

    recorded: Figures
    held_out: Figures
    warm: Figures
    made_up: Figures
    above: int
    streams: Figures
    one_way: Figures
    again: Figures


def judge(work: Path, arguments: Sequence[str], row: str = "large") -> tuple[Figures, str]:
    """A row of figures, and all that was printed. Raises StaleError."""
    program = str(work / "build/csrc/testing/cgp_quality")
    _, output = run([program, *arguments], work, seconds=600)
    rows = read_quality(output)
    if row not in rows:
        raise StaleError(f"cgp_quality did not end: {output[-2000:]}")
    return rows[row], output


def measure(work: Path, texts: Path, mutant: Mutant | None, jobs: int) -> Measured:
    """With the mutant in place. Raises StaleError."""
    if mutant is not None:
        with planted(mutant, work):
            return measure(work, texts, None, jobs)
    errors = build(work, "build", ["cgp_quality"], jobs)
    if errors:
        raise StaleError(f"does not compile\n{errors[-2000:]}")
    recorded, _ = judge(work, ["--orders", str(ORDERS), str(texts / "recorded")])
    models = ["--held-out", "--orders", str(ORDERS), str(texts / "models")]
    held_out, _ = judge(work, models)
    warm, _ = judge(work, ["--warm", *models])
    made_up, output = judge(work, ["--plain", str(texts / "made_up"), str(texts / "worst")])
    above = len(re.findall("^BROKEN: .* pages", output, re.MULTILINE))
    streams, _ = judge(work, ["--streams", str(texts / "streams")], "all")
    one_way, _ = judge(work, ["--one-way", str(texts / "one_way")], "all")
    repeat = ["--repeat", str(REPEATS), "--one-way", str(texts / "one_way")]
    again, _ = judge(work, repeat, "all")
    return Measured(recorded, held_out, warm, made_up, above, streams, one_way, again)


def write_traces(texts: Path, json: Path) -> None:
    """The recorded traces, the models', the worst and the made-up ones as text, and programs of
    several streams.
    """
    traces = ROOT / "tests/traces"
    for script, folder in (("generate.py", json), ("one_way.py", texts / "one_way")):
        command = [sys.executable, str(traces / script), "--output", str(folder)]
        code, output = run(command, ROOT, seconds=600)
        if code != 0:
            raise StaleError(f"no traces were made up: {output[-2000:]}")
    folders = {"recorded": traces, "made_up": json}
    folders |= {name: traces / name for name in ("models", "worst")}
    for name, folder in folders.items():
        trace_to_text.main(["--output", str(texts / name), str(folder)])
    stream_programs.main(["--output", str(texts / "streams"), "--seeds", *STREAM_SEEDS])


def measure_all(mutants: Sequence[Mutant], jobs: int) -> dict[str, Measured]:
    """By name; "" is the core as it is. Raises StaleError."""
    with tempfile.TemporaryDirectory(prefix="cgp-rules-") as directory:
        work = Path(directory)
        copy_tree(work)
        texts = work / "traces"
        write_traces(texts, work / "json")
        figures = {"": measure(work, texts, None, jobs)}
        for mutant in mutants:
            figures[mutant.name] = measure(work, texts, mutant, jobs)
            print(f"{mutant.name}: {figures[mutant.name]}", file=sys.stderr, flush=True)
    return figures


def row(name: str, what: str, figures: Measured, whole: Measured) -> str:
    def mappings(is_: Figures, was: Figures) -> str:
        more = f" ({is_.mappings / was.mappings - 1:+.0%})" if name else ""
        return f"{is_.mappings:,.0f}{more}"

    recorded, held_out, warm = figures.recorded, figures.held_out, figures.warm
    made_up, streams = figures.made_up, figures.streams
    return (
        f"| {name} | {what} | {mappings(recorded, whole.recorded)} | {recorded.mean:.4f} "
        f"| {recorded.p99:.4f} | {recorded.worst:.4f} | {mappings(held_out, whole.held_out)} "
        f"| {held_out.mean:.4f} | {held_out.worst:.4f} | {mappings(warm, whole.warm)} "
        f"| {warm.mean:.4f} | {warm.worst:.4f} | {made_up.mean:.4f} | {made_up.worst:.4f} "
        f"| {figures.above} "
        f"| {mappings(streams, whole.streams)} | {streams.mean:.4f} | {streams.worst:.4f} "
        f"| {figures.one_way.mean:.4f} | {figures.one_way.worst:.4f} "
        f"| {figures.again.mean:.4f} | {figures.again.worst:.4f} |"
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
