"""Tables on a terminal."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Collection, Sequence
from typing import Final

_NARROW: Final = 16  # of a column of words, at least
_GAP: Final = 2


def format_table(
    rows: Sequence[Sequence[str]], left_columns: Collection[int] = (0,), width: int = 80
) -> str:
    """Aligns rows of equal length, the first of which is the head.

    What is wider is folded: the words in their columns, or, where that is not enough, the columns,
    with the words that stand first repeated.

    Args:
        rows: the cells.
        left_columns: numbers of the columns that hold words; the others hold numbers and are
            aligned right.
        width: of the page.
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    narrow = _narrowed(widths, left_columns, width)
    fits = _total(narrow) <= width
    if not fits:
        narrow = [min(w, width // 3) if c in left_columns else w for c, w in enumerate(widths)]
    tables = []
    for columns in [list(range(len(widths)))] if fits else _groups(narrow, left_columns, width):
        lines = [_lines([row[c] for c in columns], columns, narrow, left_columns) for row in rows]
        lines.insert(1, [(_GAP * " ").join("-" * narrow[column] for column in columns)])
        tables.append("\n".join(itertools.chain.from_iterable(lines)))
    return "\n\n".join(tables)


def _narrowed(widths: Sequence[int], left_columns: Collection[int], width: int) -> list[int]:
    """With as much less for words as there is to be, if they can do with that."""
    narrow = list(widths)
    while _total(narrow) > width:
        widest = max(left_columns, key=lambda column: narrow[column])
        if narrow[widest] <= _NARROW:
            break
        narrow[widest] -= 1
    return narrow


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _groups(widths: Sequence[int], left_columns: Collection[int], width: int) -> list[list[int]]:
    """The columns that stand side by side."""
    groups: list[list[int]] = [[]]
    for column in range(len(widths)):
        if groups[-1] and _total([widths[c] for c in (*groups[-1], column)]) > width:
            groups.append([c for c in groups[0] if c in left_columns])
        groups[-1].append(column)
    return groups


def _lines(
    cells: Sequence[str],
    columns: Sequence[int],
    widths: Sequence[int],
    left_columns: Collection[int],
) -> list[str]:
    folded = [
        [cell]
        if len(cell) <= widths[column]
        else textwrap.wrap(cell, widths[column], break_on_hyphens=False)
        for cell, column in zip(cells, columns, strict=True)
    ]
    return [
        (_GAP * " ")
        .join(
            part.ljust(widths[column]) if column in left_columns else part.rjust(widths[column])
            for part, column in zip(parts, columns, strict=True)
        )
        .rstrip()
        for parts in itertools.zip_longest(*folded, fillvalue="")
    ]


def mib(size: int) -> str:
    """Bytes as a cell in MiB."""
    return f"{size / (1 << 20):,.0f}"
