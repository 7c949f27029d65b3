"""What the graph pools of this process hold."""

from __future__ import annotations

from typing import Any

_PAGE = 2 << 20


def measure_pools() -> dict[str, int]:
    """Of graph pools and MemPools: how many, the bytes that they reserve, the captures that went to
    ours, and the most bytes that were ever live in each of ours, in whole pages, added up.
    """
    import torch

    import cudagraph_pool as cgp

    reserved: dict[Any, int] = {}
    for segment in torch.cuda.memory_snapshot():
        pool = tuple(segment["segment_pool_id"])
        if pool != (0, 0):
            reserved[pool] = reserved.get(pool, 0) + segment["total_size"]
    found = {"pools": len(reserved), "pool": sum(reserved.values())}
    if not cgp.is_enabled():
        return {**found, "captures_of_ours": 0, "minimum": 0}
    from cudagraph_pool._allocator import load_adapter

    adapter = load_adapter()
    peaks = [adapter.stats(0, pool)["peak_allocated_bytes"] for pool in adapter.pool_ids(0)]
    return {
        **found,
        "captures_of_ours": adapter.capture_counts()["ours"],
        "minimum": sum(-(-peak // _PAGE) * _PAGE for peak in peaks),
    }
