"""Which size each step of a decode loop has."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

PERIODS = {"each step": 1, "every 10": 10, "every 100": 100}
SCHEDULES = (*PERIODS, "load")

# A server's requests live about this many steps; as many run at once on average as make a quarter
# of the largest size.
_MEAN_LENGTH = 200
_MEAN_SHARE = 0.25

# So many sizes stand in front of what is timed: as many as a bounded pool has executables here.
_HISTORY_SIZES = 16
# And each for as many of the steps that it had there: more would change nothing.
_HISTORY_STAY = 6


@dataclass(frozen=True, slots=True)
class Schedule:
    """Sizes, one for each step.

    ``before`` is not timed. It leaves the executables as a loop would that has gone on for long:
    the last distinct sizes that it would have run, in the order of their last use, each for the
    last steps of its last stay.
    """

    before: list[int]
    timed: list[int]

    @property
    def switches(self) -> int:
        """Steps whose size is not that of the step before."""
        sizes = [*self.before[-1:], *self.timed]
        return sum(own != last for last, own in itertools.pairwise(sizes))


def schedule(name: str, sizes: Sequence[int], steps: int, seed: int) -> Schedule:
    """One of :data:`SCHEDULES`; the same for the same seed in every process."""
    if name == "load":
        history = 10 * _MEAN_LENGTH
        drawn = load(sizes, history + steps, seed)
    else:
        history = 3 * _HISTORY_SIZES * PERIODS[name]
        drawn = every(sizes, PERIODS[name], history + steps, seed)
    return Schedule(_recent(drawn[:history], _HISTORY_SIZES), drawn[history:])


def steps_for(name: str, seconds: float, step_seconds: float) -> int:
    """How many steps last about ``seconds``, and have two whole periods at least."""
    period = PERIODS.get(name, 50)
    return -(-max(round(seconds / step_seconds), 2 * period) // period) * period


def every(sizes: Sequence[int], period: int, steps: int, seed: int) -> list[int]:
    """Every ``period`` steps another size, each as likely."""
    generator = random.Random(seed)
    drawn: list[int] = []
    size = generator.choice(sizes)
    for step in range(steps):
        if step and step % period == 0:
            size = generator.choice([other for other in sizes if other != size])
        drawn.append(size)
    return drawn


def load(sizes: Sequence[int], steps: int, seed: int) -> list[int]:
    """As a server's load draws them: at each step every running request may be its last and others
    may arrive; the size is the least that holds those that run.
    """
    generator = random.Random(seed)
    ordered = sorted(sizes)
    mean = ordered[-1] * _MEAN_SHARE
    running = round(mean)
    drawn: list[int] = []
    for _ in range(steps):
        drawn.append(next(size for size in ordered if size >= running))
        ended = sum(generator.random() < 1 / _MEAN_LENGTH for _ in range(running))
        arrived, wait = 0, generator.expovariate(mean / _MEAN_LENGTH)
        while wait < 1:
            arrived += 1
            wait += generator.expovariate(mean / _MEAN_LENGTH)
        running = min(max(running - ended + arrived, 1), ordered[-1])
    return drawn


def _recent(drawn: Sequence[int], count: int) -> list[int]:
    """The last stays of the last distinct sizes, the latest last."""
    latest: dict[int, int] = {}
    for size, stay in itertools.groupby(reversed(drawn)):
        latest.setdefault(size, len(list(stay)))
        if len(latest) == count:
            break
    return [
        size for size, stay in reversed(latest.items()) for _ in range(min(stay, _HISTORY_STAY))
    ]
