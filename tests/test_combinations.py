"""The verdicts of benchmarks/combinations.py, which itself needs GPUs."""

from __future__ import annotations

from typing import Any

from combinations import Combination, combinations, first_error, no_worse, table, works

EAGER = Combination("ddp", True, "eager", "stock")
STOCK = Combination("ddp", True, "step", "stock")
OURS = Combination("ddp", True, "step", "ours")


def row(*losses: float) -> dict[str, Any]:
    return {"losses": list(losses), "graph_pool_bytes": 3 << 20}


def test_each_has_an_eager_one_to_be_held_against() -> None:
    asked = combinations(["none", "ddp"], ["step", "runner"])
    assert len(set(asked)) == len(asked)
    assert all(c._replace(graphs="eager", allocator="stock") in asked for c in asked)
    runners = [c for c in asked if c.graphs == "runner"]
    assert {(c.parallel, c.allocator) for c in runners} == {("none", "ours")}


def test_it_works_if_the_losses_are_those_of_eager_training() -> None:
    eager = {EAGER: row(1.0, 0.5)}
    assert works({**eager, OURS: row(1.001, 0.5)}, OURS)
    assert not works({**eager, OURS: row(1.0, 0.51)}, OURS)
    assert not works({**eager, OURS: {"error": "no"}}, OURS)
    assert not works({EAGER: {"error": "no"}, OURS: row(1.0, 0.5)}, OURS)


def test_ours_has_to_work_where_stock_does() -> None:
    good, bad = row(1.0), {"error": "no"}
    for stock, ours, verdict in [(good, good, True), (good, bad, False), (bad, bad, True)]:
        found = {EAGER: good, STOCK: stock, OURS: ours}
        assert no_worse(found, OURS) == verdict
        assert no_worse(found, STOCK)
    runner = Combination("none", True, "runner", "ours")
    assert not no_worse(
        {runner._replace(graphs="eager", allocator="stock"): good, runner: bad}, runner
    )


def rows(found: dict[Combination, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**combination._asdict(), **of_it} for combination, of_it in found.items()]


def test_table() -> None:
    found = {EAGER: row(1.0), STOCK: {"error": "RuntimeError: no"}, OURS: row(1.0)}
    assert table(rows(found))[2:] == [
        "| ddp | yes | step | no (1) | 3 MiB |",
        "",
        "1. `RuntimeError: no`",
    ]


def test_graphs_that_were_not_made() -> None:
    found = {EAGER: row(1.0), OURS: {**row(1.0), "graph_pool_bytes": 0}}
    assert table(rows(found))[2:] == ["| ddp | yes | step |  | without graphs |"]


def test_the_first_error_is_named() -> None:
    said = "warning\n[rank0]: Traceback\n[rank0]: RuntimeError: capture\nChildFailedError: it\n"
    assert first_error(said) == "RuntimeError: capture"
    assert first_error("killed\n") == "killed"
    assert first_error("") == "nothing was said"
