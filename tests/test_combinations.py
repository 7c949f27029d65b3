"""The verdicts of benchmarks/combinations.py, which itself needs GPUs."""

from __future__ import annotations

from typing import Any

from combinations import Combination, no_worse, works

EAGER = Combination("ddp", True, "eager", "stock")
STOCK = Combination("ddp", True, "step", "stock")
OURS = Combination("ddp", True, "step", "ours")


def row(*losses: float) -> dict[str, Any]:
    return {"losses": list(losses), "graph_pool_bytes": 3 << 20}


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
