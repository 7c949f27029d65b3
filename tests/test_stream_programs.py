"""The random programs of benchmarks/multi_stream.py: right by construction, their sums known."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from stream_oracle import taken_too_early
from stream_programs import (
    CONFIGURATIONS,
    Configuration,
    Kind,
    Op,
    Program,
    generate,
)

if TYPE_CHECKING:
    from torch import Tensor

DELAYED = [replace(made, unrecorded=0.2, delay=0.25) for made in CONFIGURATIONS[3:12:4]]
SMALL = [replace(made, operations=300) for made in (*CONFIGURATIONS[:12], *DELAYED)]


def test_a_program_is_that_of_its_seed() -> None:
    """Figures of another machine or Python are of the same programs."""
    program = generate(CONFIGURATIONS[3], 0)
    assert program == generate(CONFIGURATIONS[3], 0)
    assert (len(program.ops), program.peak_bytes()) == (2_022, 61_797_888)


@pytest.mark.parametrize("configuration", SMALL, ids=lambda made: f"{made.name}-d{made.delay:g}")
@pytest.mark.parametrize("seed", range(3))
def test_programs_are_right(configuration: Configuration, seed: int) -> None:
    """By all pairs of nodes, not by clocks: what is read is written before, what is freed is
    recorded for all its readers or ordered behind them, and all streams join.
    """
    program = generate(configuration, seed)
    behind: list[set[int]] = [set() for _ in range(program.streams)]  # nodes, of each stream
    written: dict[int, int] = {}
    readers: dict[int, dict[int, int]] = defaultdict(dict)  # the last read of each stream
    recorded: dict[int, set[int]] = defaultdict(set)
    freed: set[int] = set()
    for number, op in enumerate(program.ops):
        kind, stream, tensor, other = op
        if kind == Kind.WAIT:
            behind[stream] |= behind[other]
        if op.is_node:
            behind[stream].add(number)
        assert tensor not in freed
        owner = program.owners[tensor]
        if kind == Kind.ALLOC:
            assert owner == stream
            assert written.setdefault(tensor, number) == number
        elif kind == Kind.READ:
            assert written[tensor] in behind[stream]
            readers[tensor][stream] = number
        elif kind == Kind.RECORD:
            assert stream != owner
            recorded[tensor].add(stream)
        elif kind == Kind.FREE:
            freed.add(tensor)
            for reader, read in readers[tensor].items():
                assert reader in recorded[tensor] or read in behind[owner]
    assert behind[0] == {number for number, op in enumerate(program.ops) if op.is_node}
    assert len(behind[0]) == program.nodes


@pytest.mark.parametrize("waits", [True, False])
def test_the_oracle(waits: bool) -> None:
    """It knows who may have what another stream has read."""
    ops = [
        *(Op(Kind.START, 0, -1, -1), Op(Kind.WAIT, 1, -1, 0), Op(Kind.START, 1, -1, -1)),
        *(Op(Kind.ALLOC, 0, 0, -1), Op(Kind.READ, 0, 0, -1), Op(Kind.FREE, 0, 0, -1)),
        *([Op(Kind.WAIT, 1, -1, 0)] if waits else []),
        *(Op(Kind.ALLOC, 1, 1, -1), Op(Kind.WAIT, 0, -1, 1)),
    ]
    program = Program(2, tuple(ops), (1024, 1024), (0, 1))
    assert taken_too_early(program, {0: [(0, 0, 4096)], 1: [(1, 0, 4096)]}) == []
    shared = {0: [(0, 0, 4096)], 1: [(0, 256, 512), (1, 0, 3584)]}
    assert taken_too_early(program, shared) == ([] if waits else [(0, 1)])


class FakeStream:
    """Stands in for a CUDA stream: work on it is done at once, so that program order is kept."""

    def __init__(self, device: object = None) -> None:
        self.cuda_stream = id(self)

    def wait_stream(self, other: FakeStream) -> None:
        """What CUDA would do; tests replace it."""


def test_sums_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those that the program says, unless one of hundreds of tensors gets memory of
    another that is still to be read, or nothing runs.
    """
    torch = pytest.importorskip("torch")
    from _stream_work import StreamPrograms

    begin = FakeStream()
    current = [begin]
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    small = [generate(replace(made, smallest=512, largest=8192), 5) for made in SMALL]
    work = StreamPrograms(torch.device("cpu"), small)

    def wrong(key: int) -> int:
        pairs = zip(work.outputs(key), work.expected(key), strict=True)
        return sum(int((found != right).sum()) for found, right in pairs)

    for key in (*work.keys, *reversed(work.keys)):
        work.clear(key)
        assert wrong(key) > 0
        work.step(key)
        assert wrong(key) == 0
        assert current[0] is begin

    program = work.program(3)
    last_read = {op.tensor: at for at, op in enumerate(program.ops) if op.kind == Kind.READ}
    made = [(at, op.tensor) for at, op in enumerate(program.ops) if op.kind == Kind.ALLOC]
    first = made[30][1]
    second = next(tensor for at, tensor in made[31:] if at < last_read[first])
    shared = torch.empty(8192, dtype=torch.int32)
    numbers = itertools.count()

    def allocate(elements: int) -> Tensor:
        return shared[:elements] if next(numbers) in (first, second) else work.empty(elements)

    work.allocate = allocate
    work.clear(3)
    work.step(3)
    assert wrong(3) > 0
