"""Mutants of the lines that a change touches, by universalmutator's rules for C++."""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from altered_tree import ROOT, StaleError, run
from mutants import Mutant

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
    """By file in csrc/, those that differ from `commit` in the working tree, but comments."""
    sources = [f"csrc/{folder}/*.{suffix}" for folder in folders for suffix in ("cc", "h")]
    diff = git("diff", "--unified=0", "--no-prefix", commit, "--", *sources, *LEFT_OUT)
    lines: dict[str, set[int]] = {}
    path, number = "", 0
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ csrc/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)", line):
            number = int(hunk[1])
        elif line.startswith("+"):
            if not line[1:].lstrip().startswith("//"):
                lines.setdefault(path, set()).add(number)
            number += 1
    return lines


def mutants_of_lines(path: str, numbers: set[int]) -> list[Mutant]:
    """All of them; not all compile. Raises StaleError."""
    source = ROOT / "csrc" / path
    folder, _, file = path.partition("/")
    text = source.read_text()
    lines = text.splitlines()
    made: dict[str, Mutant] = {}  # by text: rules may come to the same
    with tempfile.TemporaryDirectory(prefix="cgp-mutants-") as directory:
        (Path(directory) / "lines").write_text(" ".join(map(str, numbers)))
        command = ["mutate", str(source), "cpp", "--lines", "lines", "--noCheck"]
        code, output = run([*command, "--mutantDir", "."], Path(directory), seconds=60)
        if code != 0:
            raise StaleError(output)
        for mutated in sorted(Path(directory).glob("*.mutant.*")):
            new = mutated.read_text()
            number, what = next(
                (number, line.strip())
                for number, line in enumerate(new.splitlines(), 1)
                if lines[number - 1 : number] != [line]
            )
            made[new] = Mutant(f"{path}:{number}", file, what, text, new, folder)
    return list(made.values())


def mutants_of_changes(commit: str, folders: Sequence[str], seed: int) -> list[Mutant]:
    """In an order drawn by the seed. Raises StaleError."""
    changed = changed_lines(commit or default_commit(), folders)
    mutants = [m for path, numbers in changed.items() for m in mutants_of_lines(path, numbers)]
    random.Random(seed).shuffle(mutants)
    return mutants
