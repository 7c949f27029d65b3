"""Judges what ``cudagraph-pool replay --placements`` wrote, from that file alone.

Shares no code with the allocator or with the package: it knows pages, blocks and addresses, and
nothing of how a block was found. Usable as a script::

    python tests/validate_placements.py FILE...
"""

from __future__ import annotations

import bisect
import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

GRANULE_BYTES = 512


class PlacementError(Exception):
    """A line breaks a rule."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise PlacementError(what)


class Intervals:
    """Half-open intervals, none of which overlap, each with its owner."""

    def __init__(self) -> None:
        self.held: list[tuple[int, int, int]] = []

    def add(self, start: int, end: int, owner: int) -> int | None:
        """Adds one; returns the owner of one that it would overlap instead, if there is such."""
        place = bisect.bisect(self.held, (start, end))
        for other_start, other_end, other in self.held[max(place - 1, 0) : place + 1]:
            if start < other_end and other_start < end:
                return other
        self.held.insert(place, (start, end, owner))
        return None

    def remove(self, start: int) -> None:
        place = bisect.bisect(self.held, (start,))
        assert self.held[place][0] == start
        del self.held[place]


@dataclass
class Verdict:
    """What a valid file says."""

    pages: int = 0
    blocks: int = 0
    stitched_blocks: int = 0  # in more than one piece
    shared_pages: int = 0  # that stand at more than one address
    reserved_bytes: int | None = None

    def __str__(self) -> str:
        return (
            f"{self.blocks} blocks ({self.stitched_blocks} of several pieces) in "
            f"{self.pages} pages ({self.shared_pages} at several addresses), "
            f"{self.reserved_bytes} bytes"
        )


class Validator:
    """Has a method for each kind of line; ``verdict`` is right once ``end`` was seen."""

    def __init__(self) -> None:
        self.page_bytes: dict[int, int] = {}
        self.contents: dict[int, Intervals] = {}  # of each page
        self.addresses = Intervals()
        self.live: dict[int, tuple[int, list[list[int]]]] = {}
        self.seen: set[int] = set()
        self.mapped: dict[int, int] = {}  # address of a page's first byte -> page
        self.verdict = Verdict()

    def page(self, page: int, bytes: int) -> None:
        require(page not in self.page_bytes, f"page {page} is made twice")
        require(bytes > 0 and bytes % GRANULE_BYTES == 0, f"{bytes} bytes are not granules")
        self.page_bytes[page] = bytes
        self.contents[page] = Intervals()
        self.verdict.pages += 1

    def alloc(self, id: int, bytes: int, va: int, pages: list[list[int]]) -> None:
        require(id not in self.seen, f"block {id} is allocated twice")
        require(bool(pages), f"block {id} has no pieces")
        for value in (bytes, va):
            require(value % GRANULE_BYTES == 0, f"block {id}: {value} is no granule's")
        total = sum(length for _, _, length in pages)
        require(total == bytes, f"block {id} holds {bytes} bytes, its pieces {total}")
        other = self.addresses.add(va, va + bytes, id)
        require(other is None, f"block {id} has addresses of live block {other}")
        self.seen.add(id)
        self.live[id] = va, pages
        for page, offset, length in pages:
            self.place(id, va, page, offset, length)
            va += length
        self.verdict.blocks += 1
        self.verdict.stitched_blocks += len(pages) > 1

    def place(self, id: int, va: int, page: int, offset: int, length: int) -> None:
        """A page is mapped whole and stays where it is mapped."""
        size = self.page_bytes.get(page, 0)
        inside = 0 <= offset < offset + length <= size
        require(inside, f"block {id}: [{offset}, {offset + length}) is not in page {page}")
        other = self.contents[page].add(offset, offset + length, id)
        require(other is None, f"block {id} shares bytes of page {page} with live block {other}")
        base = va - offset
        said = f"block {id}: page {page} would be at {base}"
        require(base >= 0 and base % size == 0, f"{said}, no multiple of its size")
        mapped = self.mapped.setdefault(base, page)
        require(mapped == page, f"{said}, where page {mapped} is mapped")

    def free(self, id: int) -> None:
        require(id in self.live, f"block {id} is freed, but is not live")
        va, pages = self.live.pop(id)
        self.addresses.remove(va)
        for page, offset, _ in pages:
            self.contents[page].remove(offset)

    def end(self, reserved_bytes: int) -> None:
        made = sum(self.page_bytes.values())
        require(reserved_bytes == made, f"reserved {reserved_bytes} bytes, but pages of {made}")
        self.verdict.shared_pages = sum(n > 1 for n in Counter(self.mapped.values()).values())
        self.verdict.reserved_bytes = reserved_bytes


def validate(lines: Iterable[str]) -> Verdict:
    """The verdict over a file's lines; raises :class:`PlacementError` at the first bad one."""
    validator = Validator()
    number = 0
    for number, line in enumerate(lines, 1):
        try:
            require(validator.verdict.reserved_bytes is None, "stands after the end")
            record = json.loads(line)
            getattr(validator, record.pop("op"))(**record)
        except (PlacementError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlacementError(f"line {number}: {error}") from error
    ended = validator.verdict.reserved_bytes is not None
    require(ended, f"line {number}: the file stops without an end")
    return validator.verdict


def main(paths: list[str]) -> int:
    failures = 0
    for path in paths:
        try:
            with Path(path).open() as file:
                print(f"{path}: valid: {validate(file)}")
        except PlacementError as error:
            print(f"{path}: INVALID: {error}")
            failures += 1
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
