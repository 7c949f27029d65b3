"""Draws mutants of the core by universalmutator, and says which proofs notice each.

    pip install universalmutator==1.14.1
    python csrc/testing/mutants.py --number 300 --seed 1 > mutants.tsv

A mutant that the fuzzers do not notice is shown to every test, suite by suite. Lines of the core
are drawn evenly, nine of ten in .cc files. What does not compile, or compiles to the same, is
drawn again. The exit code is 1 if a mutant survives.
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
RULES = ["universal.rules", "c_like.rules", "c.rules", "cpp.rules"]
FUZZERS = (  # as ctest runs them, but for fewer captures
    "--seed 1 --ops 60000",
    "--seed 1000001 --ops 60000 --numbers-only",
    "--seed 1 --ops 300000 --captures",
    "--seed 1 --ops 1000 --numbers-only --fail-each",
    "--seed 1 --ops 1000 --captures --fail-each",
)
Mutants = dict[tuple[Path, int], list[str]]  # by file and line: what it may say instead


def run(*command: str | Path, seconds: float = 60) -> tuple[int, str]:
    """A run over its time counts as exit code 124."""
    try:
        done = subprocess.run(
            [*map(str, command)], cwd=TREE, capture_output=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired as over:
        return 124, (over.stdout or b"").decode(errors="replace")
    return done.returncode, done.stdout + done.stderr


def build(*targets: str) -> bool:
    return run("cmake", "--build", "build", "-j1", "-t", *targets, seconds=900)[0] == 0


def program(name: str) -> Path:
    return TREE / "build/csrc/testing" / name


def mutants_of(suffix: str) -> Mutants:
    """Of all files of the core with this suffix, but of those that only tests use."""
    found: Mutants = {}
    for path in sorted((TREE / "csrc/core").rglob("*" + suffix)):
        if re.search("_test|_benchmark", path.name):
            continue
        lines = path.read_text().splitlines(keepends=True)
        with contextlib.redirect_stdout(sys.stderr):
            made = mutator.mutants_regexp(lines, RULES, ignorePatterns=[])
        for line, text, *_ in made:
            if not lines[line - 1].lstrip().startswith(("//", "#")):
                found.setdefault((path, line), []).append(text)
    return found


def draw(seed: int) -> Iterator[tuple[Path, int, str]]:
    random.seed(seed)
    kinds = [mutants_of(".cc"), mutants_of(".h")]
    drawn = set()
    while True:
        mutants = kinds[random.random() < 0.1]
        path, line = random.choice(list(mutants))
        one = path, line, random.choice(mutants[path, line])
        if one not in drawn:
            drawn.add(one)
            yield one


def noticed_by(suites: list[str]) -> list[str]:
    """The fuzzer, or else all tests that fail."""
    for options in FUZZERS:
        if run(program("cgp_fuzz"), *options.split(), "--iterations", "99999")[0] != 0:
            return ["cgp_fuzz " + options]
    if not build("cgp_tests"):
        return ["cgp_tests does not compile"]
    failed: list[str] = []
    for suite in suites:
        crashed: list[str] = []
        while len(crashed) < 5:
            tests = f"--gtest_filter={suite}*-" + ":".join(crashed)
            code, output = run(program("cgp_tests"), tests)
            if code == 0:
                break
            failed += set(re.findall(r"\[  FAILED  \] (\S+?\.\S+?),? ", output))
            started = re.findall(r"\[ RUN      \] (\S+)", output)
            if code == 1 or not started:
                break
            crashed.append(started[-1])  # what comes behind it is tried without it
        failed += crashed
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    shutil.rmtree(TREE / "csrc", ignore_errors=True)
    shutil.copytree(ROOT / "csrc", TREE / "csrc")
    for name in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, TREE)
    run("cmake", "-B", "build", "-G", "Ninja", "-DCMAKE_CXX_FLAGS_RELEASE=-O1",
        "-DCMAKE_UNITY_BUILD=OFF", "-DCGP_WARNINGS_AS_ERRORS=OFF")  # fmt: skip
    if not build("cgp_fuzz", "cgp_tests"):
        sys.exit("the tree does not compile")
    _, listed = run(program("cgp_tests"), "--gtest_list_tests")
    suites = [line.split()[0] for line in listed.splitlines() if line.strip().endswith(".")]
    whole = program("cgp_fuzz").read_bytes()
    if seen := noticed_by(suites):
        sys.exit(f"without a mutant: {seen}")
    tried = survived = 0
    for path, line, text in draw(options.seed):
        if tried == options.number:
            break
        source = path.read_text()
        lines = source.splitlines(keepends=True)
        path.write_text("".join([*lines[: line - 1], text, *lines[line:]]))
        if build("cgp_fuzz") and program("cgp_fuzz").read_bytes() != whole:
            seen = noticed_by(suites)
            tried += 1
            survived += not seen
            place = f"{path.relative_to(TREE)}:{line}"
            print(place, text.strip(), " ".join(seen) or "NOBODY", sep="\t", flush=True)
        path.write_text(source)
    print(f"{tried} mutants, {survived} survived")
    return survived > 0


if __name__ == "__main__":
    sys.exit(main())
