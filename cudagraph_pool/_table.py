"""Tables on a terminal: by rich where that is installed, else plain."""

import io
import shutil
from collections.abc import Collection, Sequence

_NARROW = 16  # a column of words is folded to no less


def format_table(
    rows: Sequence[Sequence[str]], left_columns: Collection[int] = (0,), width: int | None = None
) -> str:
    """Aligns rows of equal length, the first of which is the head. Columns beside ``left_columns``
    hold numbers. rich folds words where the page, or the terminal, is narrower, and never numbers.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if column in left_columns else ">" for column in range(len(widths))]
    try:
        from rich.box import Box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:
        form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
        lines = (rows[0], ["-" * width for width in widths], *rows[1:])
        return "\n".join(form.format(*line).rstrip() for line in lines)
    rule = Box("    \n    \n -  \n    \n    \n    \n    \n    \n", ascii=True)
    table = Table(box=rule, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    needed = 2 * len(widths)
    for head, side, most in zip(rows[0], sides, widths, strict=True):
        least = min(most, _NARROW) if side == "<" else most
        fold = {"overflow": "fold", "no_wrap": side == ">", "min_width": least}
        table.add_column(Text(head), justify="left" if side == "<" else "right", **fold)
        needed += least
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    text = io.StringIO()
    page = max(needed, width or shutil.get_terminal_size().columns)
    Console(file=text, width=page, color_system=None, legacy_windows=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))


def mib(size: int | None) -> str:
    """Bytes as a cell in MiB, with a decimal where there are few."""
    if size is None:
        return "-"
    number = size / (1 << 20)
    return f"{number:,.0f}" if number >= 10 or number.is_integer() else f"{number:.1f}"
