"""Makes up captures: what programs allocate and free, and the sizes they are captured for."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any


class Program:
    """Writes down what a program allocates and frees, graph by graph."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.live: dict[int, int] = {}  # bytes of each block
        self._graphs: list[dict[str, Any]] = []
        self._blocks = 0
        self.stream = 0  # that allocates

    def begin(self, key: int) -> None:
        self._graphs.append({"key": key, "events": []})

    def graphs(self, keys: Iterable[int]) -> Iterator[int]:
        """Begins a graph for each key."""
        for key in keys:
            self.begin(key)
            yield key

    def take(self, size: float) -> int:
        """Allocates a block of at least one byte; returns its id."""
        self._blocks += 1
        self.live[self._blocks] = max(1, int(size))
        self._graphs[-1]["events"].append([1, self._blocks, self.live[self._blocks], self.stream])
        return self._blocks

    def free(self, *blocks: int) -> None:
        for block in blocks:
            del self.live[block]
            self._graphs[-1]["events"].append([-1, block])

    def touch(self, size: float) -> None:
        """Allocates a block and frees it."""
        self.free(self.take(size))

    def trace(self) -> dict[str, Any]:
        """As cudagraph_pool/tools/trace.py reads it."""
        return {
            "name": self.name,
            "torch": "made up",
            "gpu": "made up",
            "stock": {"reserved": 0},
            "graphs": self._graphs,
        }


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def batch_sizes(chance: random.Random, most: int = 40) -> list[int]:
    """The sizes that a server, a sweep or a user captures, the smallest or the largest of them."""
    kind = chance.choice(["vllm", "pow2", "lin", "range", "rand"])
    if kind == "vllm":
        sizes = [1, 2, 4, *range(8, chance.choice([64, 128, 256, 512]) + 1, 8)]
    elif kind == "pow2":
        sizes = [1 << i for i in range(chance.randint(4, 10))]
    elif kind == "lin":
        sizes = list(range(1, chance.randint(8, 64)))
    elif kind == "range":
        step = chance.choice([2, 3, 16, 32])
        sizes = list(range(step, step * chance.randint(5, 30), step))
    else:
        sizes = sorted(chance.sample(range(1, 512), chance.randint(5, 40)))
    return sizes[:most] if chance.random() < 0.5 else sizes[-most:]


def arrange(chance: random.Random, sizes: list[int]) -> list[int]:
    """The sizes in the order of capture."""
    order = chance.choice(["asc", "desc", "shuf", "shuf", "big_first_then_asc", "repeat"])
    sizes = list(sizes)
    if order == "asc":
        sizes.sort()
    elif order == "desc":
        sizes.sort(reverse=True)
    elif order == "shuf":
        chance.shuffle(sizes)
    elif order == "big_first_then_asc":
        sizes.sort()
        sizes = [sizes[-1], *sizes[:-1]]
    else:
        chance.shuffle(sizes)
        sizes += sizes[: len(sizes) // 2]
    return sizes
