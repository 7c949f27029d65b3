"""Memory maps of the pools of this process, from torch's memory history."""

from __future__ import annotations

from typing import Any

from ._allocator import load_adapter
from ._memory_map import MemoryMap, map_of_history, operation_of


def map_of_pool(device: int, id: tuple[int, int]) -> MemoryMap | None:
    """None if the history has nothing of the pool, or not what tells which graph made what."""
    import torch

    if not torch._C._cuda_isHistoryEnabled():
        return None
    history: Any = torch.cuda.memory._snapshot()["device_traces"]
    operations = filter(None, map(operation_of, history[device]))
    drawn = map_of_history(operations, load_adapter().snapshot(device, id))
    # Graph trees go back to what lived before; that is more in the history than was allocated.
    return drawn if drawn.placed and drawn.first_allocation >= 0 else None
