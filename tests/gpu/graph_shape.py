"""How many nodes and edges a captured graph has, asked of the driver."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class GraphShape:
    """Of the graph itself; what stands in child graphs and conditional bodies is not counted."""

    nodes: int
    edges: int


def shape_of(graph: torch.cuda.CUDAGraph) -> GraphShape:
    """Of a graph made with ``keep_graph=True`` whose capture has ended."""
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    cuda = driver()
    nodes, edges = ctypes.c_size_t(0), ctypes.c_size_t(0)
    # Without arrays to fill, they say how long these would have to be.
    require(cuda.cuGraphGetNodes(handle, None, ctypes.byref(nodes)), "cuGraphGetNodes")
    if hasattr(cuda, "cuGraphGetEdges_v2"):  # CUDA 12.3: with the edges' data
        code = cuda.cuGraphGetEdges_v2(handle, None, None, None, ctypes.byref(edges))
    else:
        code = cuda.cuGraphGetEdges(handle, None, None, ctypes.byref(edges))
    require(code, "cuGraphGetEdges")
    return GraphShape(nodes.value, edges.value)


@functools.cache
def driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def require(code: int, call: str) -> None:
    if code != 0:
        raise RuntimeError(f"{call} failed with CUDA error {code}")
