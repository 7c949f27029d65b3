"""One row of the benchmark: a workload in one order, under several allocators side by side."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from typing import Any

from _team import Team, Worker, ratio, times

ORDERS = ("asc", "desc", "shuffled")


def order_keys(keys: Sequence[int], order: str, seed: int) -> list[int]:
    result = sorted(keys, reverse=order == "desc")
    if order == "shuffled":
        random.Random(seed).shuffle(result)
    return result


class Row:
    """Measures one workload in one order.

    A worker that fails is out; what it did not measure stays unset.
    """

    def __init__(
        self, workload: str, order: str, workers: dict[str, Worker], options: argparse.Namespace
    ) -> None:
        self._order = order
        self._team = Team(workers)
        self._options = options
        self._keys: list[int] = []
        self._minimum: int | None = None
        self._costs: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
        self._rounds: dict[str, list[float]] = {name: [] for name in workers}
        self._compared: dict[str, dict[str, Any]] = {}
        self._workload = workload

    def measure(self, timed: Callable[[], None]) -> list[dict[str, Any]]:
        """Returns one object for each allocator, stock's first.

        Args:
            timed: called once all times are taken; what it starts disturbs none of them.
        """
        for keys in self._team.all(lambda name, worker: worker.ask("prepare")).values():
            self._keys = order_keys(keys, self._order, self._options.seed)
        self._costs = self._team.in_turn(self._options.repeats, "capture", order=self._keys)
        passes = self._team.replay_passes()
        self._rounds = self._team.in_turn(self._options.rounds, "replay", times=passes)
        timed()
        self._compare()
        if "stock" in self._team:
            self._team.all(self._find_minimum, only="stock")
        return [self._result(name) for name in self._team.names]

    def _compare(self) -> None:
        """Stock first: where its graphs differ from eager, the others are held against its
        graphs.
        """
        order = order_keys(self._keys, "shuffled", self._options.seed + 1)
        request: dict[str, Any] = {"order": order, "seed": self._options.seed, "digests": []}

        def compare(name: str, worker: Worker) -> Any:
            return worker.ask("compare", **request)

        self._compared = self._team.all(compare, only="stock")
        for key, comparison in self._compared.get("stock", {}).items():
            if not comparison["equal"]:
                request["digests"].append(int(key))
        for name in self._team.names:
            if name != "stock":
                self._compared.update(self._team.all(compare, only=name))

    def _find_minimum(self, name: str, worker: Worker) -> None:
        self._minimum = worker.ask("minimum_bytes", order=self._keys)

    def _result(self, name: str) -> dict[str, Any]:
        costs = self._costs[name]
        reserved = max((cost["reserved_bytes"] for cost in costs), default=None)
        stock_costs = self._costs.get("stock", [])
        took = times(costs, stock_costs, self._rounds[name], self._rounds.get("stock", []))
        return {
            "workload": self._workload,
            "order": self._order,
            "allocator": name,
            "error": self._team.errors.get(name),
            "graphs": len(self._keys),
            "minimum_bytes": self._minimum,
            "reserved_bytes": reserved,
            "ratio": ratio(reserved, self._minimum),
            "device_bytes": max((cost["device_bytes"] for cost in costs), default=None),
            **took,
            "first_vs_stock": ratio(_first_seconds(costs), _first_seconds(stock_costs)),
            "driver_share": ratio(took["driver_seconds"], took["capture_seconds"]),
            "outputs": self._outputs(name),
        }

    def _outputs(self, name: str) -> dict[str, Any] | None:
        if name not in self._compared:
            return None
        return judge_outputs(
            self._compared[name], None if name == "stock" else self._compared.get("stock")
        )


def _first_seconds(costs: Sequence[dict[str, Any]]) -> float | None:
    return costs[0]["seconds"] if costs else None


def judge_outputs(
    compared: dict[str, dict[str, Any]], stock: dict[str, dict[str, Any]] | None
) -> dict[str, Any]:
    """Counts the sizes whose graphs are right.

    That is: equal to eager or, only where stock's graph is not either, to stock's graph.

    Args:
        compared: by size, what the worker found.
        stock: the same of stock PyTorch; None if ``compared`` is stock's own.
    """
    equal_to_eager, equal_to_stock = 0, 0
    unrepeatable: list[int] = []
    differ: list[int] = []
    for key, own in compared.items():
        if own["equal"]:
            equal_to_eager += 1
            continue
        other = stock[key] if stock else None
        if other and not other["equal"] and own["digest"] == other["digest"]:
            equal_to_stock += 1
        elif not own["repeatable"] and (other is None or not other["repeatable"]):
            unrepeatable.append(int(key))
        else:
            differ.append(int(key))
    return {
        "equal_to_eager": equal_to_eager,
        "equal_to_stock": equal_to_stock,
        "unrepeatable": unrepeatable,
        "differ": differ,
    }
