"""What shared_execs.py measures of one workload, with several bounds side by side."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from _exec_schedules import SCHEDULES, schedule, steps_for
from _team import Team, median, median_ratio, ratio

BOUNDS = ("none", "1", "2", "4", "8", "16", "default", "budget")

# Which workloads each section measures; stock is always held against them.
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "memory": ("llama", "resnet50", "mlp", "seed", "deep"),
    "decode": ("llama", "deep"),
}
WORKLOADS = SECTIONS["memory"]


@dataclass(frozen=True, slots=True)
class Job:
    """One workload, and what is measured of it."""

    workload: str
    sections: tuple[str, ...]
    configs: tuple[str, ...]


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """One for each workload of which a chosen section measures something."""
    configs = ("stock", *(bound for bound in BOUNDS if bound in options.bounds))
    chosen = {name: measured for name, measured in SECTIONS.items() if name in options.sections}
    jobs = [
        Job(workload, tuple(name for name in chosen if workload in chosen[name]), configs)
        for workload in options.workloads
    ]
    return [job for job in jobs if job.sections]


@dataclass
class Found:
    """What was measured, by section; seconds that each section took; what failed."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    errors: list[dict[str, str]] = field(default_factory=list)

    @contextmanager
    def timed(self, section: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.seconds[section] = self.seconds.get(section, 0.0) + time.monotonic() - begin


class JobRun:
    """Measures the sections of one job with processes that have been started."""

    def __init__(self, job: Job, team: Team, options: argparse.Namespace, found: Found) -> None:
        self._job = job
        self._team = team
        self._options = options
        self._found = found
        self._keys: list[int] = []

    def measure(self) -> None:
        with self._found.timed("prepare"):
            for keys in self._team.at_once("prepare").values():
                self._keys = keys
        self._measure("memory", self._memory)
        self._measure("decode", self._decode)
        for config, error in self._team.errors.items():
            self._found.errors.append(
                {"workload": self._job.workload, "config": config, "error": error}
            )

    def _measure(self, section: str, measure: Callable[[], list[dict[str, Any]]]) -> None:
        if section in self._job.sections:
            with self._found.timed(section):
                if self._keys:
                    self._found.rows.setdefault(section, []).extend(measure())

    def _memory(self) -> list[dict[str, Any]]:
        answers = self._team.ask("memory", seed=self._options.seed)
        stock = answers.get("stock")
        stock_bytes = most_bytes(stock) if stock else None
        return [
            {
                "workload": self._job.workload,
                "config": config,
                "graphs": len(self._keys),
                "nodes": [pick(answer["nodes"].values()) for pick in (min, max)],
                "execs": answer["execs"],
                "instantiations": answer["exec_instantiations"],
                "updates": answer["exec_updates"],
                "driver_bytes": most_bytes(answer),
                "vs_stock": ratio(most_bytes(answer), stock_bytes),
            }
            for config, answer in answers.items()
        ]

    def _decode(self) -> list[dict[str, Any]]:
        step_seconds = self._step_seconds()
        if step_seconds is None:
            return []
        rows = []
        for read_back in (False, True):
            for name in SCHEDULES:
                steps = steps_for(name, self._options.seconds, step_seconds)
                drawn = schedule(name, self._keys, steps, self._options.seed)
                answers = self._team.in_turn(
                    self._options.rounds,
                    "decode",
                    before=drawn.before,
                    timed=drawn.timed,
                    read_back=read_back,
                )
                stock = answers.get("stock", [])
                rows.append(
                    {
                        "workload": self._job.workload,
                        "schedule": name,
                        "read_back": read_back,
                        "steps": len(drawn.timed),
                        "switches": drawn.switches,
                        "sizes": len(set(drawn.timed)),
                        "configs": {
                            config: {
                                "loops": len(seconds),
                                "steps_per_second": ratio(len(drawn.timed), median(seconds)),
                                "vs_stock": median_ratio(stock, seconds),
                            }
                            for config, seconds in answers.items()
                        },
                    }
                )
        return rows

    def _step_seconds(self) -> float | None:
        """Of the sizes in turn, once all of them have run."""
        seconds = None
        for _ in range(2):
            answers = self._team.ask("decode", before=[], timed=self._keys, read_back=False)
            seconds = answers.get("stock")
        return None if seconds is None else seconds / len(self._keys)


def most_bytes(answer: Mapping[str, Any]) -> int:
    """What the driver kept at its most."""
    return int(max(answer["driver_bytes"].values()))
