"""The faults that mutate.py plants, by what they break: an entry of a text file for each.

name folder/file          the file is in csrc/
what goes wrong then
-text that stands in the file exactly once: lines, or a part of one
+what the fault has there (without: nothing)
"""

from __future__ import annotations

from pathlib import Path

from mutants.mutant import Mutant

__all__ = ["MUTANTS", "Mutant"]


def _read(entry: str) -> Mutant:
    head, what, *lines = entry.splitlines()
    name, path = head.split()
    folder, _, file = path.partition("/")
    search, replacement = (
        "\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+"
    )
    return Mutant(name, file, what, search, replacement, folder)


MUTANTS = [
    _read(entry)
    for path in sorted(Path(__file__).parent.glob("*.txt"))
    for entry in path.read_text().rstrip().split("\n\n")[1:]  # without the file's heading
]
