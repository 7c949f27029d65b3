"""Processes that measure side by side, one for each allocator, taking turns."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from _apart import WorkerError

T = TypeVar("T")
WORKER = Path(__file__).resolve().parent / "_worker.py"

# What makes PyTorch's own allocator one of these.
SETTINGS = {
    "expandable": "expandable_segments",
    "option": "graph_capture_record_stream_reuse",
}

# A round of replays takes about this long, so that the clock's and the scheduler's grain do not
# matter.
_ROUND_SECONDS = 0.05
_MAX_PASSES = 50


class Worker:
    """A process that measures under one allocator.

    Imports at once, and then waits for commands.

    Args:
        what: the kind of what it captures, and the names: see _worker.py.
        allocator: ``stock``, ``primed`` (stock, whose captures are asked to prime their pools),
            ``ours``, a key of :data:`SETTINGS`, or what bounds our executables.
        timeout: seconds that an answer may take.
    """

    def __init__(self, what: Sequence[str], allocator: str, timeout: float) -> None:
        self._timeout = timeout
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by wait()
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), allocator, *what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment_of(allocator),
            text=True,
        )

    def ask(self, command: str, **arguments: Any) -> Any:
        self.send(command, **arguments)
        return self.answer(command)

    def send(self, command: str, **arguments: Any) -> None:
        """Asks without waiting for the answer."""
        assert self._process.stdin
        # If it died, its last answer or its standard error says why.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()

    def answer(self, command: str) -> Any:
        """What it answers to the command that was sent."""
        assert self._process.stdout
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


def environment_of(allocator: str) -> dict[str, str]:
    """The environment of a process that measures this allocator."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    }
    if allocator in SETTINGS:
        # The old name: torch 2.11 reads both, and older releases this one alone.
        environment["PYTORCH_CUDA_ALLOC_CONF"] = f"{SETTINGS[allocator]}:True"
    return environment


class Team:
    """Workers side by side, one for each allocator, that end with the ``with``. One that fails is
    out; :attr:`errors` says why.
    """

    def __init__(self, what: Sequence[str], names: Sequence[str], timeout: float) -> None:
        self.names = tuple(names)
        self.errors: dict[str, str] = {}
        self._workers = {name: Worker(what, name, timeout) for name in names}

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.hang_up()
        for worker in self._workers.values():
            worker.wait()

    def ask(
        self, command: str, names: Sequence[str] | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Asks those that are still well, one at a time, so that none disturbs another's times;
        returns the answers by name.
        """
        return self._each(lambda worker: worker.ask(command, **arguments), names)

    def at_once(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Asks everybody something whose time does not count."""
        self._each(lambda worker: worker.send(command, **arguments))
        return self._each(lambda worker: worker.answer(command))

    def in_turn(self, rounds: int, command: str, **arguments: Any) -> dict[str, list[Any]]:
        """Asks everybody as often; returns the answers by name."""
        answers: dict[str, list[Any]] = {name: [] for name in self.names}
        for _, name in in_turn(rounds, self.names):
            for answer in self.ask(command, [name], **arguments).values():
                answers[name].append(answer)
        return answers

    def costs(self, order: Sequence[int], repeats: int, rounds: int) -> dict[str, dict[str, Any]]:
        """What captures in this order, as :class:`_measure.CaptureCost`, and
        replays take, by name.
        """
        captures = self.in_turn(repeats, "capture", order=order)
        replays = self.in_turn(rounds, "replay", times=self._replay_passes())

        def found(name: str) -> dict[str, Any]:
            seconds, driver, reserved = (
                [cost[figure] for cost in captures[name] if cost[figure] is not None]
                for figure in ("seconds", "driver_seconds", "reserved_bytes")
            )
            of_stock = [cost["seconds"] for cost in captures["stock"]]
            return {
                "reserved_bytes": max(reserved, default=None),
                "capture_seconds": median(seconds),
                "captures": len(seconds),
                "capture_vs_stock": median_ratio(seconds, of_stock),
                "driver_seconds": median(driver),
                "replay_seconds": median(replays[name]),
                "replay_rounds": len(replays[name]),
                "replay_vs_stock": median_ratio(replays[name], replays["stock"]),
            }

        return {name: found(name) for name in self.names}

    def _replay_passes(self) -> int:
        """How many replays make a round."""
        shortest: float = min(self.ask("replay", times=1).values(), default=_ROUND_SECONDS)
        return max(1, min(_MAX_PASSES, math.ceil(_ROUND_SECONDS / shortest)))

    def _each(
        self, call: Callable[[Worker], Any], names: Sequence[str] | None = None
    ) -> dict[str, Any]:
        answers = {}
        for name in self.names if names is None else names:
            if name in self.errors:
                continue
            try:
                answers[name] = call(self._workers[name])
            except WorkerError as error:
                self.errors[name] = str(error)
        return answers


def in_turn(rounds: int, compared: Sequence[T]) -> Iterator[tuple[int, T]]:
    """All that is compared, with the number of the round: each second one in the opposite order,
    since clocks and heat drift, and favour nobody.
    """
    for number in range(rounds):
        for one in compared[::-1] if number % 2 else compared:
            yield number, one


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def median_ratio(values: Sequence[float], stock: Sequence[float]) -> float | None:
    """Of times taken in turn: what drifts is alike in both of a pair."""
    return median([own / other for own, other in zip(values, stock, strict=False)])


def ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base
