"""Faults that mutate.py plants, by what they break: an entry of a text file for each.

name folder/file: what goes wrong then      (the file is in csrc/)
-text that stands in the file exactly once: lines, or a part of one
+what is to stand there (without: nothing)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """`search` stands in csrc/`folder`/`file` once; `replacement` is put in its place."""

    name: str
    file: str
    what: str
    search: str
    replacement: str
    folder: str = "core"


def _read(path: Path) -> list[Mutant]:
    mutants = []
    for entry in path.read_text().rstrip().split("\n\n")[1:]:  # without the file's heading
        head, *lines = entry.splitlines()
        place, _, what = head.partition(": ")
        name, place = place.split()
        folder, _, file = place.partition("/")
        search, replacement = (
            "\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+"
        )
        mutants.append(Mutant(name, file, what, search, replacement, folder))
    return mutants


MUTANTS = [m for path in sorted(Path(__file__).parent.glob("*.txt")) for m in _read(path)]
