"""Seeded random programs of alloc, free, kernel, record_stream, fork and join over several streams.

    python benchmarks/stream_programs.py --output FOLDER        # as text, for cgp_quality --streams

Needs no torch. A program is right by construction: a kernel reads only tensors whose write its
stream is ordered behind, and a tensor that another stream reads is recorded for it with
record_stream, or its own stream waits for the reader before the tensor is freed. So whatever an
allocator does with freed memory, the sums that the readers add up are known beforehand.

What pytorch#162186 and the table in pytorch#158352 say is taken over: random interleavings of
allocations, frees and joins with given chances; 24 configurations; medians of capture and replay
times; 1,000 and 10,000 operations; a chance of 0.1 to join and of 0.1 or 0.3 to allocate; one
kernel for each operation and one for each allocation, so that V = operations + allocations and E =
V + joins. What they leave open, or show too little of, stands at :class:`Configuration`. Their own
figures, on an H100: the option reserves 24 to 98 % less than stock, captures in 0.96 to 1.04 and
replays in 0.97 to 1.11 of its time.
"""

from __future__ import annotations

import argparse
import enum
import math
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

GRANULE_BYTES = 512
ELEMENT_BYTES = 4

# Values are distinct within a program of fewer tensors than this, a prime: one read of a wrong
# value makes a wrong sum.
_VALUES = 131_071

# How many live tensors are tried before all of them are looked through for one that can be read.
_TRIES = 16


class Kind(enum.IntEnum):
    """What an operation does. ``tensor`` and ``other`` of :class:`Op` mean, if anything:"""

    ALLOC = 0  # ``tensor`` is allocated on ``stream`` and written there
    READ = 1  # ``stream`` adds ``tensor`` to its sums
    PLAIN = 2  # a kernel on ``stream`` that reads no tensor
    RECORD = 3  # ``tensor`` is recorded as used by ``stream``
    FREE = 4  # the last reference to ``tensor`` goes
    WAIT = 5  # ``stream`` waits for all that ``other`` has been given so far
    START = 6  # the sums of ``stream`` are zeroed
    DELAY = 7  # a kernel on ``stream`` that only spins, for ``other`` cycles


_NODES = frozenset({Kind.ALLOC, Kind.READ, Kind.PLAIN, Kind.START, Kind.DELAY})


class Op(NamedTuple):
    """One operation; numbers of streams and tensors count from 0, -1 means none."""

    kind: Kind
    stream: int
    tensor: int
    other: int

    @property
    def is_node(self) -> bool:
        """Whether it is a node of the captured graph."""
        return self.kind in _NODES


@dataclass(frozen=True, slots=True)
class Configuration:
    """What programs are like.

    In each of ``operations`` steps a stream is drawn, all alike. With ``join`` it waits for another
    one, with ``alloc`` it allocates and writes a tensor, then it reads a tensor that it can see and
    records it if another stream made it, and with ``free`` that tensor is freed, so that its last
    reader is fresh. These are choices of ours, and so are 8 streams and a chance of 0.3 to free,
    which make the 24 complete. All bytes in the table are multiples of 4 MB, which leaves nothing
    to fragment; here sizes are drawn between ``smallest`` and ``largest`` bytes, their logarithms
    uniformly.

    ``unrecorded`` is the share of foreign reads without record_stream: there the tensor's own
    stream waits for the reader before the free. ``delay`` is the share of foreign reads, and of
    writes, before which the stream spins up to ``delay_cycles``.
    """

    streams: int
    operations: int
    alloc: float
    free: float
    join: float = 0.1
    smallest: int = 64 << 10
    largest: int = 8 << 20
    unrecorded: float = 0.0
    delay: float = 0.0
    delay_cycles: int = 200_000

    @property
    def name(self) -> str:
        return f"{self.streams}x{self.operations}-a{self.alloc:g}-f{self.free:g}"


# As many as pytorch#162186 has.
CONFIGURATIONS = tuple(
    Configuration(streams, operations, alloc, free)
    for operations, streams, alloc, free in product(
        (1_000, 10_000), (2, 4, 8), (0.1, 0.3), (0.1, 0.3)
    )
)

# A capture of 100,000 nodes, with about as many frees as allocations.
LONG = Configuration(4, 78_000, 0.3, 0.3)

# Loads what is loaded at first use.
WARM_UP = Configuration(4, 100, 0.3, 0.3, delay=0.25)

BY_NAME = {made.name: made for made in (*CONFIGURATIONS, LONG, WARM_UP)}


@dataclass(frozen=True, slots=True)
class Program:
    """The operations, and of each tensor its elements and the stream that allocates it."""

    streams: int
    ops: tuple[Op, ...]
    elements: tuple[int, ...]
    owners: tuple[int, ...]

    @property
    def largest(self) -> int:
        """Elements of the largest tensor; 0 if there is none."""
        return max(self.elements, default=0)

    @property
    def nodes(self) -> int:
        """Of the captured graph."""
        return sum(op.is_node for op in self.ops)

    def peak_bytes(self) -> int:
        """The most that is live at once, each tensor rounded up to a granule."""
        live = peak = 0
        for op in self.ops:
            if op.kind == Kind.ALLOC:
                live += rounded(self.elements[op.tensor])
                peak = max(peak, live)
            elif op.kind == Kind.FREE:
                live -= rounded(self.elements[op.tensor])
        return peak

    def reads(self) -> list[list[tuple[int, int]]]:
        """Of each stream, elements and value of what it reads, in order."""
        result: list[list[tuple[int, int]]] = [[] for _ in range(self.streams)]
        for op in self.ops:
            if op.kind == Kind.READ:
                result[op.stream].append((self.elements[op.tensor], value_of(op.tensor)))
        return result


def rounded(elements: int) -> int:
    """Bytes of a block for so many elements."""
    return -(-elements * ELEMENT_BYTES // GRANULE_BYTES) * GRANULE_BYTES


def value_of(tensor: int) -> int:
    """What is written to all of a tensor; never 0."""
    return 1 + tensor * 40_503 % _VALUES


def generate(configuration: Configuration, seed: int) -> Program:
    """The same program for the same arguments, in every process and on every machine."""
    return _Generator(configuration, seed).program()


class _Generator:
    """Knows of each stream, as a vector clock, behind which kernels of the others it is."""

    def __init__(self, configuration: Configuration, seed: int) -> None:
        if configuration.streams < 1:
            raise ValueError(f"a program needs a stream: {configuration}")
        self._made = configuration
        self._random = random.Random(f"{seed} {configuration!r}")
        self._clocks = [[0] * configuration.streams for _ in range(configuration.streams)]
        self._ops: list[Op] = []
        self._elements: list[int] = []
        self._owners: list[int] = []
        self._written: list[int] = []  # the owner's clock behind the write
        self._live: list[int] = []
        self._unrecorded: dict[int, set[int]] = {}  # readers that the owner must wait for

    def program(self) -> Program:
        self._node(Kind.START, 0)
        for stream in range(1, self._made.streams):  # fork
            self._wait(stream, 0)
            self._node(Kind.START, stream)
        for _ in range(self._made.operations):
            self._step(self._random.randrange(self._made.streams))
        for stream in range(1, self._made.streams):  # join
            self._wait(0, stream)
        elements, owners = tuple(self._elements), tuple(self._owners)
        return Program(self._made.streams, tuple(self._ops), elements, owners)

    def _step(self, stream: int) -> None:
        if self._made.streams > 1 and self._happens(self._made.join):
            others = [other for other in range(self._made.streams) if other != stream]
            self._wait(stream, self._random.choice(others))
        if self._happens(self._made.alloc):
            self._alloc(stream)
        freed = self._happens(self._made.free)
        position = self._find_visible(stream)
        if position is None:
            self._node(Kind.PLAIN, stream)
            return
        self._read(stream, self._live[position])
        if freed:
            self._free(stream, position)

    def _happens(self, chance: float) -> bool:
        return self._random.random() < chance

    def _node(self, kind: Kind, stream: int, tensor: int = -1, other: int = -1) -> None:
        self._ops.append(Op(kind, stream, tensor, other))
        self._clocks[stream][stream] += 1

    def _wait(self, stream: int, other: int) -> None:
        self._ops.append(Op(Kind.WAIT, stream, -1, other))
        own, its = self._clocks[stream], self._clocks[other]
        own[:] = map(max, own, its)

    def _delay(self, stream: int) -> None:
        if self._made.delay and self._happens(self._made.delay):
            cycles = self._random.randrange(1, self._made.delay_cycles)
            self._node(Kind.DELAY, stream, other=cycles)

    def _alloc(self, stream: int) -> None:
        low, high = math.log(self._made.smallest), math.log(self._made.largest)
        size = math.exp(self._random.uniform(low, high))
        tensor = len(self._elements)
        self._elements.append(max(1, round(size / ELEMENT_BYTES)))
        self._owners.append(stream)
        self._delay(stream)
        self._node(Kind.ALLOC, stream, tensor)
        self._written.append(self._clocks[stream][stream])
        self._live.append(tensor)

    def _find_visible(self, stream: int) -> int | None:
        """Where in the list of live tensors one stands that the stream is behind the write of."""
        if not self._live:
            return None
        for _ in range(_TRIES):
            position = self._random.randrange(len(self._live))
            if self._is_visible(stream, self._live[position]):
                return position
        found = [p for p, tensor in enumerate(self._live) if self._is_visible(stream, tensor)]
        return self._random.choice(found) if found else None

    def _is_visible(self, stream: int, tensor: int) -> bool:
        return self._clocks[stream][self._owners[tensor]] >= self._written[tensor]

    def _read(self, stream: int, tensor: int) -> None:
        foreign = stream != self._owners[tensor]
        if foreign:
            self._delay(stream)
        self._node(Kind.READ, stream, tensor)
        if not foreign:
            return
        if self._made.unrecorded and self._happens(self._made.unrecorded):
            self._unrecorded.setdefault(tensor, set()).add(stream)
        else:
            self._ops.append(Op(Kind.RECORD, stream, tensor, -1))

    def _free(self, stream: int, position: int) -> None:
        tensor = self._live[position]
        self._live[position] = self._live[-1]
        self._live.pop()
        for reader in sorted(self._unrecorded.pop(tensor, ())):
            self._wait(self._owners[tensor], reader)
        self._ops.append(Op(Kind.FREE, stream, tensor, -1))


def sums_of(reads: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The sums that a stream's reads leave, as runs of (elements, sum), the first element first.

    A read of n elements adds its value to the first n of the stream's sums.
    """
    by_length: dict[int, int] = {}
    for elements, value in reads:
        by_length[elements] = by_length.get(elements, 0) + value
    total, done = sum(by_length.values()), 0
    for elements in sorted(by_length):
        yield elements - done, total
        total -= by_length[elements]
        done = elements


def lines_of(program: Program) -> Iterator[str]:
    """As csrc/testing/capture_trace.h reads them."""
    yield "graph 0\n"
    for op in program.ops:
        if op.kind == Kind.ALLOC:
            size = program.elements[op.tensor] * ELEMENT_BYTES
            yield f"alloc {op.tensor} {size} {op.stream}\n"
        if op.is_node:
            yield f"launch {op.stream}\n"
        elif op.kind == Kind.RECORD:
            yield f"use {op.tensor} {op.stream}\n"
        elif op.kind == Kind.FREE:
            yield f"free {op.tensor}\n"
        elif op.kind == Kind.WAIT:
            yield f"wait {op.stream} {op.other}\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of programs")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    for made, seed in product(CONFIGURATIONS, options.seeds):
        path = options.output / f"{made.name}@{seed}.txt"
        path.write_text("".join(lines_of(generate(made, seed))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
