"""Which launch comes before which, against the transitive closure of a made-up program's order."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch")
from cudagraph_pool._guard.happens_before import HappensBefore

HOST = -1


class Closure:
    """Each step is a node; keeps the whole relation, as a set of predecessors for each node."""

    def __init__(self) -> None:
        self.before: list[set[int]] = []
        self.last: dict[int, int] = {}  # of each stream, and of the host
        self.events: dict[int, int] = {}
        self.launches: list[tuple[int, int, int]] = []  # stream, number, node

    def step(self, at: int, *others: int | None) -> int:
        """At the end of a stream, or of the host, behind other nodes."""
        node = len(self.before)
        direct = [n for n in (self.last.get(at), *others) if n is not None]
        self.before.append(set(direct).union(*(self.before[n] for n in direct)))
        self.last[at] = node
        return node

    def comes_after(self, stream: int, node: int) -> bool:
        ends = [self.last.get(stream), self.last.get(HOST)]
        return any(end is not None and (end == node or node in self.before[end]) for end in ends)


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed: int) -> None:
    chance = random.Random(seed)
    order, closure = HappensBefore(), Closure()
    streams, events = [0, 7, 8, 9], [100, 101, 102]
    outcomes = set()
    for _ in range(120):
        stream, event = chance.choice(streams), chance.choice(events)
        host = closure.last.get(HOST)
        match chance.choice(
            "launch launch record wait event_sync stream_sync forget device_sync".split()
            if chance.random() < 0.2
            else "launch launch record record wait wait".split()
        ):
            case "launch":
                number = order.launch(stream)
                closure.launches.append((stream, number, closure.step(stream, host)))
            case "record":
                order.record(event, stream)
                closure.events[event] = closure.step(stream, host)
            case "wait":
                order.wait(event, stream)
                closure.step(stream, closure.events.get(event))
            case "event_sync":
                order.synchronize_event(event)
                closure.step(HOST, closure.events.get(event))
            case "stream_sync":
                order.synchronize_stream(stream)
                closure.step(HOST, closure.last.get(stream))
            case "forget":
                order.forget(event)
                closure.events.pop(event, None)
            case "device_sync":
                order.synchronize_device()
                closure.step(HOST, *(closure.last.get(s) for s in streams))
        for launched_on, number, node in closure.launches:
            for s in streams:
                expected = closure.comes_after(s, node)
                outcomes.add(expected)
                assert order.comes_after(s, launched_on, number) == expected
    assert outcomes == {True, False}
