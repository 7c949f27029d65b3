"""Sizes to capture, and which of them serves a call."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from cudagraph_pool import sizes as _sizes
from cudagraph_pool.sizes import Buckets

sizes: Any = _sizes


def test_lists() -> None:
    assert sizes.exact(4) == [1, 2, 3, 4]
    assert sizes.powers_of_two(8) == [1, 2, 4, 8]
    assert sizes.powers_of_two(9) == [1, 2, 4, 8, 9]
    assert sizes.multiples(8, 20) == [8, 16, 20]
    assert sizes.grid([1, 2], [64, 128]) == [(1, 64), (1, 128), (2, 64), (2, 128)]
    # vLLM 0.23: CompilationConfig.cudagraph_capture_sizes for 512 sequences.
    assert len(sizes.vllm()) == 51
    assert sizes.vllm()[:5] == [1, 2, 4, 8, 16]
    assert sizes.vllm()[-3:] == [480, 496, 512]
    assert sizes.vllm(256)[-2:] == [248, 256]


@pytest.mark.parametrize("padding", [0.0, 0.05, 0.25, 1.0, 3.5])
def test_padding_is_kept_with_few_sizes(padding: float) -> None:
    made = sizes.padded(padding, 1000)
    for size in range(1, 1001):
        assert next(b for b in made if b >= size) <= size * (1 + padding)
    # Any list that keeps it has one size from each of these stretches.
    fewest = 0
    size = 1
    while size <= 1000:
        fewest += 1
        size = int(size * (1 + padding)) + 1
    assert len(made) == fewest


def test_several_dimensions() -> None:
    random.seed(5)
    listed = {(random.randint(1, 9), random.randint(1, 9)) for _ in range(12)}
    buckets = Buckets(listed, 0, 0)
    for size in itertools.product(range(1, 11), repeat=2):
        holding = [b for b in listed if b[0] >= size[0] and b[1] >= size[1]]
        found = buckets.fit(size)
        assert (found is None) == (not holding)
        if found is not None:
            assert found in holding
            assert math.prod(found) == min(map(math.prod, holding))


def test_sizes_that_come_with_the_calls() -> None:
    buckets = Buckets("auto", (0, 1), 0.25)
    assert buckets.listed == []
    for size in itertools.product((1, 7, 100, 4097), repeat=2):
        found = buckets.fit(size)
        assert found is not None
        assert all(n <= b <= n * 1.25 for n, b in zip(size, found, strict=True))
        assert buckets.fit(found) == found


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: sizes.exact(0), ValueError, "largest is 0, but must be at least 1"),
        (lambda: sizes.exact("a"), TypeError, "largest is 'a', but must be an integer"),
        (lambda: sizes.powers_of_two(2.5), TypeError, "largest is 2.5, but must be an integer"),
        (lambda: sizes.multiples(0, 8), ValueError, "step is 0, but must be at least 1"),
        (lambda: sizes.padded(-0.1, 8), ValueError, r"padding is -0\.1, but must be 0 or more"),
        (lambda: sizes.padded(0.25, 2.5), TypeError, "largest is 2.5, but must be an integer"),
        (lambda: sizes.padded("x", 4), TypeError, "padding is 'x', but must be a number"),
        (lambda: sizes.grid("ab", [1]), TypeError, "a size is 'a', but must be an integer"),
        (lambda: sizes.grid([0]), ValueError, "a size is 0, but must be at least 1"),
        (lambda: sizes.grid(), TypeError, "takes the sizes of each dimension"),
        (lambda: sizes.grid([1], 128), TypeError, "takes the sizes of each dimension"),
        (lambda: Buckets("auto", 0, math.nan), ValueError, "padding is nan"),
        (lambda: Buckets([], 0, 0), ValueError, "sizes is empty"),
        (lambda: Buckets([4, 8, 4], 0, 0), ValueError, "sizes has 4 twice"),
        (lambda: Buckets([4, 0], 0, 0), ValueError, "a size is 0, but must be at least 1"),
        (lambda: Buckets([()], 0, 0), ValueError, "sizes is empty"),
        (lambda: Buckets([(2, 3), (4,)], 0, 0), ValueError, r"sizes has \(2, 3\) and \(4,\): all"),
    ],
)
def test_sizes_that_cannot_be_meant(
    make: Callable[[], Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        make()


@pytest.mark.parametrize("padding", [0, 1e-9, 0.001, 0.3])
def test_ladders_of_many_rungs_are_quick_and_the_same(padding: float) -> None:
    began = time.perf_counter()
    assert sizes.padded(padding, 4096)[-1] == 4096
    assert sizes.rung(10**6, padding) >= 10**6
    assert time.perf_counter() - began < 1
    rungs = [0]
    while rungs[-1] < 1500:
        rungs.append(int((rungs[-1] + 1) * (1 + padding)))
    for size in (1, 2, 7, 333, 999, 1000, 1001, 1500):
        assert sizes.rung(size, padding) == next(rung for rung in rungs if rung >= size)
