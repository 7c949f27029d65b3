"""A copy of the sources, in which one text at a time is replaced by another, and which is built."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mutants import Mutant

ROOT = Path(__file__).resolve().parents[2]


class StaleError(Exception):
    """A text does not stand in its file exactly once, or the tree does not compile with another in
    its place."""


def run(command: Sequence[str], cwd: Path, seconds: int) -> tuple[int, str]:
    """Runs `command`; a run over the time limit counts as exit code 124."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return 124, ""
    return done.returncode, done.stdout + done.stderr


def copy_tree(work: Path) -> None:
    """Copies what the builds and their proofs need."""
    for name in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copy2(ROOT / name, work / name)
    shutil.copytree(ROOT / "csrc", work / "csrc", dirs_exist_ok=True)


def build(
    work: Path, folder: str, targets: Sequence[str], jobs: int, options: Sequence[str] = ()
) -> str:
    """Builds the targets; returns the output if that failed."""
    seconds = 240
    if not (work / folder / "CMakeCache.txt").exists():
        command = ["cmake", "-S", str(work), "-B", str(work / folder)]
        command += ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]
        code, output = run([*command, "-DCGP_WARNINGS_AS_ERRORS=OFF", *options], work, seconds)
        if code != 0:
            return output
    for _ in range(3):  # a build over the time limit goes on where it stopped
        code, output = run(["cmake", "--build", folder, f"-j{jobs}", "-t", *targets], work, seconds)
        if code != 124:
            break
    return "" if code == 0 else output or "the build is over the time limit"


@contextmanager
def planted(mutant: Mutant, work: Path) -> Iterator[None]:
    """Puts the mutant's text in place for as long as the block lasts."""
    path = work / "csrc" / mutant.folder / mutant.file
    text = path.read_text()
    if text.count(mutant.search) != 1:
        raise StaleError(
            f"{mutant.name}: its text stands {text.count(mutant.search)} times in {mutant.file}"
        )
    path.write_text(text.replace(mutant.search, mutant.replacement))
    try:
        yield
    finally:
        path.write_text(text)
