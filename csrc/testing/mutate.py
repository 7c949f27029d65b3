"""Plants faults in the core and the adapter, one at a time, and expects the proofs to notice each.

    python csrc/testing/mutate.py                 # all of them, in a copy of the tree
    python csrc/testing/mutate.py --only fence    # those whose name contains "fence"
    python csrc/testing/mutate.py --list

A mutant is a file, a text that stands in it exactly once, and what to put in its place. The tree is
copied, built and tried without a fault first. Those outside the core need a Python that has torch.
Exit code 1 if a mutant survives, 2 if one no longer applies. See docs/mutants.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from altered_tree import StaleError, build, copy_tree, planted, run
from mutants import MUTANTS, Mutant

TIME_LIMIT_S = 240


@dataclass(frozen=True)
class Proofs:
    """What judges the mutants of a folder of csrc/."""

    build: str  # the folder of the build
    options: Sequence[str]  # for CMake
    tests: Sequence[str]  # the paths of the test programs in it
    fuzzer: str | None = None

    @property
    def targets(self) -> list[str]:
        programs = [*self.tests, *filter(None, [self.fuzzer])]
        return [Path(program).name for program in programs]


def torch_folder() -> str | None:
    """Of the torch package that this Python would import."""
    found = importlib.util.find_spec("torch")
    return (
        found.submodule_search_locations[0] if found and found.submodule_search_locations else None
    )


# With torch come CUDA's headers, without which what calls CUDA is left out.
WITH_TORCH = [
    "-DCGP_BUILD_PYTHON=ON",
    f"-DCGP_TORCH_DIR={torch_folder()}",
    f"-DPython_EXECUTABLE={sys.executable}",
]
PROOFS = {
    "core": Proofs("build", [], ["csrc/testing/cgp_tests"], "csrc/testing/cgp_fuzz"),
    "driver": Proofs("build-torch", WITH_TORCH, ["csrc/testing/cgp_tests"]),
    "exec": Proofs("build-torch", WITH_TORCH, ["csrc/testing/cgp_tests"]),
    "torch": Proofs(
        "build-torch",
        WITH_TORCH,
        [
            f"csrc/torch/cgp_torch_{tests}"
            for tests in ("tests", "entry_tests", "base_tests", "pluggable_tests")
        ],
    ),
}


@dataclass
class Verdict:
    """What the proofs made of one mutant."""

    mutant: Mutant
    caught_by: list[str] = field(default_factory=list)

    @property
    def caught(self) -> bool:
        return bool(self.caught_by)


def build_proofs(proofs: Proofs, work: Path, jobs: int) -> str:
    """Returns the output if that failed."""
    return build(work, proofs.build, proofs.targets, jobs, proofs.options)


def prove(proofs: Proofs, work: Path) -> list[str]:
    """Runs the proofs; returns the names of those that failed."""
    folder = work / proofs.build
    failed = []
    if proofs.fuzzer is not None:
        for name, options in (
            ("fuzz", ["--seed", "1", "--ops", "40000"]),
            ("fuzz (numbers)", ["--seed", "1000001", "--ops", "40000", "--numbers-only"]),
            ("fuzz (captures)", ["--seed", "1", "--ops", "300000", "--captures"]),
            ("fuzz (failing)", ["--seed", "1", "--ops", "2000", "--numbers-only", "--fail-each"]),
            (
                "fuzz (failing captures)",
                ["--seed", "1", "--ops", "2000", "--captures", "--fail-each"],
            ),
        ):
            code, _ = run([str(folder / proofs.fuzzer), *options], work, TIME_LIMIT_S)
            if code != 0:
                failed.append(name)
    for tests in proofs.tests:
        code, output = run([str(folder / tests), "--gtest_brief=1"], work, TIME_LIMIT_S)
        if code != 0:
            suites = re.findall(r"\[  FAILED  \] (?:\w+/)?(\w+)\.", output)
            # A crash ends the output before any summary.
            failed += sorted(set(suites)) or [f"tests (exit code {code})"]
    return failed


def try_mutant(mutant: Mutant, work: Path, jobs: int) -> Verdict:
    """Raises StaleError where the mutant no longer applies or no longer compiles."""
    proofs = PROOFS[mutant.folder]
    with planted(mutant, work):
        errors = build_proofs(proofs, work, jobs)
        if errors:
            raise StaleError(f"{mutant.name}: does not compile\n{errors[-2000:]}")
        return Verdict(mutant, prove(proofs, work))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="part of a mutant's name; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--jobs", type=int, default=2, help="for the build (default 2)")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.only or any(o in m.name for o in options.only)]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:32} {mutant.file:22} {mutant.what}")
        return 0
    if torch_folder() is None:
        left_out = sum(m.folder != "core" for m in chosen)
        chosen = [m for m in chosen if m.folder == "core"]
        if left_out:
            print(
                f"{left_out} mutants outside the core are left out: {sys.executable} has no torch"
            )

    stale = False
    survivors = []
    with tempfile.TemporaryDirectory(prefix="cgp-mutants-") as directory:
        work = Path(directory)
        copy_tree(work)
        for folder in sorted({mutant.folder for mutant in chosen}):
            errors = build_proofs(PROOFS[folder], work, options.jobs)
            failed = [] if errors else prove(PROOFS[folder], work)
            if errors or failed:
                print(f"without a fault: {errors[-2000:] or ', '.join(failed) + ' failed'}")
                return 2
        for mutant in chosen:
            start = time.monotonic()
            try:
                verdict = try_mutant(mutant, work, options.jobs)
            except StaleError as error:
                print(error)
                stale = True
                continue
            if not verdict.caught:
                survivors.append(mutant.name)
            seen = ", ".join(verdict.caught_by) or "NOBODY"
            print(f"| {mutant.name} | {mutant.what} | {seen} |", end=" ")
            print(f"{time.monotonic() - start:.0f} s", flush=True)
    print(f"{len(chosen)} mutants, {len(survivors)} survived: {', '.join(survivors) or 'none'}")
    return 2 if stale else 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
