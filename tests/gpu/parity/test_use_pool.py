"""cgp.use_pool, which is to a GraphPool what torch.cuda.use_mem_pool is to a MemPool: what both can
do runs on a MemPool as [native] and on a GraphPool as [ours].
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import cudagraph_pool as cgp

from ..work import PAGE, capture_chain, chain, fresh, torch
from .conftest import Side
from .memory import MIB, inside, new_bytes, reserved


class Region:
    """A pool that eager work allocates in: a MemPool on native, a GraphPool on ours."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.pool: Any = torch.cuda.MemPool() if side == "native" else cgp.GraphPool()

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        if self.side == "native":
            with torch.cuda.use_mem_pool(self.pool):
                yield
        else:
            with cgp.use_pool(self.pool):
                yield

    def holds(self, tensor: torch.Tensor) -> bool:
        if self.side == "native":
            return inside(tensor, self.pool.id)
        return tensor.data_ptr() in {block["address"] for block in self.pool.snapshot()["blocks"]}

    def reserved(self) -> int:
        if self.side == "native":
            return reserved(self.pool.id)
        return int(self.pool.stats()["reserved_bytes"])


@pytest.fixture
def region(side: Side) -> Iterator[Region]:
    region = Region(side)
    yield region
    region.__dict__.clear()  # pytest keeps the object until `side` has looked for pools left


def test_it_grows_as_an_expandable_segment_does(region: Region) -> None:
    """Ever larger blocks, one at a time, cost what the largest needs."""
    for mib in (16, 32, 64, 128):
        with region.use():
            x = new_bytes(mib, 3)
        assert region.holds(x)
        assert int(x.sum(dtype=torch.int64)) == 3 * mib * MIB
        del x
    if region.side == "native":
        assert region.reserved() == (16 + 32 + 64 + 128) * MIB  # cudaMalloc cannot grow
    else:
        assert region.reserved() <= 128 * MIB * 1.02 + PAGE
        assert reserved(region.pool.id) == region.reserved()


def test_its_holes_are_stitched(region: Region) -> None:
    with region.use():
        pieces = [new_bytes(16, value) for value in range(8)]
        del pieces[::2]
        whole = new_bytes(64, 99)
    assert region.holds(whole)
    assert int(whole.sum(dtype=torch.int64)) == 99 * 64 * MIB
    assert [int(p.min()) for p in pieces] == [1, 3, 5, 7]
    assert [int(p.max()) for p in pieces] == [1, 3, 5, 7]
    if region.side == "native":
        assert region.reserved() >= (128 + 64) * MIB  # no hole holds it
    else:
        assert region.reserved() <= 128 * MIB * 1.02 + PAGE


def test_record_stream_holds_a_block(region: Region) -> None:
    other = torch.cuda.Stream()
    result = torch.zeros((), dtype=torch.int64, device="cuda")
    with region.use():
        for _ in range(8):
            x = new_bytes(8, 1)
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                torch.cuda._sleep(5_000_000)
                result += x.sum(dtype=torch.int64)
            x.record_stream(other)
            del x
            new_bytes(8, 200)  # where x was, were it not held
        torch.cuda.current_stream().wait_stream(other)
    assert int(result) == 8 * 8 * MIB


def test_a_pool_that_graphs_use_takes_eager_work_apart_from_them(side: Side) -> None:
    """A replay would overwrite what lies in its pages: native leaves that to the user."""
    if side == "native":
        mem_pool = torch.cuda.MemPool()
        captured = capture_chain(512, mem_pool.id)
        with torch.cuda.use_mem_pool(mem_pool):
            assert inside(new_bytes(3), mem_pool.id)
        return
    pool = cgp.GraphPool()
    captured = capture_chain(512, pool.id)
    assert new_bytes(3).data_ptr() not in {b["address"] for b in pool.snapshot()["blocks"]}
    with cgp.use_pool(pool):
        eager = new_bytes(3, 9)
    assert eager.data_ptr() in {b["address"] for b in pool.snapshot()["blocks"]}
    x = fresh(512, seed=3)
    assert torch.equal(captured.replay(x), chain(x))
    assert int(eager.sum(dtype=torch.int64)) == 9 * 3 * MIB
