"""Tables on a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def format_table(rows: Sequence[Sequence[str]], left_columns: Collection[int] = (0,)) -> str:
    """Aligns rows of equal length, the first of which is the head.

    Args:
        rows: the cells.
        left_columns: numbers of the columns that hold words; the others hold numbers and are
            aligned right.
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index in left_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
