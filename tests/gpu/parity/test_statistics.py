"""torch.cuda.memory_stats() and what is made of it: eager memory and pools in one true number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ..work import adapter, capture_all, fresh, torch
from .captures import assert_whose, buffers, buffers_in_holes, capture
from .conftest import Side
from .memory import mapped_pages

MIB = 1 << 20

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


def own_segments() -> list[dict[str, Any]]:
    device = torch.cuda.current_device()
    return [s for s in torch.cuda.memory_snapshot() if s["device"] == device]


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


def test_torch_accelerator_agrees(side: Side) -> None:
    held = capture(lambda: buffers(SIZES))
    assert_whose(side)
    for reset in (lambda: None, torch.accelerator.reset_peak_memory_stats):
        reset()
        theirs, ours = torch.accelerator.memory_stats(), torch.cuda.memory_stats()
        common = theirs.keys() & ours.keys()  # each has a few that the other has not
        assert len(common) >= 8 * 3 * 4
        assert {key: theirs[key] for key in common} == {key: ours[key] for key in common}
        assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated()
        assert torch.accelerator.max_memory_reserved() == torch.cuda.max_memory_reserved()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
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
