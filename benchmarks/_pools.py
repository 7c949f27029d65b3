"""What this process captures, and what its graph pools hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import cudagraph_pool as cgp

_PAGE = 2 << 20


def count_captures() -> Callable[[], int]:
    """What says how many captures have ended since."""
    count = 0
    end = torch.cuda.CUDAGraph.capture_end

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        nonlocal count
        end(graph)
        count += 1

    torch.cuda.CUDAGraph.capture_end = counted
    return lambda: count


def measure_pools() -> dict[str, int]:
    """Of graph pools and MemPools: how many, the bytes that they reserve, the captures that went to
    ours, and the most bytes that were ever live in each of ours, in whole pages, added up.
    """
    reserved: dict[Any, int] = {}
    for segment in torch.cuda.memory_snapshot():
        pool = tuple(segment["segment_pool_id"])
        if pool != (0, 0):
            reserved[pool] = reserved.get(pool, 0) + segment["total_size"]
    found = {"pools": len(reserved), "pool": sum(reserved.values())}
    if not cgp.is_enabled():
        return {**found, "captures_of_ours": 0, "minimum": 0}
    from cudagraph_pool._adapter import load_adapter

    adapter, device = load_adapter(), torch.cuda.current_device()
    pools = [adapter.stats(device, pool) for pool in adapter.pool_ids(device)]
    return {
        **found,
        "captures_of_ours": adapter.capture_counts()["ours"],
        "minimum": sum(-(-own["peak_allocated_bytes"] // _PAGE) * _PAGE for own in pools),
    }
