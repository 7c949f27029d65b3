"""What this process captures, and what its graph pools hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

import cudagraph_pool as cgp
from cudagraph_pool._table import mib

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


def device_bytes() -> int:
    """What the device has less, by all processes, without what PyTorch could give back."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def cells(row: Mapping[str, Any]) -> list[str]:
    """Of a table: captures and those of ours, what the pools reserve, and the minimum."""
    minimum = mib(row["minimum"]) if row["minimum"] else "-"
    return [str(row["captures"]), str(row["captures_of_ours"]), mib(row["pool"]), minimum]


def measure_pools() -> dict[str, int]:
    """Of graph pools and MemPools: how many, the bytes that they reserve, the captures that went to
    ours, and the most bytes that were ever live in each of ours, in whole pages, added up.
    """
    reserved: Counter[Any] = Counter()
    for segment in torch.cuda.memory_snapshot():
        reserved[tuple(segment["segment_pool_id"])] += segment["total_size"]
    del reserved[0, 0]  # of no graph
    stats = cgp.stats()
    peaks = [own["peak_allocated_bytes"] for own in stats["pools"]]
    return {
        "pools": len(reserved),
        "pool": sum(reserved.values()),
        "captures_of_ours": stats["captures"]["ours"],
        "minimum": sum(-(-peak // _PAGE) * _PAGE for peak in peaks),
    }
