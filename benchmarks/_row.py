"""One row of the benchmark: a workload in one order, under several allocators side by side."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ALLOCATORS = ("stock", "expandable", "ours")
ORDERS = ("asc", "desc", "shuffled")

WORKER = Path(__file__).resolve().parent / "_worker.py"

# A round of replays takes about this long, so that the clock's and the scheduler's grain do not
# matter.
_ROUND_SECONDS = 0.05
_MAX_PASSES = 50


class WorkerError(Exception):
    """A worker failed, died or did not answer in time."""


class Worker:
    """A process that measures one workload under one allocator.

    Imports at once, and then waits for commands.
    """

    def __init__(self, workload: str, allocator: str, timeout: float) -> None:
        self._timeout = timeout
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by wait()
        self._process = subprocess.Popen(
            [
                sys.executable,
                str(WORKER),
                "--workload",
                workload,
                "--allocator",
                allocator,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(allocator),
            text=True,
        )

    def ask(self, command: str, **arguments: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        # If it died, its last answer or its standard error says why.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], self._timeout)
        if not ready:
            self._process.kill()
            raise WorkerError(f"{command}: no answer in {self._timeout:.0f} s; killed")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise WorkerError(
                f"{command}: the process ended with code {code}: {self._last_words()}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{command}: {answer['error']}")
        return answer["result"]

    def hang_up(self) -> None:
        """Lets the process end; does not wait for it."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def wait(self) -> None:
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()
        self._errors.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return " | ".join(lines[-3:]) or "it printed nothing"


def _environment(allocator: str) -> dict[str, str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    }
    if allocator == "expandable":
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return environment


@dataclass(frozen=True, slots=True)
class Plan:
    """How often to measure.

    ``seed`` is that of the shuffled order, the inputs and the order of the comparison.
    """

    repeats: int
    rounds: int
    seed: int


def order_keys(keys: Sequence[int], order: str, seed: int) -> list[int]:
    result = sorted(keys, reverse=order == "desc")
    if order == "shuffled":
        random.Random(seed).shuffle(result)
    return result


class Row:
    """Measures one workload in one order.

    A worker that fails is out; what it did not measure stays unset.
    """

    def __init__(self, workload: str, order: str, workers: dict[str, Worker], plan: Plan) -> None:
        self._order = order
        self._workers = workers
        self._alive = dict(workers)
        self._plan = plan
        self._keys: list[int] = []
        self._minimum: int | None = None
        self._costs: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
        self._rounds: dict[str, list[float]] = {name: [] for name in workers}
        self._each: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
        self._compared: dict[str, dict[str, Any]] = {}
        self._errors: dict[str, str] = {}
        self._workload = workload

    def measure(self, timed: Callable[[], None]) -> list[dict[str, Any]]:
        """Returns one object for each allocator, stock's first.

        Args:
            timed: called once all times are taken; what it starts disturbs none of them.
        """
        for keys in self._all(lambda name, worker: worker.ask("prepare")).values():
            self._keys = order_keys(keys, self._order, self._plan.seed)
        # One at a time from here on, so that none disturbs another's times.
        for number in range(self._plan.repeats):
            for name, cost in self._all(
                lambda name, worker: worker.ask("capture", order=self._keys),
                backwards=number % 2 == 1,
            ).items():
                self._costs[name].append(cost)
        self._replay()
        timed()
        self._compare()
        if "stock" in self._alive:
            self._all(self._find_minimum, only="stock")
        return [self._result(name) for name in self._workers]

    def _all(
        self, call: Callable[[str, Worker], Any], only: str | None = None, backwards: bool = False
    ) -> dict[str, Any]:
        """Calls every worker that is still well; returns the answers by name."""
        answers = {}
        names = [only] if only else list(self._alive)
        for name in reversed(names) if backwards else names:
            if name not in self._alive:
                continue
            try:
                answers[name] = call(name, self._alive[name])
            except WorkerError as error:
                self._errors[name] = str(error)
                del self._alive[name]
        return answers

    def _replay(self) -> None:
        """Rounds in turn, each second one in the opposite order: clocks and heat drift, and
        favour nobody.
        """
        first = self._all(lambda name, worker: worker.ask("replay", times=1))
        if not first:
            return
        passes = max(1, min(_MAX_PASSES, math.ceil(_ROUND_SECONDS / min(first.values()))))
        for number in range(self._plan.rounds):
            answers = self._all(
                lambda name, worker: worker.ask("replay", times=passes), backwards=number % 2 == 1
            )
            for name, seconds in answers.items():
                self._rounds[name].append(seconds)
            for name, each in self._all(lambda name, worker: worker.ask("replay_each")).items():
                self._each[name].append(each)

    def _compare(self) -> None:
        """Stock first: where its graphs differ from eager, the others are held against its
        graphs.
        """
        order = order_keys(self._keys, "shuffled", self._plan.seed + 1)
        request: dict[str, Any] = {"order": order, "seed": self._plan.seed, "digests": []}

        def compare(name: str, worker: Worker) -> Any:
            return worker.ask("compare", **request)

        self._compared = self._all(compare, only="stock")
        for key, comparison in self._compared.get("stock", {}).items():
            if not comparison["equal"]:
                request["digests"].append(int(key))
        for name in self._workers:
            if name != "stock":
                self._compared.update(self._all(compare, only=name))

    def _find_minimum(self, name: str, worker: Worker) -> None:
        self._minimum = worker.ask("minimum", order=self._keys)

    def _result(self, name: str) -> dict[str, Any]:
        costs = self._costs[name]
        reserved = max((cost["reserved_bytes"] for cost in costs), default=None)
        captured = _median([cost["seconds"] for cost in costs])
        driver = _median([c["driver_seconds"] for c in costs if c["driver_seconds"] is not None])
        stock_costs = self._costs.get("stock", [])
        return {
            "workload": self._workload,
            "order": self._order,
            "allocator": name,
            "error": self._errors.get(name),
            "graphs": len(self._keys),
            "minimum_bytes": self._minimum,
            "reserved_bytes": reserved,
            "ratio": _ratio(reserved, self._minimum),
            "device_bytes": [cost["device_bytes"] for cost in costs],
            "capture_seconds": captured,
            "capture_seconds_all": [cost["seconds"] for cost in costs],
            "capture_vs_stock": _median_ratio(
                [cost["seconds"] for cost in costs], [cost["seconds"] for cost in stock_costs]
            ),
            "driver_seconds": driver,
            "driver_share": _ratio(driver, captured),
            "replay_seconds": _median(self._rounds[name]),
            "replay_seconds_all": self._rounds[name],
            "replay_vs_stock": _median_ratio(self._rounds[name], self._rounds.get("stock", [])),
            "replay_seconds_each": {
                str(key): _median([each[str(key)] for each in self._each[name]])
                for key in self._keys
                if self._each[name]
            },
            "outputs": self._outputs(name),
        }

    def _outputs(self, name: str) -> dict[str, Any] | None:
        if name not in self._compared:
            return None
        return judge_outputs(
            self._compared[name], None if name == "stock" else self._compared.get("stock")
        )


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


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _median_ratio(values: Sequence[float], stock: Sequence[float]) -> float | None:
    """Of times taken in turn: what drifts is alike in both of a pair."""
    return _median([own / other for own, other in zip(values, stock, strict=False)])


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base
