"""What shared_execs.py measures of one workload, with several bounds side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _exec_schedules import SCHEDULES, schedule, steps_for
from _team import Team, Worker, median, median_ratio, ratio

WORKER = Path(__file__).resolve().parent / "_exec_worker.py"

BOUNDS = ("none", "1", "2", "4", "8", "16", "default", "budget")
CHAINS = ("chain20", "chain100", "chain360", "chain1000", "chain2000")

# Which workloads each section measures, and with which bounds; stock is always among them, except
# where the driver's bare calls are what ours are held against.
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "memory": ("llama", "resnet50", "mlp", "seed", "deep"),
    "replay": ("llama", "resnet50", "deep", "chain20"),
    "switch": CHAINS,
    "decode": ("llama", "deep"),
    "results": ("llama",),
    "ready": ("llama", "resnet50", "mlp", "seed", "deep"),
}
_BOUNDS_OF: Mapping[str, tuple[str, ...]] = {
    "memory": BOUNDS,
    "replay": ("none",),
    "switch": ("1",),
    "decode": BOUNDS,
    "results": ("1", "default", "budget", "none"),
    "ready": ("none", "default"),
}
_WITHOUT_STOCK = ("switch", "results")

WORKLOADS = tuple(dict.fromkeys(name for names in SECTIONS.values() for name in names))

# A round of replays of one graph takes about this long.
_ROUND_SECONDS = 0.05
_MAX_TIMES = 500

# Calls of a round of switches: twice as many pairs.
_PAIRS = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, and how often.

    ``seconds`` is what the steps of one decode loop take about; ``rounds`` counts all that is
    measured in turns, ``repeats`` the captures.
    """

    sections: Sequence[str]
    bounds: Sequence[str]
    repeats: int
    rounds: int
    seconds: float
    replays: int
    seed: int


@dataclass(frozen=True, slots=True)
class Job:
    """One workload, and what is measured of it."""

    workload: str
    sections: tuple[str, ...]
    configs: tuple[str, ...]

    def configs_of(self, section: str) -> list[str]:
        """That the section measures, stock first."""
        wanted = _BOUNDS_OF[section]
        if section not in _WITHOUT_STOCK:
            wanted = ("stock", *wanted)
        return [config for config in self.configs if config in wanted]

    def start(self, timeout: float) -> dict[str, Worker]:
        return {
            config: Worker(WORKER, ["--workload", self.workload], config, timeout)
            for config in self.configs
        }


def jobs_of(workloads: Sequence[str], plan: Plan) -> list[Job]:
    """One for each workload of which a chosen section measures something."""
    jobs = []
    for workload in workloads:
        sections = tuple(
            section
            for section, names in SECTIONS.items()
            if section in plan.sections and workload in names
        )
        wanted: set[str] = set()
        for section in sections:
            bounds = {bound for bound in _BOUNDS_OF[section] if bound in plan.bounds}
            if section not in _WITHOUT_STOCK:
                bounds.add("stock")
            wanted |= bounds
        if wanted - {"stock"}:
            configs = tuple(config for config in ("stock", *BOUNDS) if config in wanted)
            jobs.append(Job(workload, sections, configs))
    return jobs


@dataclass
class Found:
    """What was measured, by section; seconds that each section took; what failed."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    errors: list[dict[str, str]] = field(default_factory=list)

    def spent(self, section: str, begin: float) -> None:
        self.seconds[section] = self.seconds.get(section, 0.0) + time.monotonic() - begin


class JobRun:
    """Measures the sections of one job with processes that have been started."""

    def __init__(self, job: Job, team: Team, plan: Plan, found: Found) -> None:
        self._job = job
        self._team = team
        self._plan = plan
        self._found = found
        self._keys: list[int] = []

    def measure(self, timed: Callable[[], object]) -> None:
        """
        Args:
            timed: called before the first time that is taken; returns once nothing that was
                started beside this job can disturb it.
        """
        begin = time.monotonic()
        for keys in self._team.at_once("prepare").values():
            self._keys = keys
        self._found.spent("prepare", begin)
        if "memory" in self._job.sections:
            self._measure("memory", self._memory)
        begin = time.monotonic()
        timed()
        self._found.spent("prepare", begin)
        for section, measure in (
            ("replay", self._replay),
            ("switch", self._switch),
            ("decode", self._decode),
            ("results", self._results),
            ("ready", self._ready),
        ):
            if section in self._job.sections:
                self._measure(section, measure)
        for config, error in self._team.errors.items():
            self._found.errors.append(
                {"workload": self._job.workload, "config": config, "error": error}
            )

    def _measure(self, section: str, measure: Callable[[], list[dict[str, Any]]]) -> None:
        begin = time.monotonic()
        if self._keys:
            self._found.rows.setdefault(section, []).extend(measure())
        self._found.spent(section, begin)

    def _ask(self, section: str, command: str, backwards: bool = False, **arguments: Any) -> Any:
        """Asks those whom the section measures, one at a time; returns the answers by config."""
        wanted = self._job.configs_of(section)
        answers: dict[str, Any] = {}
        for config in reversed(wanted) if backwards else wanted:
            answers.update(
                self._team.all(lambda _, worker: worker.ask(command, **arguments), only=config)
            )
        return answers

    def _in_turn(self, section: str, rounds: int, command: str, **arguments: Any) -> Any:
        """As often; returns the lists of answers by config."""
        answers: dict[str, list[Any]] = {config: [] for config in self._job.configs_of(section)}
        for number in range(rounds):
            asked = self._ask(section, command, backwards=number % 2 == 1, **arguments)
            for config, answer in asked.items():
                answers[config].append(answer)
        return answers

    def _memory(self) -> list[dict[str, Any]]:
        answers = self._ask("memory", "memory", seed=self._plan.seed)
        stock = answers.get("stock")
        stock_bytes = most_bytes(stock) if stock else None
        return [
            {
                "workload": self._job.workload,
                "config": config,
                "graphs": len(self._keys),
                "nodes": spread(list(answer["nodes"].values())),
                "execs": answer["execs"],
                "instantiations": answer["exec_instantiations"],
                "updates": answer["exec_updates"],
                "driver_bytes_after": answer["driver_bytes"],
                "driver_bytes": most_bytes(answer),
                "vs_stock": ratio(most_bytes(answer), stock_bytes),
            }
            for config, answer in answers.items()
        ]

    def _ready(self) -> list[dict[str, Any]]:
        answers = self._in_turn("ready", self._plan.repeats, "ready")
        stock = [ready_seconds(answer, "stock") for answer in answers.get("stock", [])]
        rows = []
        for config, repeats in answers.items():
            seconds = [ready_seconds(answer, config) for answer in repeats]
            rows.append(
                {
                    "workload": self._job.workload,
                    "config": config,
                    "graphs": len(self._keys),
                    "ready_seconds": median(seconds),
                    "ready_seconds_all": seconds,
                    "vs_stock": median_ratio(seconds, stock),
                    "made_seconds": median(
                        [ready_seconds(answer, config, "made") for answer in repeats]
                    ),
                    "exit_extra_seconds": median(
                        [answer["exit"] - answer["exit_kept"] for answer in repeats]
                    ),
                    "parts": repeats,
                }
            )
        return rows

    def _replay(self) -> list[dict[str, Any]]:
        rows = []
        for key in sorted({self._keys[0], self._keys[len(self._keys) // 2], self._keys[-1]}):
            first = self._ask("replay", "replay_same", key=key, times=10)
            if not first:
                continue
            shortest = min(max(answer["device"], answer["cpu"]) for answer in first.values())
            times = max(8, min(_MAX_TIMES, math.ceil(_ROUND_SECONDS / shortest)))
            answers = self._in_turn(
                "replay", self._plan.rounds, "replay_same", key=key, times=times
            )
            for config, rounds in answers.items():
                row = {
                    "workload": self._job.workload,
                    "key": key,
                    "config": config,
                    "times": times,
                }
                for what in ("device", "cpu"):
                    own = [answer[what] for answer in rounds]
                    stock = [answer[what] for answer in answers["stock"]]
                    row[f"{what}_seconds"] = median(own)
                    row[f"{what}_seconds_all"] = own
                    row[f"{what}_vs_stock"] = median_ratio(own, stock)
                rows.append(row)
        return rows

    def _switch(self) -> list[dict[str, Any]]:
        # The first round finds what the driver makes once, and does not count.
        self._ask("switch", "switch", times=_PAIRS)
        rounds = self._in_turn("switch", self._plan.rounds, "switch", times=_PAIRS)
        counts = self._ask("switch", "updates_of_switches", times=20)
        return [
            {"workload": self._job.workload, **switch_figures(answers), **counts[config]}
            for config, answers in rounds.items()
            if answers and config in counts
        ]

    def _decode(self) -> list[dict[str, Any]]:
        step_seconds = self._step_seconds()
        if step_seconds is None:
            return []
        rows = []
        for read_back in (False, True):
            for name in SCHEDULES:
                steps = steps_for(name, self._plan.seconds, step_seconds)
                drawn = schedule(name, self._keys, steps, self._plan.seed)
                answers = self._in_turn(
                    "decode",
                    self._plan.rounds // 2 + 1,
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
                                "seconds_all": seconds,
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
            answers = self._ask("decode", "decode", before=[], timed=self._keys, read_back=False)
            seconds = answers.get("stock")
        return None if seconds is None else seconds / len(self._keys)

    def _results(self) -> list[dict[str, Any]]:
        answers = self._ask(
            "results", "compare_results", replays=self._plan.replays, seed=self._plan.seed
        )
        return [
            {
                "workload": self._job.workload,
                "config": config,
                "graphs": len(self._keys),
                "replays": self._plan.replays,
                "wrong": wrong,
            }
            for config, wrong in answers.items()
        ]


def most_bytes(answer: Mapping[str, Any]) -> int:
    """What the driver kept at its most."""
    values: list[int] = list(answer["driver_bytes"].values())
    return max(values)


def ready_seconds(answer: Mapping[str, float], config: str, what: str = "instantiate") -> float:
    """From the ends of the captures until every graph can be replayed.

    Args:
        answer: what a process measured, once.
        config: stock's executables are made by the calls that were timed; ours may besides take
            time in the ends of the captures, beyond that of captures that make none.
        what: ``instantiate`` counts an update of every graph, ``made`` only what made executables.
    """
    if config == "stock":
        return answer[what]
    return answer["exit"] - answer["exit_kept"] + answer[what]


def spread(values: Sequence[int]) -> list[int]:
    """Least and most."""
    return [min(values), max(values)]


def switch_figures(rounds: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Any]:
    """Seconds of one call, medians of the rounds' medians, and what a switch adds to a replay.

    ``added_vs_bare`` is the median of the rounds' own: what drifts is alike in both.
    """
    medians = [{name: float(median(spans) or 0) for name, spans in r.items()} for r in rounds]
    figures: dict[str, Any] = {
        f"{name}_seconds": (median([found[name] for found in medians]) or 0) * 1e-9
        for name in medians[0]
    }
    added = {
        who: [found[f"{who}_switch"] - found[f"{who}_same"] for found in medians]
        for who in ("ours", "bare")
    }
    for who, spans in added.items():
        figures[f"{who}_added_seconds"] = (median(spans) or 0) * 1e-9
        figures[f"{who}_added_seconds_all"] = [span * 1e-9 for span in spans]
    figures["added_vs_bare"] = median_ratio(added["ours"], added["bare"])
    figures["switch_vs_bare"] = median_ratio(
        [found["ours_switch"] for found in medians], [found["bare_switch"] for found in medians]
    )
    return figures
