"""Tables fit 80 columns, and lose nothing by it."""

from __future__ import annotations

from cudagraph_pool._table import format_table


def widths(table: str) -> int:
    return max(map(len, table.splitlines()))


def test_narrow_tables_are_as_wide_as_their_cells() -> None:
    assert format_table([["name", "n"], ["a", "10"], ["bcd ef", "1"]]) == (
        "name     n\n------  --\na       10\nbcd ef   1"
    )


def test_words_are_folded_first() -> None:
    words = " ".join(["word"] * 30)
    table = format_table([["name", "n"], [words, "1"], ["a", "2"]])
    assert widths(table) <= 80
    assert table.split().count("word") == 30
    assert [line.split()[-1] for line in table.splitlines()].count("1") == 1
    assert len(table.splitlines()) == 2 + 2 + 1


def test_then_columns_with_the_words_repeated() -> None:
    head = ["name", *(f"number_{n:02}" for n in range(20))]
    table = format_table([head, ["row", *map(str, range(100, 120))]])
    assert widths(table) <= 80
    parts = table.split("\n\n")
    assert len(parts) > 2
    assert all(part.splitlines()[2].split()[0] == "row" for part in parts)
    assert [cell for part in parts for cell in part.splitlines()[0].split()[1:]] == head[1:]
    assert [cell for part in parts for cell in part.splitlines()[2].split()[1:]] == [
        str(n) for n in range(100, 120)
    ]


def test_a_long_name_without_spaces_is_folded_too() -> None:
    table = format_table([["trace", "a"], ["x" * 200, "1"]])
    assert widths(table) <= 80
    assert table.count("x") == 200
