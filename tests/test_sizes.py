"""Sizes to capture, and which of them serves a call."""

from __future__ import annotations

import itertools
import math
import random
import time
from typing import Any

import pytest

from cudagraph_pool import sizes
from cudagraph_pool.sizes import Buckets


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


def test_what_is_no_size() -> None:
    with pytest.raises(ValueError, match="largest is 0, but must be at least 1"):
        sizes.exact(0)
    with pytest.raises(ValueError, match="step is 0, but must be at least 1"):
        sizes.multiples(0, 8)
    with pytest.raises(ValueError, match=r"padding is -0\.1, but must be 0 or more"):
        sizes.padded(-0.1, 8)
    with pytest.raises(ValueError, match="padding is nan"):
        Buckets("auto", 0, math.nan)


def test_the_cheapest_that_holds_it() -> None:
    buckets = Buckets([16, 2, 4], 0, 0)
    assert buckets.listed == [(16,), (2,), (4,)]
    assert [buckets.fit((n,)) for n in (1, 2, 3, 5, 16, 17)] == [
        (2,),
        (2,),
        (4,),
        (16,),
        (16,),
        None,
    ]


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
    ("bad", "said"),
    [
        ([], "sizes is empty"),
        ([4, 8, 4], "sizes has 4 twice"),
        ([4, 0], r"sizes has 0, but a size is an integer of at least 1"),
        ([(2, 3), (4,)], r"sizes has \(2, 3\) and \(4,\): all must have the same number"),
        ([()], r"sizes has \(\), but a size is an integer of at least 1"),
    ],
)
def test_lists_that_cannot_be_captured(bad: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Buckets(bad, 0, 0)


@pytest.mark.parametrize(
    ("name", "arguments", "error", "said"),
    [
        ("exact", ["a"], TypeError, "largest is 'a', but must be an integer"),
        ("powers_of_two", [2.5], TypeError, "largest is 2.5, but must be an integer"),
        ("padded", [0.25, 2.5], TypeError, "largest is 2.5, but must be an integer"),
        ("padded", ["x", 4], TypeError, "padding is 'x', but must be a number"),
        ("grid", ["ab", [1]], TypeError, "a size is 'a', but must be an integer"),
        ("grid", [[0]], ValueError, "a size is 0, but must be at least 1"),
        ("grid", [], TypeError, "takes the sizes of each dimension"),
        ("grid", [[1], 128], TypeError, "takes the sizes of each dimension"),
    ],
)
def test_sizes_that_cannot_be_meant(
    name: str, arguments: list[Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        getattr(sizes, name)(*arguments)


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
