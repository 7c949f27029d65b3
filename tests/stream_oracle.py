"""Judges where the tensors of a program lie, by plain reachability of all pairs; shares no code
with an allocator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import combinations

from stream_programs import Kind, Program

# Page, offset and length: bytes of physical memory.
Piece = tuple[int, int, int]


def taken_too_early(
    program: Program, pieces: Mapping[int, Iterable[Piece]]
) -> list[tuple[int, int]]:
    """Pairs of tensors that share a byte, though not all that touches the first is ordered before
    the second's first write.

    Args:
        program: what ran.
        pieces: of each tensor, where it lies.
    """
    before = _before_allocations(program)
    touching = _touching(program)
    return [
        (first, second)
        for first, second in sorted(sharing(pieces))
        if touching[first] & ~before[second]
    ]


def _before_allocations(program: Program) -> dict[int, int]:
    """Of each tensor, the nodes that are ordered before its first write, as bits."""
    behind = [0] * program.streams
    result = {}
    for number, op in enumerate(program.ops):
        if op.kind == Kind.WAIT:
            behind[op.stream] |= behind[op.other]
        elif op.is_node:
            if op.kind == Kind.ALLOC:
                result[op.tensor] = behind[op.stream]
            behind[op.stream] |= 1 << number
    return result


def _touching(program: Program) -> dict[int, int]:
    """Of each tensor, the nodes that write or read it, as bits."""
    result: dict[int, int] = defaultdict(int)
    for number, op in enumerate(program.ops):
        if op.kind in (Kind.ALLOC, Kind.READ):
            result[op.tensor] |= 1 << number
    return result


def sharing(pieces: Mapping[int, Iterable[Piece]]) -> set[tuple[int, int]]:
    """Pairs of tensors that share a byte, the one that is allocated first in front."""
    by_page: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for tensor, of in pieces.items():
        for page, offset, length in of:
            by_page[page].append((offset, offset + length, tensor))
    return {
        (min(a[2], b[2]), max(a[2], b[2]))
        for on_page in by_page.values()
        for a, b in combinations(on_page, 2)
        if a[2] != b[2] and a[0] < b[1] and b[0] < a[1]
    }
