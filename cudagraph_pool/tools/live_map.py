"""Memory maps of the pools of this process, from torch's memory history."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .._adapter import load_adapter
from . import plot
from .costs import of_pool
from .memory_map import MemoryMap, Operation, map_of_history, operation_of


def histories() -> list[list[Operation]]:
    """Of each device what was done since the history was switched on; none if it is off."""
    import torch

    if not torch._C._cuda_isHistoryEnabled():
        return []
    traces = torch.cuda.memory._snapshot()["device_traces"]
    return [list(filter(None, map(operation_of, trace))) for trace in traces]


def map_of_pool(
    history: list[list[Operation]], device: int, id: tuple[int, int]
) -> MemoryMap | None:
    """None if the history has nothing of the pool, or not what tells which graph made what."""
    if device >= len(history):
        return None
    drawn = map_of_history(history[device], load_adapter().snapshot(device, id))
    # Graph trees go back to what lived before; that is more in the history than was allocated.
    return drawn if drawn.placed and drawn.first_allocation >= 0 else None


def draw_pool(pool: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """See :meth:`GraphPool.plot`.

    Arguments:
        pool: What :func:`cudagraph_pool.stats` says of it.
    """
    plot.require_matplotlib()
    drawn = map_of_pool(histories(), pool["device"], pool["id"])
    if drawn is None:
        raise RuntimeError(
            f"the memory history has nothing of pool {pool['id']}: call "
            "torch.cuda.memory._record_memory_history(context=None) before the captures"
        )
    plot.draw(of_pool(pool, drawn), path)
