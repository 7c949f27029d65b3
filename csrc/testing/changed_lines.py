"""Mutants of the lines that a change touches, by universalmutator's rules for C++."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from altered_tree import ROOT, StaleError, run
from mutants import Mutant

RULES = ["universal.rules", "cpp.rules", "c_like.rules"]
# What only tests are made of.
LEFT_OUT = [":!*_test*", ":!*fake_*", ":!*_fixture*", ":!*_benchmark*", ":!*faults*"]


def git(*arguments: str) -> str:
    """Raises StaleError."""
    code, output = run(["git", *arguments], ROOT, seconds=60)
    if code != 0:
        raise StaleError(output)
    return output.strip()


def default_commit() -> str:
    """Where this branch left main; on main, the commit before."""
    base = git("merge-base", "HEAD", "main")
    return base if base != git("rev-parse", "HEAD") else "HEAD~1"


def changed_lines(commit: str, folders: Sequence[str]) -> dict[str, set[int]]:
    """Those of each C++ source in csrc/ that differ from `commit` in the working tree."""
    sources = [f"csrc/{folder}/*.{suffix}" for folder in folders for suffix in ("cc", "h")]
    diff = git("diff", "--unified=0", "--no-prefix", commit, "--", *sources, *LEFT_OUT)
    lines: dict[str, set[int]] = {}
    path = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ csrc/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            lines.setdefault(path, set()).update(range(first, first + count))
    return {path: numbers for path, numbers in lines.items() if numbers}


def mutants_of_changes(commit: str, folders: Sequence[str], seed: int) -> list[Mutant]:
    """All of them, in an order drawn by the seed; not all compile. Raises StaleError."""
    from universalmutator.mutator import mutants_regexp  # pip install -e '.[mutate]'

    made: dict[tuple[str, int, str], Mutant] = {}
    for path, numbers in changed_lines(commit or default_commit(), folders).items():
        folder, _, file = path.partition("/")
        source = (ROOT / "csrc" / path).read_text().splitlines(keepends=True)
        for number, text, *_ in mutants_regexp(
            source, RULES, ignorePatterns=[], ignoreStringOnly=True
        ):
            if number in numbers:
                mutated = "".join([*source[: number - 1], text, *source[number:]])
                what = " ".join(text.split())
                made[path, number, text] = Mutant(
                    f"{path}:{number}", file, what, "".join(source), mutated, folder
                )
    mutants = list(made.values())
    random.Random(seed).shuffle(mutants)
    return mutants
