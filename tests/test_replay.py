"""Recorded captures through the real core: what they cost, and whether the placements are right."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from small_trace import TRACES
from validate_placements import validate

from cudagraph_pool.tools.replay import replay
from cudagraph_pool.tools.trace import GRANULE_BYTES, Order, Trace, read_trace, replay_sequence

RUNS: list[tuple[Order, int]] = [
    *(("recorded", 0), ("asc", 0), ("desc", 0)),
    *(("shuffled", seed) for seed in (1, 2, 3)),
]

Results = dict[tuple[str, Order, int], dict[str, Any]]


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    return [read_trace(path) for path in TRACES]


@pytest.fixture(scope="module")
def results(traces: list[Trace]) -> Results:
    return {
        (trace.name, order, seed): replay(trace, order, seed)
        for trace in traces
        for order, seed in RUNS
    }


def test_reserved_memory_is_close_to_the_minimum(results: Results) -> None:
    ratios = {run: result["ratio"] for run, result in results.items()}
    assert len(ratios) == 36
    assert min(ratios.values()) >= 1
    worst = max(ratios, key=lambda run: ratios[run])
    assert ratios[worst] <= 1.03, worst
    assert sum(ratios.values()) / len(ratios) <= 1.01


@pytest.mark.parametrize(("order", "seed"), RUNS)
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_placements_pass_the_independent_validator(path: Path, order: Order, seed: int) -> None:
    trace = read_trace(path)
    file = io.StringIO()
    result = replay(trace, order, seed, file)
    lines = file.getvalue().splitlines()
    verdict = validate(lines)
    assert verdict.reserved_bytes == result["reserved_bytes"]

    # The file tells of every event, in the order of the replay, and blocks got what they asked for.
    told = [record for record in map(json.loads, lines) if record["op"] in ("alloc", "free")]
    events = [event for graph in replay_sequence(trace, order, seed) for event in graph.events]
    assert len(told) == len(events)
    for record, event in zip(told, events, strict=True):
        assert record["id"] == event.block
        assert record["op"] == ("alloc" if event.bytes else "free")
        if event.bytes:
            assert record["bytes"] == -(-event.bytes // GRANULE_BYTES) * GRANULE_BYTES


def test_traces_that_the_package_brings_are_those_of_the_tests() -> None:
    import cudagraph_pool

    assert cudagraph_pool.__file__
    shipped = Path(cudagraph_pool.__file__).parent / "traces"
    names = sorted(path.name for path in shipped.iterdir())
    assert names == ["mlp_asc.json.gz", "resnet50_asc.json.gz"]
    for path in TRACES:
        if path.name in names:
            assert (shipped / path.name).read_bytes() == path.read_bytes()
