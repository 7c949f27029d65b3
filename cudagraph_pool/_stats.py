"""Every graph pool of this process, and where its captures went."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, Final

from ._adapter import loaded_adapter

if TYPE_CHECKING:
    from ._graphs import GraphPool

_LARGEST: Final = 2**64 - 1  # in ids that torch never makes


def stats() -> dict[str, Any]:
    r"""Return what every graph pool of this process holds, and where captures went.

    Pools of every kind are there: of a :class:`GraphPool`, of a :class:`torch.cuda.MemPool`, of
    :func:`torch.cuda.graph_pool_handle` (those of ``torch.compile``'s graph trees are such), of one
    capture that named none, and the one that ``enable(share_captures=True)`` lets these share. What
    PyTorch's own allocator holds is not: :func:`torch.cuda.memory_stats` counts both.

    A dictionary with

    - ``captures``: how many have begun since the package was first enabled, ``ours`` in these pools
      and ``base`` in PyTorch's own; and of the latter ``base_reasons``: ``disabled`` (the package
      was), ``mempool`` (into a :class:`torch.cuda.MemPool` that stays with PyTorch's allocator) and
      ``older_pool`` (into one that it had before).
    - ``pools``: a list, each with ``device``, ``id``, ``kind``, ``users`` (graphs and objects that
      hold it), what :meth:`GraphPool.stats` returns, and ``graphs``: what each capture took, in
      their order (the last 65,536). ``added_bytes`` is the physical memory that the pool got
      meanwhile, ``peak_bytes`` the most that was allocated in it at once, ``live_before_bytes`` of
      that what lived when the capture began, ``allocations`` how many it made, after
      ``first_allocation`` of the pool. A capture that failed counts, too.
    - ``execs``: a list, for each ``device`` whose graphs share executables by
      ``enable(shared_exec=True)`` how many there are, as :meth:`GraphPool.stats` says of its own.

    Without a GPU, or before anything was enabled, there are none.
    """
    adapter: Any = loaded_adapter()
    if adapter is None:
        reasons = dict.fromkeys(("disabled", "mempool", "older_pool"), 0)
        captures = {"ours": 0, "base": 0, "base_reasons": reasons}
        return {"captures": captures, "pools": [], "execs": []}
    import torch

    pools = []
    for device in range(torch.cuda.device_count()):
        for name in adapter.pool_ids(device):
            with contextlib.suppress(RuntimeError):  # given back meanwhile
                pools.append(pool_stats(adapter, device, name))
    captures = {**adapter.capture_counts(), "base_reasons": adapter.base_captures()}
    shared = sys.modules.get("cudagraph_pool._shared_capture")
    caches = {} if shared is None else shared._caches
    execs = [{"device": device, **cache.stats()} for device, cache in caches.items()]
    return {"captures": captures, "pools": pools, "execs": execs}


def pool_stats(adapter: Any, device: int, id: tuple[int, int]) -> dict[str, Any]:
    """What :func:`stats` says of one pool."""
    owner = _owner(device, id)
    return {
        "device": device,
        "id": id,
        "kind": "GraphPool" if owner else _kind(adapter, device, id),
        "users": adapter.use_count(device, id),
        **(owner.stats() if owner else adapter.stats(device, id)),
        "graphs": adapter.captures(device, id),
    }


def _owner(device: int, id: tuple[int, int]) -> GraphPool | None:
    graphs: Any = sys.modules.get("cudagraph_pool._graphs")
    owner = None if graphs is None else graphs._pools.get((device, id))
    return owner if owner is not None and owner._open else None


def _kind(adapter: Any, device: int, id: tuple[int, int]) -> str:
    if id[0] == _LARGEST:
        return "pluggable allocator" if id[1] == _LARGEST else "shared captures"
    if adapter.is_mempool(device, id):
        return "MemPool"
    return "one capture's own" if id[1] == 0 else "graph_pool_handle"
