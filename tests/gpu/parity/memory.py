"""Where tensors lie: what the tests of MemPool and of use_pool ask."""

from __future__ import annotations

import gc
from typing import Any

from ..work import adapter, torch

MIB = 1 << 20


def ids() -> list[tuple[int, int]]:
    return adapter.pool_ids(torch.cuda.current_device())


def mapped_pages(id: tuple[int, int], device: int = 0) -> list[int]:
    """The pages of a pool of ours by the addresses behind which they are mapped: one that stands
    behind several is listed as often.
    """
    ranges = adapter.snapshot(device, id)["ranges"]
    return [page for mapped in ranges for page in mapped["pages"]]


def new_bytes(mib: int, value: int = 1) -> torch.Tensor:
    return torch.full((mib * MIB,), value, dtype=torch.uint8, device="cuda")


def segments(id: tuple[int, int]) -> list[dict[str, Any]]:
    shown = torch.cuda.memory_snapshot(include_traces=False)
    return [s for s in shown if tuple(s["segment_pool_id"]) == tuple(id)]


def inside(tensor: torch.Tensor, id: tuple[int, int]) -> bool:
    """Whether the tensor, which lives, lies in memory of the pool."""
    return any(
        s["address"] <= tensor.data_ptr() < s["address"] + s["total_size"] for s in segments(id)
    )


def settle() -> None:
    """Only what lives is left, so that reserved memory can be compared."""
    torch.cuda.synchronize()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def reserved(id: tuple[int, int]) -> int:
    return int(sum(s["total_size"] for s in segments(id)))
