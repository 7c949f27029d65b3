"""cgp.use_pool, which is to a GraphPool what torch.cuda.use_mem_pool is to a MemPool: what both can
do runs on a MemPool as [native] and on a GraphPool as [ours].
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import cudagraph_pool as cgp

from ..work import PAGE, adapter, capture_chain, chain, fresh, in_threads, torch
from .conftest import Side
from .memory import MIB, ids, inside, new_bytes, segments, settle


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
            return sum(s["total_size"] for s in segments(self.pool.id))
        return int(self.pool.stats()["reserved_bytes"])


@pytest.fixture
def region(side: Side) -> Iterator[Region]:
    region = Region(side)
    yield region
    region.__dict__.clear()  # pytest keeps the object until `side` has looked for pools left


def test_eager_work_in_a_pool(region: Region) -> None:
    before = fresh(64, seed=0)
    with region.use():
        x = fresh(512, seed=1)
        y = chain(x)
    after = fresh(64, seed=0)
    assert region.holds(x)
    assert region.holds(y)
    assert not region.holds(before)
    assert not region.holds(after)
    assert torch.equal(y, chain(x))
    if region.side == "ours":
        assert ids() == [region.pool.id]
        assert region.pool.stats()["live_blocks"] == 2
        del x, y
        assert region.pool.stats()["live_blocks"] == 0


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
        assert sum(s["total_size"] for s in segments(region.pool.id)) == region.reserved()


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


def test_pools_nest(side: Side) -> None:
    outer, inner, mem_pool = Region(side), Region(side), torch.cuda.MemPool()
    with outer.use():
        first = new_bytes(3, 1)
        with inner.use():
            second = new_bytes(3, 2)
            with torch.cuda.use_mem_pool(mem_pool):
                third = new_bytes(3, 3)
            fourth = new_bytes(3, 4)
        fifth = new_bytes(3, 5)
    outside = new_bytes(3, 6)
    homes = [(first, outer), (second, inner), (fourth, inner), (fifth, outer)]
    for tensor, home in homes:
        for one in (outer, inner):
            assert one.holds(tensor) == (one is home)
        assert not inside(tensor, mem_pool.id)
    assert inside(third, mem_pool.id)
    for one in (outer, inner):
        assert not one.holds(third)
        assert not one.holds(outside)
    values = [int(t[-1]) for t in (first, second, third, fourth, fifth, outside)]
    assert values == [1, 2, 3, 4, 5, 6]


def test_an_exception_leaves_the_pool(region: Region) -> None:
    with pytest.raises(KeyError, match="mine"), region.use():
        raise KeyError("mine")
    assert not region.holds(new_bytes(3))
    with region.use():
        assert region.holds(new_bytes(3))


def test_other_threads_are_not_routed(region: Region) -> None:
    elsewhere = []
    with region.use():
        in_threads(lambda: elsewhere.append(new_bytes(3)))
        here = new_bytes(3)
    assert region.holds(here)
    assert not region.holds(elsewhere[0])


def test_a_pool_for_each_thread(side: Side) -> None:
    regions = [Region(side) for _ in range(4)]
    barrier = threading.Barrier(len(regions))

    def work(region: Region, seed: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), region.use():
            barrier.wait(timeout=60)
            for step in range(30):
                x = new_bytes(1 + (seed + step) % 5, seed + 1)
                assert region.holds(x)
                y = x + 1
                assert int(y.min()) == int(y.max()) == seed + 2

    in_threads(*(lambda r=r, s=s: work(r, s) for s, r in enumerate(regions)))
    torch.cuda.synchronize()


def test_training_in_a_pool(region: Region) -> None:
    """Autograd's threads are not this one: what they allocate stays with the base."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)
    ).cuda()
    x = fresh(128, seed=0)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    with region.use():
        loss = model(x).square().sum()
        loss.backward()
    assert region.holds(loss)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-3)


def test_a_freed_block_is_not_another_streams_until_it_may_be(region: Region) -> None:
    """The block's own stream still reads it when another stream allocates."""
    owner, other = torch.cuda.Stream(), torch.cuda.Stream()
    sums = []
    with region.use():
        for step in range(8):
            with torch.cuda.stream(owner):
                x = new_bytes(8, 1)
                torch.cuda._sleep(5_000_000)
                sums.append(x.sum(dtype=torch.int64))
            del x
            with torch.cuda.stream(other):
                sums.append(new_bytes(8, step + 2).sum(dtype=torch.int64))
    torch.cuda.synchronize()
    assert [int(s) for s in sums[::2]] == [8 * MIB] * 8
    assert [int(s) for s in sums[1::2]] == [8 * MIB * (step + 2) for step in range(8)]


def test_a_block_is_freed_while_its_stream_captures(region: Region) -> None:
    """All work is on one stream, the capture too, which has a pool of its own: nothing that is
    remembered of the free becomes part of the capture.
    """
    x, graph = fresh(64, 0), torch.cuda.CUDAGraph()
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    chain(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        with region.use():
            first, second = new_bytes(16, 1), new_bytes(16, 2)
        with torch.cuda.graph(graph, stream=stream):
            out = chain(x)
            del first
        graph.replay()
        assert torch.equal(out, chain(x))
        with region.use():
            third = new_bytes(16, 3)
    torch.cuda.synchronize()
    with torch.cuda.stream(other), region.use():
        fourth = new_bytes(16, 4)
    torch.cuda.synchronize()
    for value, block in enumerate((second, third, fourth), start=2):
        assert region.holds(block)
        assert int(block.min()) == int(block.max()) == value
    if region.side == "ours":
        assert region.reserved() <= 48 * MIB * 1.02 + PAGE


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


@pytest.mark.parametrize("seed", range(4))
def test_random_work_on_several_streams_keeps_its_data(region: Region, seed: int) -> None:
    """Every block holds its own pattern until the moment it is freed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    streams = [torch.cuda.Stream() for _ in range(3)]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    live: list[tuple[torch.Tensor, int, int]] = []
    with region.use():
        for step in range(300):
            if live and (len(live) > 24 or draw(2)):
                tensor, value, index = live.pop(draw(len(live)))
                with torch.cuda.stream(streams[index]):
                    wrong[index] += (tensor != value).sum()
                del tensor
            else:
                index = draw(len(streams))
                size = (1 << draw(22)) + draw(100)  # of int32: up to 8 MiB
                with torch.cuda.stream(streams[index]):
                    x = torch.full((size,), step, dtype=torch.int32, device="cuda")
                live.append((x, step, index))
                del x
    torch.cuda.synchronize()
    assert all(region.holds(tensor) for tensor, _, _ in live)
    for tensor, value, index in live:
        wrong[index] += (tensor != value).sum()
    assert [int(w) for w in wrong] == [0] * len(streams)


def test_a_tensor_outlives_its_pool(region: Region) -> None:
    with region.use():
        x = new_bytes(12, 6)
    if region.side == "ours":
        region.pool.close()
    del region.pool
    settle()
    new_bytes(12, 9)
    assert int(x.sum(dtype=torch.int64)) == 6 * 12 * MIB


def test_a_capture_into_a_pool_that_eager_work_used(region: Region) -> None:
    """The graph must take neither the memory of live tensors nor leave its own to the next."""
    with region.use():
        kept = [new_bytes(5, value) for value in range(6)]
        del kept[::2]
        x = fresh(700, seed=0)
    counts = adapter.capture_counts()
    captured = capture_chain(700, region.pool.id)
    if region.side == "ours":
        assert adapter.capture_counts()["ours"] == counts["ours"] + 1
    for seed in range(3):
        x.copy_(fresh(700, seed=seed))
        assert torch.equal(captured.replay(x), chain(x))
    assert [int(k.min()) for k in kept] == [1, 3, 5]
    assert [int(k.max()) for k in kept] == [1, 3, 5]


def test_a_capture_inside_use_pool(region: Region) -> None:
    """As inside use_mem_pool: the capture has a pool of its own."""
    x = fresh(512, seed=0)
    chain(x)
    graph = torch.cuda.CUDAGraph()
    with region.use():
        eager = new_bytes(3)
        with torch.cuda.graph(graph):
            y = chain(x)
        later = new_bytes(3)
    assert region.holds(eager)
    assert region.holds(later)
    assert not region.holds(y)
    if region.side == "ours":
        assert len(ids()) == 2
    x.copy_(fresh(512, seed=1))
    graph.replay()
    assert torch.equal(y, chain(x))


def test_a_pool_that_graphs_use_takes_no_eager_work(side: Side) -> None:
    """A replay would overwrite it. A MemPool takes it: native leaves that to the user."""
    if side == "native":
        mem_pool = torch.cuda.MemPool()
        captured = capture_chain(512, mem_pool.id)
        with torch.cuda.use_mem_pool(mem_pool):
            assert inside(new_bytes(3), mem_pool.id)
        return
    pool = cgp.GraphPool()
    captured = capture_chain(512, pool.id)
    with pytest.raises(RuntimeError, match="graph"), cgp.use_pool(pool):
        pass
    assert new_bytes(3).data_ptr() not in {b["address"] for b in pool.snapshot()["blocks"]}
    x = fresh(512, seed=3)
    assert torch.equal(captured.replay(x), chain(x))
    del captured
    settle()
    with cgp.use_pool(pool):  # nothing is replayed in it any more
        eager = new_bytes(3)
    assert eager.data_ptr() in {b["address"] for b in pool.snapshot()["blocks"]}


def test_a_released_pool_takes_no_eager_work(side: Side) -> None:
    if side == "native":
        return  # a MemPool cannot be released while its object lives
    pool = cgp.GraphPool()
    pool.close()
    with pytest.raises(RuntimeError, match="released"), cgp.use_pool(pool):
        pass
    new_bytes(3)
    assert ids() == []


def test_use_pool_needs_enabling(side: Side) -> None:
    if side == "native":
        with pytest.raises(RuntimeError, match="enable"):
            cgp.GraphPool()
        return
    pool = cgp.GraphPool()
    cgp.disable()
    with pytest.raises(RuntimeError, match="enable"), cgp.use_pool(pool):
        pass
    cgp.enable()
    with cgp.use_pool(pool):
        x = new_bytes(3)
    assert x.data_ptr() in {b["address"] for b in pool.snapshot()["blocks"]}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_pool_of_another_device(side: Side) -> None:
    """use_mem_pool is told the device and does not ask the pool; use_pool asks."""
    if side == "native":
        mem_pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(mem_pool), torch.cuda.device(1):
            assert not inside(new_bytes(3), mem_pool.id)
        return
    pool = cgp.GraphPool(1)
    with pytest.raises(ValueError, match="cuda:1"), cgp.use_pool(pool):
        pass
    with torch.cuda.device(1), cgp.use_pool(pool):
        x = new_bytes(3)
    assert x.device.index == 1
    assert x.data_ptr() in {b["address"] for b in pool.snapshot()["blocks"]}
    assert not inside(new_bytes(3), pool.id)


def test_use_pool_over_and_over_does_not_grow(region: Region) -> None:
    for step in range(300):
        with region.use():
            x = new_bytes(5)
            y = chain(fresh(100 + step % 7, seed=step))
        del x, y
        if step == 20:
            reserved = region.reserved()
    assert region.reserved() == reserved
    if region.side == "ours":
        assert region.pool.stats()["live_blocks"] == 0
        assert adapter.use_count(torch.cuda.current_device(), region.pool.id) == 1
