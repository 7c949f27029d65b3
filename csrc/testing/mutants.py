"""Draws mutants by universalmutator, and says which proofs notice each.

    pip install universalmutator==1.14.1
    python csrc/testing/mutants.py --number 300 --seed 1 > mutants.tsv     # of the core
    python csrc/testing/mutants.py --folder exec

A mutant that the fuzzers do not notice is shown to every test. Lines are drawn evenly, nine of ten
in .cc files; what does not compile, or compiles to the same, is drawn again.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from universalmutator import mutator

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build/mutants"  # a copy of the sources, and their build
PROGRAMS = TREE / "build/csrc/testing"
RULES = ["universal.rules", "c_like.rules", "c.rules", "cpp.rules"]
FUZZERS = (  # as ctest runs them, but for fewer captures
    "--seed 1 --ops 60000",
    "--seed 1000001 --ops 60000 --numbers-only",
    "--seed 1 --ops 300000 --captures",
    "--seed 1 --ops 1000 --numbers-only --fail-each",
    "--seed 1 --ops 1000 --captures --fail-each",
)
Mutants = dict[tuple[Path, int], list[str]]


def run(*command: str | Path, seconds: float = 60) -> tuple[int, str]:
    """A run over its time counts as exit code 124."""
    try:
        done = subprocess.run([*map(str, command)], cwd=TREE, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired as over:
        return 124, (over.stdout or b"").decode(errors="replace")
    return done.returncode, done.stdout.decode(errors="replace")


def build(*targets: str) -> bool:
    return run("cmake", "--build", "build", "-j1", "-t", *targets, seconds=900)[0] == 0


def mutants_of(folder: str, suffix: str) -> Mutants:
    """By file and line, but of what only tests use: what may stand there instead."""
    found: Mutants = {}
    for path in sorted((TREE / "csrc" / folder).rglob("*" + suffix)):
        if re.search("_test|_benchmark|fake_|_fixture", path.name):
            continue
        lines = path.read_text().splitlines(keepends=True)
        with contextlib.redirect_stdout(sys.stderr):
            made = mutator.mutants_regexp(lines, RULES, ignorePatterns=[])
        for line, text, *_ in made:
            if not lines[line - 1].lstrip().startswith(("//", "#")):
                found.setdefault((path, line), []).append(text)
    return found


def draw(folder: str, seed: int) -> Iterator[tuple[Path, int, str]]:
    random.seed(seed)
    kinds = [mutants_of(folder, ".cc"), mutants_of(folder, ".h")]
    while True:
        mutants = kinds[random.random() < 0.1]
        place = random.choice(list(mutants))
        yield *place, random.choice(mutants[place])


def noticed_by(folder: str, suites: list[str]) -> list[str]:
    """The fuzzer, or else all tests that fail."""
    for options in FUZZERS if folder == "core" else ():
        if run(PROGRAMS / "cgp_fuzz", *options.split(), "--iterations", "99999")[0] != 0:
            return ["cgp_fuzz " + options]
    if not build("cgp_tests"):
        return ["cgp_tests does not compile"]
    failed: list[str] = []
    for suite in suites:
        crashed: list[str] = []
        while len(crashed) < 5:
            tests = f"--gtest_filter={suite}*-" + ":".join(crashed)
            code, output = run(PROGRAMS / "cgp_tests", tests)
            failed += set(re.findall(r"\[  FAILED  \] (\S+?\.\S+?),? ", output))
            started = re.findall(r"\[ RUN      \] (\S+)", output)
            if code in (0, 1) or not started:
                break
            crashed.append(started[-1])  # what comes behind it is tried without it
        failed += crashed
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="core", help="core, driver or exec")
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    shutil.rmtree(TREE / "csrc", ignore_errors=True)
    shutil.copytree(ROOT / "csrc", TREE / "csrc")
    for name in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, TREE)
    run("cmake", "-B", "build", "-G", "Ninja", "-DCMAKE_CXX_FLAGS_RELEASE=-O1",
        "-DCMAKE_UNITY_BUILD=OFF", "-DCGP_WARNINGS_AS_ERRORS=OFF")  # fmt: skip
    assert build("cgp_fuzz", "cgp_tests"), "the tree does not compile"
    judge = "cgp_fuzz" if options.folder == "core" else "cgp_tests"
    whole = (PROGRAMS / judge).read_bytes()
    _, listed = run(PROGRAMS / "cgp_tests", "--gtest_list_tests")
    suites = [line.split()[0] for line in listed.splitlines() if line.split()[0].endswith(".")]
    assert not noticed_by(options.folder, suites), "something fails without a mutant"
    tried = survived = 0
    for path, line, text in draw(options.folder, options.seed):
        if tried == options.number:
            break
        source = path.read_text()
        lines = source.splitlines(keepends=True)
        path.write_text("".join([*lines[: line - 1], text, *lines[line:]]))
        if build(judge) and (PROGRAMS / judge).read_bytes() != whole:
            seen = noticed_by(options.folder, suites)
            tried += 1
            survived += not seen
            place = f"{path.relative_to(TREE)}:{line}"
            print(place, text.strip(), " ".join(seen) or "NOBODY", sep="\t", flush=True)
        path.write_text(source)
    print(f"{tried} mutants, {survived} survived")


if __name__ == "__main__":
    main()
