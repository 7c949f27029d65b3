"""Snapshots of memory and the history of allocations: what is shown of a pool, and how."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cudagraph_pool as cgp

from ..work import capture_all, torch
from .captures import assert_whose, buffers, capture, memory_snapshot_of
from .conftest import Side

if TYPE_CHECKING:
    from torch import Tensor


memory: Any = torch.cuda.memory


@pytest.fixture(autouse=True)
def recorder(side: Side) -> Iterator[None]:
    """Nothing is recorded when the test begins, and nothing when it has ended."""
    memory._record_memory_history(enabled=None, clear_history=True)
    yield
    memory._record_memory_history(enabled=None, clear_history=True)
    memory._set_memory_metadata("")


def record(**options: Any) -> None:
    memory._record_memory_history(
        **{"context": "all", "stacks": "python", "clear_history": True, **options}
    )


def let_go(tensors: list[Tensor]) -> None:
    tensors.clear()


def trace() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = memory._snapshot()["device_traces"][torch.cuda.current_device()]
    return entries


def events(of: Sequence[int], actions: Sequence[str] = ()) -> list[tuple[str, int]]:
    """What happened at these addresses, in order; an address is shown as its number in `of`."""
    wanted = actions or ("alloc", "free_requested", "free_completed")
    return [
        (entry["action"], of.index(entry["addr"]))
        for entry in trace()
        if entry["action"] in wanted and entry["addr"] in of
    ]


def functions(entry: dict[str, Any]) -> set[str]:
    return {frame["name"] for frame in entry.get("frames", [])}


def assert_consistent(segments: Sequence[dict[str, Any]]) -> None:
    """Blocks tile their segment, sums are sums, and no two segments overlap."""
    for segment in segments:
        blocks, at = segment["blocks"], segment["address"]
        for block in blocks:
            assert block["address"] == at
            assert block["size"] > 0
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
        allocated = [b for b in blocks if b["state"] == "active_allocated"]
        active = [b for b in blocks if b["state"].startswith("active")]
        assert segment["allocated_size"] == sum(b["size"] for b in allocated)
        assert segment["active_size"] == sum(b["size"] for b in active)
        assert segment["requested_size"] == sum(b["requested_size"] for b in active)
        assert segment["segment_type"] in ("small", "large")
    spans = sorted((s["device"], s["address"], s["total_size"]) for s in segments)
    for (device, address, size), following in pairwise(spans):
        assert following[0] > device or address + size <= following[1]


def live_blocks(segments: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {
        block["address"]: block
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


@pytest.mark.parametrize("context", [None, "state", "alloc", "all"])
def test_which_stacks_are_kept(side: Side, context: str | None) -> None:
    record(context=context)
    graph, held = capture(lambda: buffers([6000, 7000]))
    assert_whose(side)
    kept, gone = held[0].data_ptr(), held[1].data_ptr()
    dead = [held.pop()]
    let_go(dead)
    block = live_blocks(memory_snapshot_of(graph.pool()))[kept]
    assert ("buffers" in functions(block)) == (context is not None)
    entries = [e for e in trace() if e.get("addr") == gone]
    by_action = {entry["action"]: functions(entry) for entry in entries}
    assert ("buffers" in by_action["alloc"]) == (context in ("alloc", "all"))
    assert ("let_go" in by_action["free_requested"]) == (context == "all")
    assert {"alloc", "free_requested", "free_completed"} <= set(by_action)
    del held


def test_history_that_began_before_the_package_was_enabled(side: Side) -> None:
    if side == "ours":
        cgp.disable()
    record()
    if side == "ours":
        cgp.enable()
    held = capture(lambda: buffers([6000]))
    assert_whose(side)
    assert events([held[1][0].data_ptr()]) == [("alloc", 0)]
    if side == "ours":
        cgp.disable()  # the pool goes on, and so does its history
    addresses = [held[1][0].data_ptr()]
    let_go(held[1])
    assert events(addresses, ["free_requested"]) == [("free_requested", 0)]
    del held


def test_the_dump_and_its_pages(
    side: Side, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.cuda import _memory_viz

    before = memory._snapshot()
    record()
    pool = torch.cuda.graph_pool_handle()
    eager = buffers()
    graphs = capture_all([64, 640, 2000], pool)
    held = [capture(buffers, pool) for _ in range(2)]
    assert_whose(side)
    let_go(held[0][1])
    path = tmp_path / "dump.pickle"
    memory._dump_snapshot(str(path))
    snapshot = pickle.loads(path.read_bytes())
    assert_consistent(snapshot["segments"])
    assert {t.data_ptr() for t in held[1][1]} <= set(live_blocks(snapshot["segments"]))
    assert "allocator_settings" in snapshot
    for entry in snapshot["device_traces"][torch.cuda.current_device()]:
        assert {"action", "size", "stream", "time_us"} <= set(entry)

    def lines(text: str) -> str:  # in place of a script that would be downloaded
        return text

    assert "buffers" in _memory_viz.segments(snapshot, format_flamegraph=lines)
    assert "buffers" in _memory_viz.memory(snapshot, format_flamegraph=lines)
    compared = _memory_viz.compare(
        before["segments"], snapshot["segments"], format_flamegraph=lines
    )
    assert "only_after" in compared
    assert "total_reserved" in _memory_viz.segsum(snapshot)
    assert "entries" in _memory_viz.trace(snapshot)
    for page in (_memory_viz.trace_plot(snapshot), _memory_viz.segment_plot(snapshot)):
        assert "<!DOCTYPE html>" in page
    assert "free_completed without free_requested" not in capsys.readouterr().out
    del eager, graphs, held
