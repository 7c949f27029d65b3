"""torch.cuda.memory_stats() and what is made of it: eager memory and pools in one true number."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from ..work import adapter, capture_all, fresh, torch
from .captures import assert_whose, buffers, buffers_in_holes, capture
from .conftest import Side
from .memory import mapped_pages

MIB = 1 << 20
BYTES = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes")
BY_POOL = (*BYTES, "requested_bytes", "allocation", "segment", "active", "inactive_split")
OVERSIZE = ("oversize_allocations", "oversize_segments")
COUNTERS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "max_split_size",
)
KINDS = ("current", "peak", "allocated", "freed")

# Blocks that both allocators make as large as this: multiples of 512 bytes, or of 2 MiB where
# native would not split what is left over.
SIZES = [512, 100_352, 3 * MIB, 64 * MIB]


@pytest.fixture(scope="module", autouse=True)
def anchor(warm: None) -> Iterator[None]:
    """While a graph lives, torch keeps its random state in 1,024 bytes of eager memory."""
    graph, _ = capture(lambda: torch.ones(1, device="cuda"))
    yield
    del graph


def memory_stats() -> dict[str, int]:
    """Without the keys that name a pool, which come and go with it: since torch 2.13."""
    stats = torch.cuda.memory_stats()
    return {key: value for key, value in stats.items() if "_by_private_pools." not in key}


def change(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {key: value - before[key] for key, value in after.items()}


def settle() -> None:
    """Only what lives is left, so that reserved memory can be compared."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def own_segments() -> list[dict[str, Any]]:
    device = torch.cuda.current_device()
    return [s for s in torch.cuda.memory_snapshot() if s["device"] == device]


def test_every_key_is_there(side: Side) -> None:
    expected = {
        f"{m}.{p}.{k}" for m in BY_POOL for p in ("all", "large_pool", "small_pool") for k in KINDS
    }
    expected |= {f"{m}.{k}" for m in OVERSIZE for k in KINDS}
    expected |= set(COUNTERS)
    before = memory_stats()
    held = capture(lambda: buffers(SIZES))
    after = memory_stats()
    assert expected <= set(after)
    assert set(before) == set(after)
    assert all(isinstance(value, int) for value in after.values())
    assert all(value >= 0 for key, value in after.items() if key != "max_split_size")
    assert_whose(side)
    del held


def test_nested_and_flat_are_the_same(side: Side) -> None:
    held = capture(lambda: buffers(SIZES))
    flat = torch.cuda.memory_stats()
    nested = torch.cuda.memory_stats_as_nested_dict()
    for key, value in flat.items():
        found: Any = nested
        for part in key.split("."):
            found = found[part] if part in found else found[tuple(map(int, part.split("_")))]
        assert found == value, key
    assert_whose(side)
    del held


def test_a_capture_counts_as_eager_work_does(side: Side) -> None:
    before = memory_stats()
    graph, held = capture(lambda: buffers(SIZES))
    grown = change(before, memory_stats())
    for metric in ("allocated_bytes", "active_bytes", "requested_bytes"):
        assert grown[f"{metric}.all.current"] == sum(SIZES), metric
        assert grown[f"{metric}.all.allocated"] == sum(SIZES), metric
        assert grown[f"{metric}.all.freed"] == 0, metric
    for metric in ("allocation", "active"):
        assert grown[f"{metric}.all.current"] == len(SIZES), metric
        assert grown[f"{metric}.all.allocated"] == len(SIZES), metric
    assert grown["num_device_alloc"] > 0
    assert grown["segment.all.allocated"] > 0
    assert grown["num_ooms"] == 0
    assert_whose(side)
    del held[-1]
    shrunk = change(before, memory_stats())
    assert shrunk["allocated_bytes.all.current"] == sum(SIZES[:-1])
    assert shrunk["allocated_bytes.all.freed"] == SIZES[-1]
    assert shrunk["allocation.all.freed"] == 1
    assert shrunk["reserved_bytes.all.current"] == grown["reserved_bytes.all.current"]
    graph.replay()
    torch.cuda.synchronize()
    assert change(before, memory_stats()) == shrunk
    del held


def memory_events(profiler: Any) -> Iterator[Any]:
    """What the profiler was told of memory on the GPU, in no order."""
    from torch._C._profiler import _EventType

    events = list(profiler.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        kind, fields = event.typed
        if kind == _EventType.Allocation and fields.device.type == "cuda":
            yield fields


def test_the_profiler_hears_of_all_that_is_held(side: Side) -> None:
    kept = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with (
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler,
        torch.cuda.graph(graph),
    ):
        inside = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda").fill_(1)
        then = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        del inside
    # What is freed outside of any operator is not in the tree, whoever allocates.
    told = [event for event in memory_events(profiler) if event.alloc_size == 3 * MIB]
    assert [(event.total_allocated, event.total_reserved) for event in told] == [then]
    assert then[0] >= 67 * MIB
    assert_whose(side)
    del kept, graph


def test_requested_bytes_are_those_asked_for(side: Side) -> None:
    before = memory_stats()
    held = capture(lambda: buffers([1, 1000, 3 * MIB + 1]))
    grown = change(before, memory_stats())
    assert grown["requested_bytes.all.current"] == 1 + 1000 + 3 * MIB + 1
    assert grown["allocated_bytes.all.current"] == 512 + 1024 + 3 * MIB + 512
    assert_whose(side)
    del held


def test_the_sum_is_of_small_and_large(side: Side) -> None:
    before = memory_stats()
    held = capture(lambda: buffers(SIZES))
    stats = memory_stats()
    for metric in BY_POOL:
        for kind in ("current", "allocated", "freed"):
            parts = [stats[f"{metric}.{part}_pool.{kind}"] for part in ("large", "small")]
            assert stats[f"{metric}.all.{kind}"] == sum(parts), (metric, kind)
    grown = change(before, stats)
    assert grown["allocated_bytes.small_pool.current"] == sum(SIZES[:2])
    assert grown["allocated_bytes.large_pool.current"] == sum(SIZES[2:])
    assert_whose(side)
    del held


def test_what_comes_and_goes_adds_up(side: Side) -> None:
    """Current is allocated less freed, for every metric and over everything that may happen."""
    before = memory_stats()
    eager = buffers(SIZES)
    graph, held = capture(lambda: [t + 1 for t in eager])
    second = capture(lambda: buffers([70 * MIB, 5000]), graph.pool())
    del held, eager[1]
    settle()
    del second
    settle()
    grown = change(before, memory_stats())
    for metric in BY_POOL:
        for part in ("all", "large_pool", "small_pool"):
            name = f"{metric}.{part}"
            came, went = grown[f"{name}.allocated"], grown[f"{name}.freed"]
            assert grown[f"{name}.current"] == came - went, name
    for metric in OVERSIZE:
        came, went = grown[f"{metric}.allocated"], grown[f"{metric}.freed"]
        assert grown[f"{metric}.current"] == came - went, metric
    assert_whose(side)


def test_sums_over_the_snapshot_are_the_statistics(side: Side) -> None:
    """Also where a page is mapped at several addresses."""
    eager = buffers([7 * MIB, 1000])
    pool = torch.cuda.graph_pool_handle()
    stitched = capture(buffers_in_holes, pool)
    graphs = capture_all([16, 300, 700, 1500, 4000, 9000], pool)
    held = capture(lambda: buffers(SIZES), graphs[16].graph.pool())
    assert_whose(side)
    if side == "ours":
        pages = mapped_pages(pool)
        assert len(pages) > len(set(pages)), "no page is mapped twice"
        shown = sum(s["total_size"] for s in own_segments() if tuple(s["segment_pool_id"]) == pool)
        assert shown == len(set(pages)) * adapter.stats(0, pool)["page_bytes"]
    segments = own_segments()
    assert sum(s["total_size"] for s in segments) == torch.cuda.memory_reserved()
    assert sum(s["allocated_size"] for s in segments) == torch.cuda.memory_allocated()
    stats = memory_stats()
    assert sum(s["active_size"] for s in segments) == stats["active_bytes.all.current"]
    assert sum(s["requested_size"] for s in segments) == stats["requested_bytes.all.current"]
    live = [b for s in segments for b in s["blocks"] if b["state"] == "active_allocated"]
    assert len(live) == stats["allocation.all.current"]
    assert sum(b["size"] for b in live) == stats["allocated_bytes.all.current"]
    for rows, captured in graphs.items():
        assert captured.replay(fresh(rows, seed=9)).isfinite().all()
    del eager, held, captured, stitched


@pytest.mark.whole_gpu
def test_reserved_is_what_the_device_gave(side: Side) -> None:
    size = 512 * MIB
    settle()
    reserved = torch.cuda.memory_reserved()
    free, total = torch.cuda.mem_get_info()
    held = capture(lambda: buffers([size, 3 * MIB]))
    assert_whose(side)
    torch.cuda.synchronize()
    grown = torch.cuda.memory_reserved() - reserved
    assert size + 3 * MIB <= grown <= size + 24 * MIB
    now_free, now_total = torch.cuda.mem_get_info()
    assert now_total == total
    assert grown - 16 * MIB <= free - now_free <= grown + 128 * MIB  # executables of graphs
    if side == "ours":
        (own,) = adapter.pool_ids(torch.cuda.current_device())
        assert grown == adapter.stats(torch.cuda.current_device(), own)["reserved_bytes"]
    del held
    settle()
    assert torch.cuda.memory_reserved() == reserved
    assert torch.cuda.mem_get_info()[0] >= now_free + size


def test_peaks_are_peaks_of_the_sum(side: Side) -> None:
    """Not sums of peaks that were at different times."""

    def high() -> None:
        buffers([48 * MIB])

    settle()
    torch.cuda.reset_peak_memory_stats()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    eager = buffers([64 * MIB])
    del eager
    first = capture(high)  # whose beginning empties the cache
    assert_whose(side)
    assert torch.cuda.max_memory_allocated() - allocated == 64 * MIB
    assert 64 * MIB <= torch.cuda.max_memory_reserved() - reserved < 100 * MIB
    eager = buffers([64 * MIB])
    second = capture(high)
    assert torch.cuda.max_memory_allocated() - allocated == 112 * MIB
    del eager
    stats = memory_stats()
    assert stats["active_bytes.all.peak"] - allocated >= 112 * MIB
    assert stats["reserved_bytes.all.peak"] >= stats["allocated_bytes.all.peak"]
    # Eager memory on top of what a pool holds: 40 of the pool's, then 64.
    torch.cuda.reset_peak_memory_stats()
    third, held = capture(lambda: buffers([40 * MIB]))
    eager = buffers([64 * MIB])
    del eager, held
    eager = buffers([80 * MIB])
    assert torch.cuda.max_memory_allocated() - allocated == 104 * MIB
    del eager, first, second, third


def test_resetting_peaks(side: Side) -> None:
    held = capture(lambda: buffers(SIZES))
    assert_whose(side)
    buffers([50 * MIB])
    torch.cuda.reset_peak_memory_stats()
    stats = memory_stats()
    for key, value in stats.items():
        if key.endswith(".peak"):
            assert value == stats[key.removesuffix("peak") + "current"], key
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    assert torch.cuda.max_memory_reserved() == torch.cuda.memory_reserved()
    low = torch.cuda.memory_allocated()
    more = capture(lambda: buffers([8 * MIB, 6 * MIB])[0], held[0].pool())
    assert torch.cuda.max_memory_allocated() - low == 14 * MIB
    with pytest.warns(FutureWarning):
        torch.cuda.reset_max_memory_allocated()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    del held, more


def test_resetting_accumulated_numbers(side: Side) -> None:
    held = capture(lambda: buffers(SIZES))
    assert_whose(side)
    current = torch.cuda.memory_allocated()
    torch.cuda.reset_accumulated_memory_stats()
    stats = memory_stats()
    for key, value in stats.items():
        if key.endswith((".allocated", ".freed")):
            assert value == 0, key
    assert stats["num_alloc_retries"] == stats["num_ooms"] == 0
    assert stats["allocated_bytes.all.current"] == current
    del held
    settle()
    stats = memory_stats()
    assert stats["allocated_bytes.all.freed"] == sum(SIZES)
    assert stats["allocated_bytes.all.allocated"] == 0
    more = capture(lambda: buffers([5 * MIB]))
    stats = memory_stats()
    assert stats["allocated_bytes.all.allocated"] == 5 * MIB
    assert stats["reserved_bytes.all.freed"] >= sum(SIZES)
    del more


def test_the_summary_is_of_these_numbers(side: Side) -> None:
    held = capture(lambda: buffers([100 * MIB]))
    assert_whose(side)
    for abbreviated in (False, True):
        summary = torch.cuda.memory_summary(abbreviated=abbreviated)
        line = next(line for line in summary.splitlines() if "GPU reserved memory" in line)
        number, unit = line.split("|")[2].split()
        scale = {"B": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": 1 << 30}[unit]
        assert int(number) == torch.cuda.memory_reserved() // scale
    assert memory_stats()["reserved_bytes.all.current"] == torch.cuda.memory_reserved()
    del held


def test_pools_that_are_gone_count_no_more(side: Side) -> None:
    settle()
    before = memory_stats()
    for _ in range(3):
        held = capture(lambda: buffers(SIZES))
        assert_whose(side)
        del held
        settle()
        after = change(before, memory_stats())
        for metric in BY_POOL:
            assert after[f"{metric}.all.current"] == 0, metric
    assert after["num_device_free"] > 0
    assert after["segment.all.freed"] > 0
    assert after["allocated_bytes.all.allocated"] == 3 * sum(SIZES)


def test_unused_memory_of_a_pool_stays_reserved(side: Side) -> None:
    """A graph needs it: no empty_cache() takes it, and the statistics go on to tell of it."""
    settle()
    before = torch.cuda.memory_reserved()
    allocated = torch.cuda.memory_allocated()
    graph, held = capture(lambda: buffers([30 * MIB]))
    del held
    settle()
    assert_whose(side)
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() - before >= 30 * MIB
    assert sum(s["total_size"] for s in own_segments()) == torch.cuda.memory_reserved()
    del graph


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_has_its_own(side: Side) -> None:
    with torch.cuda.device(1):  # as `anchor` on the first device
        other = torch.cuda.CUDAGraph()
        with torch.cuda.graph(other, stream=torch.cuda.Stream(1)):
            torch.ones(1, device="cuda")
    before = [torch.cuda.memory_stats(device) for device in range(2)]
    with torch.cuda.device(1):
        graph = torch.cuda.CUDAGraph()
        # Without a stream all devices' captures have that of the first one.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(1)):
            held = buffers(SIZES)
    assert bool(adapter.pool_ids(1)) == (side == "ours")
    grown = [change(before[d], torch.cuda.memory_stats(d)) for d in range(2)]
    assert grown[0]["allocated_bytes.all.current"] == 0
    assert grown[1]["allocated_bytes.all.current"] == sum(SIZES)
    assert torch.cuda.memory_allocated(1) - before[1]["allocated_bytes.all.current"] == sum(SIZES)
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_allocated(1) == torch.cuda.memory_allocated(1)
    del held, graph, other
