"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`search` stands in csrc/`folder`/`file` once; the fault is to have `replacement` there."""

    name: str
    file: str
    what: str
    search: str
    replacement: str
    folder: str = "core"
