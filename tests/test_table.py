"""Tables: by rich where it is installed, else plain; both lose nothing."""

from __future__ import annotations

import sys

import pytest

from cudagraph_pool._table import format_table, mib


@pytest.fixture(params=["rich", "plain"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kind = str(request.param)
    monkeypatch.setenv("COLUMNS", "60")
    if kind == "rich":
        pytest.importorskip("rich")
    else:
        for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "rich.box", None)
    return kind


def test_cells_stand_in_columns(kind: str) -> None:
    head, rule, *rows = format_table([["name", "n"], ["[b]", "10"], ["bcd ef", "1"]]).splitlines()
    assert set(rule) == {"-", " "}
    assert [head.split(), *(row.split() for row in rows)] == [
        *(["name", "n"], ["[b]", "10"], ["bcd", "ef", "1"])
    ]
    assert len({len(head), len(rule), *map(len, rows)}) == 1, "numbers end where the head does"


def test_a_terminal_that_is_too_narrow(kind: str) -> None:
    words, number = " ".join(["word"] * 30), "1,000,000"
    table = format_table([["name", *"abc"], [words, *[number] * 3], ["日本", *"123"]])
    assert table.split().count("word") == 30
    assert table.split().count(number) == 3, "numbers are not folded"
    if kind == "rich":
        assert max(map(len, table.splitlines())) <= 60
    wide = format_table([["name", *"abc"], [words, *[number] * 3]], width=1000)
    assert len(wide.splitlines()) == 3


def test_sizes() -> None:
    sizes = (0, 1 << 19, 3 << 19, 10 << 20, (10 << 20) + 1, 7 << 30)
    assert [mib(size) for size in sizes] == ["0", "0.5", "1.5", "10", "10", "7,168"]
