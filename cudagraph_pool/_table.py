"""Tables on a terminal: by rich where that is installed, else plain."""

from __future__ import annotations

import io
import shutil
from collections.abc import Collection, Sequence

_NARROW = 16  # a column of words is folded to no less


def format_table(
    rows: Sequence[Sequence[str]], left_columns: Collection[int] = (0,), width: int | None = None
) -> str:
    """Aligns rows of equal length, the first of which is the head.

    rich folds words where the terminal is too narrow. Numbers are never folded.

    Arguments:
        rows: The cells.
        left_columns: Numbers of the columns that hold words. The others hold numbers and are
            aligned right.
        width: Of the page. Default: the terminal's.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    try:
        return _rich(rows, widths, left_columns, width or shutil.get_terminal_size().columns)
    except ModuleNotFoundError:
        pass
    lines = [
        "  ".join(
            cell.ljust(width) if column in left_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (rows[0], ["-" * width for width in widths], *rows[1:])
    ]
    return "\n".join(lines)


def _rich(
    rows: Sequence[Sequence[str]], widths: Sequence[int], left_columns: Collection[int], page: int
) -> str:
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rule = Box("    \n    \n -  \n    \n    \n    \n    \n    \n", ascii=True)
    table = Table(box=rule, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    least = 2 * len(widths)
    for column, (head, width) in enumerate(zip(rows[0], widths, strict=True)):
        is_words = column in left_columns
        least += min(width, _NARROW) if is_words else width
        table.add_column(
            Text(head),
            justify="left" if is_words else "right",
            overflow="fold",
            no_wrap=not is_words,
            min_width=min(width, _NARROW) if is_words else width,
        )
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    text = io.StringIO()
    Console(file=text, width=max(least, page), color_system=None, legacy_windows=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))


def mib(size: int) -> str:
    """Bytes as a cell in MiB, with a decimal where there are few."""
    number = size / (1 << 20)
    return f"{number:,.0f}" if number >= 10 or number.is_integer() else f"{number:.1f}"


def mib_or_dash(size: int | None) -> str:
    """The same, of what may not be known."""
    return "-" if size is None else mib(size)
