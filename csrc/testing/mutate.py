"""Plants faults in the core and the adapter, one at a time, and expects the proofs to notice each.

    python csrc/testing/mutate.py                 # those of csrc/testing/mutants
    python csrc/testing/mutate.py --only fence    # those whose name contains "fence"
    python csrc/testing/mutate.py --changed       # of the lines that differ from main
    python csrc/testing/mutate.py --changed HEAD~1 --number 50 --seed 2

The latter are universalmutator's (pip install -e '.[mutate]'). The tree is copied, built and tried
without a fault first. Faults outside the core need a Python that has torch. Exit code 1 if a
mutant survives, 2 if one of csrc/testing/mutants no longer applies.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from altered_tree import StaleError, build, copy_tree, planted, run
from changed_lines import mutants_of_changes
from mutants import MUTANTS, Mutant

TIME_LIMIT_S = 240
TORCH = importlib.util.find_spec("torch")

TESTS = "cgp_tests"
# What judges the mutants of a folder of csrc/: programs of csrc/testing or csrc/torch.
PROOFS = {
    "core": [
        TESTS,
        "cgp_fuzz --seed 1 --ops 40000",
        "cgp_fuzz --seed 1000001 --ops 40000 --numbers-only",
        "cgp_fuzz --seed 1 --ops 300000 --captures",
        "cgp_fuzz --seed 1 --ops 2000 --numbers-only --fail-each",
        "cgp_fuzz --seed 1 --ops 2000 --captures --fail-each",
    ],
    "driver": [TESTS],
    "exec": [TESTS],
    "torch": [
        "cgp_torch_tests",
        "cgp_torch_entry_tests",
        "cgp_torch_base_tests",
        "cgp_torch_pluggable_tests",
        "cgp_torch_fuzz --seed 11300 --iterations 200",
    ],
}


def folder_of_build(folder: str) -> str:
    """Of the proofs of a folder of csrc/: with torch come CUDA's headers."""
    return "build" if folder == "core" else "build-torch"


def build_proofs(folder: str, work: Path, jobs: int) -> dict[str, Path]:
    """The programs by their names. Raises StaleError."""
    names = list(dict.fromkeys(command.split()[0] for command in PROOFS[folder]))
    options = []
    if folder != "core":
        assert TORCH is not None
        assert TORCH.submodule_search_locations
        options = [
            "-DCGP_BUILD_PYTHON=ON",
            f"-DCGP_TORCH_DIR={TORCH.submodule_search_locations[0]}",
            f"-DPython_EXECUTABLE={sys.executable}",
        ]
    place = folder_of_build(folder)
    if errors := build(work, place, names, jobs, options):
        raise StaleError(f"does not compile\n{errors[-2000:]}")
    beside = work / place / "csrc" / ("torch" if folder == "torch" else "testing")
    return {name: beside / name for name in names}


def digest(programs: dict[str, Path]) -> str:
    return hashlib.sha256(b"".join(p.read_bytes() for p in programs.values())).hexdigest()


def first_failure(folder: str, programs: dict[str, Path], work: Path) -> str:
    """The suite of the first test that fails, or the command that does; "" if all pass."""
    for command in PROOFS[folder]:
        name, *options = command.split()
        if not options:
            options = ["--gtest_brief=1", "--gtest_fail_fast"]
        code, output = run([str(programs[name]), *options], work, TIME_LIMIT_S)
        if code != 0:
            suite = re.search(r"\[  FAILED  \] (?:\w+/)?(\w+)\.", output)
            # A crash names none.
            return suite[1] if suite else f"{command}: exit code {code}"
    return ""


def try_all(
    chosen: Sequence[Mutant], work: Path, jobs: int, drawn: bool, most: int
) -> tuple[int, int]:
    """Prints what noticed each; returns how many survived, and how many do not apply. Raises
    StaleError if the tree fails."""
    copy_tree(work)
    whole = {}
    for folder in {mutant.folder for mutant in chosen}:
        programs = build_proofs(folder, work, jobs)
        whole[folder] = digest(programs)
        if failed := first_failure(folder, programs, work):
            raise StaleError(f"without a fault: {failed}")
    tried, survived, stale = 0, 0, 0
    for mutant in chosen:
        if drawn and tried == most:
            break
        try:
            with planted(mutant, work):
                programs = build_proofs(mutant.folder, work, jobs)
                if drawn and digest(programs) == whole[mutant.folder]:
                    continue  # the compiler sees no difference
                seen = first_failure(mutant.folder, programs, work)
        except StaleError as error:
            if not drawn:
                print(f"{mutant.name}: {error}")
                stale += 1
            continue
        tried += 1
        survived += not seen
        print(f"{mutant.name}\t{mutant.what}\t{seen or 'NOBODY'}", flush=True)
    print(f"{tried} mutants, {survived} survived")
    return survived, stale


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="part of a mutant's name; may be repeated")
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
    folders = list(PROOFS) if TORCH else ["core"]
    if not TORCH:
        print(f"only the core's: {sys.executable} has no torch")
    drawn = options.changed is not None
    try:
        mutants = mutants_of_changes(options.changed, folders, options.seed) if drawn else MUTANTS
        chosen = [
            m
            for m in mutants
            if m.folder in folders and (not options.only or any(o in m.name for o in options.only))
        ]
        with tempfile.TemporaryDirectory(prefix="cgp-mutants-") as directory:
            survived, stale = try_all(chosen, Path(directory), options.jobs, drawn, options.number)
    except StaleError as error:
        print(error)
        return 2
    return 2 if stale else 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
