"""Judges what ``cudagraph-pool replay --placements`` wrote, from that file alone.

Shares no code with the allocator or with the package: it knows pages, blocks and addresses, and
nothing of how a block was found. Usable as a script::

    python tests/validate_placements.py FILE...
"""

from __future__ import annotations

import bisect
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRANULE_BYTES = 512
Piece = tuple[int, int, int]  # page, offset and length

KEYS = {
    "page": {"op", "page", "bytes"},
    "alloc": {"op", "id", "bytes", "va", "pages"},
    "free": {"op", "id"},
    "end": {"op", "reserved_bytes"},
}


class PlacementError(Exception):
    """A line that breaks a rule."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(f"line {line}: {what}")


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
    reserved_bytes: int = 0

    def __str__(self) -> str:
        return (
            f"{self.blocks} blocks ({self.stitched_blocks} of several pieces) in "
            f"{self.pages} pages ({self.shared_pages} at several addresses), "
            f"{self.reserved_bytes} bytes"
        )


class Validator:
    """Reads one line after the other; ``verdict`` is right once ``end`` was seen."""

    def __init__(self) -> None:
        self.page_bytes: dict[int, int] = {}
        self.page_contents: dict[int, Intervals] = {}
        self.addresses = Intervals()
        self.live: dict[int, tuple[int, list[Piece]]] = {}
        self.seen: set[int] = set()
        self.mapped: dict[int, int] = {}  # address of a page's first byte -> page
        self.ended = False
        self.verdict = Verdict()
        self.line = 0

    def feed(self, text: str) -> None:
        self.line += 1
        self.require(not self.ended, "stands after the end")
        try:
            record = json.loads(text)
        except ValueError as error:
            raise PlacementError(self.line, f"not JSON: {error}") from None
        self.require(isinstance(record, dict), "not an object")
        op = record.get("op")
        self.require(op in KEYS, f"unknown op {op!r}")
        self.require(set(record) == KEYS[op], f"{op} has the keys {sorted(record)}")
        getattr(self, f"on_{op}")(record)

    def finish(self) -> Verdict:
        self.require(self.ended, "the file stops without an end")
        addresses: dict[int, int] = {}
        for page in self.mapped.values():
            addresses[page] = addresses.get(page, 0) + 1
        self.verdict.shared_pages = sum(count > 1 for count in addresses.values())
        return self.verdict

    def on_page(self, record: dict[str, Any]) -> None:
        page = self.natural(record["page"], "page")
        size = self.natural(record["bytes"], "bytes")
        self.require(page not in self.page_bytes, f"page {page} is made twice")
        self.require(
            size > 0 and size % GRANULE_BYTES == 0, f"page {page} of {size} bytes: not granules"
        )
        self.page_bytes[page] = size
        self.page_contents[page] = Intervals()
        self.verdict.pages += 1

    def on_alloc(self, record: dict[str, Any]) -> None:
        block = self.natural(record["id"], "id")
        size = self.natural(record["bytes"], "bytes")
        va = self.natural(record["va"], "va")
        self.require(block not in self.seen, f"block {block} is allocated twice")
        for value in (size, va):
            self.require(value % GRANULE_BYTES == 0, f"block {block}: {value} is no granule's")
        pieces = self.pieces(record["pages"], block)
        total = sum(length for _, _, length in pieces)
        self.require(total == size, f"block {block} holds {size} bytes, its pieces {total}")
        other = self.addresses.add(va, va + size, block)
        self.require(other is None, f"block {block} has addresses of live block {other}")
        self.place(block, va, pieces)
        self.seen.add(block)
        self.live[block] = va, pieces
        self.verdict.blocks += 1
        self.verdict.stitched_blocks += len(pieces) > 1

    def place(self, block: int, va: int, pieces: list[Piece]) -> None:
        for page, offset, length in pieces:
            other = self.page_contents[page].add(offset, offset + length, block)
            said = f"block {block} shares bytes of page {page} with live block {other}"
            self.require(other is None, said)
            # A page is mapped whole and stays where it is mapped.
            base = va - offset
            self.require(
                base >= 0 and base % self.page_bytes[page] == 0,
                f"block {block}: page {page} would be at {base}, no multiple of its size",
            )
            mapped = self.mapped.setdefault(base, page)
            self.require(
                mapped == page,
                f"block {block}: page {page} at {base}, where page {mapped} is mapped",
            )
            va += length

    def pieces(self, value: object, block: int) -> list[Piece]:
        self.require(isinstance(value, list) and bool(value), f"block {block} has no pieces")
        assert isinstance(value, list)
        result = []
        for piece in value:
            self.require(isinstance(piece, list) and len(piece) == 3, f"piece {piece!r}")
            page, offset, length = (self.natural(number, "piece") for number in piece)
            self.require(page in self.page_bytes, f"block {block}: page {page} was never made")
            self.require(length > 0, f"block {block}: an empty piece of page {page}")
            end = offset + length
            self.require(
                end <= self.page_bytes[page],
                f"block {block}: piece [{offset}, {end}) leaves page {page} of "
                f"{self.page_bytes[page]} bytes",
            )
            result.append((page, offset, length))
        return result

    def on_free(self, record: dict[str, Any]) -> None:
        block = self.natural(record["id"], "id")
        self.require(block in self.live, f"block {block} is freed, but is not live")
        va, pieces = self.live.pop(block)
        self.addresses.remove(va)
        for page, offset, _ in pieces:
            self.page_contents[page].remove(offset)

    def on_end(self, record: dict[str, Any]) -> None:
        reserved = self.natural(record["reserved_bytes"], "reserved_bytes")
        made = sum(self.page_bytes.values())
        self.require(reserved == made, f"reserved {reserved} bytes, but pages of {made} were made")
        self.verdict.reserved_bytes = reserved
        self.ended = True

    def natural(self, value: object, name: str) -> int:
        self.require(type(value) is int and value >= 0, f"{name} is {value!r}")
        assert isinstance(value, int)
        return value

    def require(self, condition: bool, what: str) -> None:
        if not condition:
            raise PlacementError(self.line, what)


def validate(lines: Iterable[str]) -> Verdict:
    """The verdict over a file's lines; raises :class:`PlacementError` at the first bad one."""
    validator = Validator()
    for line in lines:
        validator.feed(line)
    return validator.finish()


def main(paths: list[str]) -> int:
    failures = 0
    for path in paths:
        try:
            with Path(path).open() as file:
                print(f"{path}: valid: {validate(file)}")
        except PlacementError as error:
            print(f"{path}: INVALID: {error}")
            failures += 1
        except OSError as error:
            print(f"{path}: cannot be read: {error.strerror}", file=sys.stderr)
            return 2
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
