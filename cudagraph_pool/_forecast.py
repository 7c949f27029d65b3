"""What more captures will cost, from the largest one."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ._lazy import torch
from .pools import GraphPool, _require_pool
from .sizes import Size, cost, sizes_of

# What the driver keeps for an executable, fitted to graphs of 6 to 2,400 nodes on an H100, driver
# 580 (the table of docs/performance.md): 14, 28, 52, 72 and 104 MiB for all of a workload's.
_LEAST_EXEC_BYTES: Final = 112 << 10
_EXEC_BYTES: Final = 64 << 10
_NODE_BYTES: Final = 2_796


@dataclass(frozen=True, slots=True)
class Forecast:
    r"""What a set of sizes will cost, in bytes.

    Attributes:
        pool_bytes (int): What the pool will hold.
        exec_bytes (int): What the driver will keep for executables; 0 if the graph was not named.
        more_bytes (int): What of both is yet to be taken from the device.
    """

    pool_bytes: int
    exec_bytes: int
    more_bytes: int


def forecast(
    pool: GraphPool,
    sizes: Sequence[int | Sequence[int]],
    graph: torch.cuda.CUDAGraph | None = None,
) -> Forecast:
    r"""Return what the device will have less once all ``sizes`` are captured into ``pool``.

    To be called when the largest of them has been captured, where the next capture would begin: an
    engine sizes its cache by it before it captures the rest::

        with cgp.graph(largest, pool):
            outputs = model(inputs)
        cache_bytes = torch.cuda.mem_get_info()[0] - cgp.forecast(pool, sizes, largest).more_bytes

    The pool will hold the most that was allocated at once in that capture, and what graphs keep.
    Each other size is taken to keep as much as this one has allocated now, in proportion to its
    size: let go of outputs that are not kept before asking. Where several programs share a pool,
    only that of the last capture is forecast.

    Arguments:
        pool (GraphPool): The pool into which the largest size was captured last.
        sizes (sequence of int or of tuples): All that are to be captured, that one included, in
            their order; as a :class:`GraphRunner` takes them.
        graph (torch.cuda.CUDAGraph, optional): What was captured, for its nodes: a template
            (``shared_exec``, or ``keep_graph=True``). Executables take about 2.7 KiB a node and 64
            KiB each; with ``shared_exec`` there are as many as the pool allows. Default: none.

    Raises:
        RuntimeError: The pool has no capture, or was released, or the graph is no template.
        ValueError: ``sizes`` is empty, or no list of sizes, or the graph is of another pool.
    """
    _require_pool(pool)
    stats = pool.stats()
    captures = pool._adapter.captures(pool.device.index, pool.id)
    if not captures:
        raise RuntimeError(
            f"nothing was captured into pool {pool.id} yet: capture the largest size first, what "
            "the others will cost is forecast from it"
        )
    listed = sizes_of(sizes)
    held = pool_bytes(stats, captures[-1], listed)
    execs = more_execs = 0
    if graph is not None:
        each = exec_bytes(count_nodes(graph))
        if graph.pool() != pool.id:
            raise ValueError(f"graph was captured into pool {graph.pool()}, not into {pool.id}")
        count = len(listed)
        if pool._shared_exec and pool._max_execs is not None:
            count = min(count, pool._max_execs + pool._exec_budget // each)
        execs = count * each
        more_execs = max(0, count - max(1, stats["execs"])) * each
    return Forecast(held, execs, held - stats["reserved_bytes"] + more_execs)


def pool_bytes(stats: Any, largest: Any, sizes: Sequence[Size]) -> int:
    """What a pool with such stats will hold, whose last capture was the largest of all sizes."""
    captured = max(sizes, key=cost)
    others = list(sizes)
    others.remove(captured)
    before, live = largest["live_before_bytes"], stats["allocated_bytes"]
    most = largest["peak_bytes"]
    needed, kept = most - before, max(0, live - before)
    for size in others:
        part = math.prod(size) / math.prod(captured)
        most = max(most, live + needed * part)
        live += kept * part
    page = int(stats["page_bytes"])
    return int(max(stats["reserved_bytes"], math.ceil(most / page) * page))


def exec_bytes(nodes: int) -> int:
    """What the driver keeps for an executable of so many nodes."""
    return max(_LEAST_EXEC_BYTES, _EXEC_BYTES + _NODE_BYTES * nodes)


def count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """The nodes of a graph that was captured as a template."""
    if not hasattr(graph, "raw_cuda_graph"):
        raise TypeError(f"graph is {graph!r}, but must be a torch.cuda.CUDAGraph")
    count = ctypes.c_size_t()
    template = ctypes.c_void_p(graph.raw_cuda_graph())
    error = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(template, None, ctypes.byref(count))
    if error:
        raise RuntimeError(f"cuGraphGetNodes failed with CUDA driver error {error}")
    return count.value
