"""Plants faults in the core and the adapter, one at a time, and expects the proofs to notice each.

    python csrc/testing/mutate.py                 # those of csrc/testing/mutants
    python csrc/testing/mutate.py --only fence    # those whose name contains "fence"
    python csrc/testing/mutate.py --changed       # of the lines that differ from main
    python csrc/testing/mutate.py --changed HEAD~1 --number 50 --seed 2

The latter are universalmutator's (pip install -e '.[mutate]'). The tree is copied, built and tried
without a fault first. Faults outside the core need a Python that has torch. Which proof noticed
which fault goes to build/mutants.tsv too. Exit code 1 if a mutant survives, 2 if one of
csrc/testing/mutants no longer applies.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from altered_tree import ROOT, StaleError, build, copy_tree, planted, run
from changed_lines import mutants_of_changes
from mutants import MUTANTS, Mutant

TIME_LIMIT_S = 240


@dataclass(frozen=True)
class Proofs:
    """What judges the mutants of a folder of csrc/."""

    build: str  # the folder of the build
    options: Sequence[str]  # for CMake
    commands: Sequence[str]  # with the programs' paths in it

    @property
    def programs(self) -> list[str]:
        return list(dict.fromkeys(command.split()[0] for command in self.commands))


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
BRIEFLY = "--gtest_brief=1 --gtest_fail_fast"
TESTS = f"csrc/testing/cgp_tests {BRIEFLY}"
FUZZ = "csrc/testing/cgp_fuzz --seed"
PROOFS = {
    "core": Proofs(
        "build",
        [],
        [
            TESTS,
            f"{FUZZ} 1 --ops 40000",
            f"{FUZZ} 1000001 --ops 40000 --numbers-only",
            f"{FUZZ} 1 --ops 300000 --captures",
            f"{FUZZ} 1 --ops 2000 --numbers-only --fail-each",
            f"{FUZZ} 1 --ops 2000 --captures --fail-each",
        ],
    ),
    "driver": Proofs("build-torch", WITH_TORCH, [TESTS]),
    "exec": Proofs("build-torch", WITH_TORCH, [TESTS]),
    "torch": Proofs(
        "build-torch",
        WITH_TORCH,
        [
            f"csrc/torch/cgp_torch_{tests} {BRIEFLY}"
            for tests in ("tests", "entry_tests", "base_tests", "pluggable_tests")
        ],
    ),
}


def build_proofs(proofs: Proofs, work: Path, jobs: int) -> str:
    """Returns a digest of the programs. Raises StaleError."""
    targets = [Path(program).name for program in proofs.programs]
    errors = build(work, proofs.build, targets, jobs, proofs.options)
    if errors:
        raise StaleError(f"does not compile\n{errors[-2000:]}")
    digest = hashlib.sha256()
    for program in proofs.programs:
        digest.update((work / proofs.build / program).read_bytes())
    return digest.hexdigest()


def first_failure(proofs: Proofs, work: Path) -> str:
    """The suite of the first test that fails, or the command that does; "" if all pass."""
    for command in proofs.commands:
        program, *options = command.split()
        code, output = run([str(work / proofs.build / program), *options], work, TIME_LIMIT_S)
        if code != 0:
            suite = re.search(r"\[  FAILED  \] (?:\w+/)?(\w+)\.", output)
            # A crash names none.
            return suite[1] if suite else f"{command}: exit code {code}"
    return ""


def choose(options: argparse.Namespace) -> list[Mutant]:
    """Raises StaleError where git fails."""
    folders = list(PROOFS)
    if torch_folder() is None:
        print(f"only the core's: {sys.executable} has no torch")
        folders = ["core"]
    if options.changed is None:
        mutants = [m for m in MUTANTS if m.folder in folders]
    else:
        mutants = mutants_of_changes(options.changed, folders, options.seed)
    return [m for m in mutants if not options.only or any(o in m.name for o in options.only)]


def try_all(chosen: Sequence[Mutant], options: argparse.Namespace, work: Path) -> int:
    """Prints what noticed each and returns the exit code. Raises StaleError if the tree fails."""
    copy_tree(work)
    whole = {}
    for folder in {mutant.folder for mutant in chosen}:
        whole[folder] = build_proofs(PROOFS[folder], work, options.jobs)
        if failed := first_failure(PROOFS[folder], work):
            raise StaleError(f"without a fault: {failed}")

    drawn = options.changed is not None
    matrix = ROOT / "build" / "mutants.tsv"
    matrix.parent.mkdir(exist_ok=True)
    tried, survivors, stale = 0, [], []
    with matrix.open("w", buffering=1) as rows:
        for mutant in chosen:
            if drawn and tried == options.number:
                break
            start = time.monotonic()
            try:
                with planted(mutant, work):
                    digest = build_proofs(PROOFS[mutant.folder], work, options.jobs)
                    if drawn and digest == whole[mutant.folder]:
                        continue  # the compiler sees no difference
                    seen = first_failure(PROOFS[mutant.folder], work)
            except StaleError as error:
                if not drawn:
                    print(f"{mutant.name}: {error}")
                    stale.append(mutant.name)
                continue
            tried += 1
            if not seen:
                survivors.append(mutant.name)
            row = f"{mutant.name}\t{mutant.what}\t{seen or 'NOBODY'}"
            rows.write(row + "\n")
            print(f"{row}\t{time.monotonic() - start:.0f} s", flush=True)
    print(f"{tried} mutants, {len(survivors)} survived: {', '.join(survivors) or 'none'}")
    return 2 if stale else 1 if survivors else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="part of a mutant's name; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--jobs", type=int, default=2, help="for the build (default 2)")
    parser.add_argument(
        "--changed",
        nargs="?",
        const="",
        metavar="COMMIT",
        help="mutate the lines that differ from COMMIT (default: where this branch left main, "
        "or HEAD~1) instead",
    )
    parser.add_argument("--number", type=int, default=20, help="with --changed (default 20)")
    parser.add_argument("--seed", type=int, default=1, help="draws these (default 1)")
    options = parser.parse_args()
    try:
        chosen = choose(options)
        if options.list:
            for mutant in chosen:
                print(f"{mutant.name:24} {mutant.folder}/{mutant.file:24} {mutant.what}")
            return 0
        with tempfile.TemporaryDirectory(prefix="cgp-mutants-") as directory:
            return try_all(chosen, options, Path(directory))
    except StaleError as error:
        print(error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
