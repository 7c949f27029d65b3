"""Graphs that share executables: how they are captured, and work that tells which of them ran."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import cudagraph_pool as cgp

from .work import Captured, chain, fresh, torch

if TYPE_CHECKING:
    from torch import Tensor

_MODULUS = 1_000_003


def capture(
    work: Callable[[], object], pool: cgp.GraphPool, graph: torch.cuda.CUDAGraph | None = None
) -> torch.cuda.CUDAGraph:
    """Captures `work`, which must have run before, to share executables."""
    graph = torch.cuda.CUDAGraph() if graph is None else graph
    with cgp.graph(graph, pool=pool, shared_exec=True):
        work()
    return graph


def capture_shared_chain(rows: int, pool: cgp.GraphPool) -> Captured:
    captured = Captured(torch.cuda.CUDAGraph(), fresh(rows, seed=0), fresh(rows, seed=1))
    chain(captured.x)
    torch.cuda.synchronize()
    capture(lambda: captured.y.copy_(chain(captured.x)), pool, captured.graph)
    return captured


class Trail:
    """Graphs that each leave a mark: what is left at the end tells which ran, in which order.

    They allocate nothing, so that those of different trails may run at once.
    """

    def __init__(self, pool: cgp.GraphPool, marks: int, spin: int = 0, elements: int = 1) -> None:
        self.state = torch.zeros(elements, dtype=torch.int64, device="cuda")
        self.spin = spin
        self._step(0)
        self.state.zero_()
        torch.cuda.synchronize()
        self.expected = 0
        self.graphs = [capture(partial(self._step, m), pool) for m in range(1, marks + 1)]

    def _step(self, mark: int) -> None:
        # All of the same nodes, with other numbers.
        self.state.mul_(31)
        if self.spin:
            torch.cuda._sleep(self.spin)
        self.state.add_(mark).remainder_(_MODULUS)

    def replay(self, index: int) -> None:
        self.graphs[index].replay()
        self.expected = (self.expected * 31 + index + 1) % _MODULUS

    def check(self) -> None:
        torch.cuda.synchronize()
        assert set(self.state.tolist()) == {self.expected}


class Driver:
    """Functions of CUDA's driver that torch does not have; for a stream that captures, too."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._cuda, function)(*arguments)
        assert code == 0, f"{function} failed with {code}"

    @staticmethod
    def stream() -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def memset(self, x: Tensor, value: int) -> None:
        """Of a tensor of 4-byte elements."""
        address, count = ctypes.c_uint64(x.data_ptr()), ctypes.c_size_t(x.numel())
        self.call("cuMemsetD32Async", address, ctypes.c_uint(value), count, self.stream())

    def allocate_and_free(self) -> None:
        """Memory nodes."""
        address = ctypes.c_uint64()
        self.call("cuMemAllocAsync", ctypes.byref(address), ctypes.c_size_t(1 << 16), self.stream())
        self.call("cuMemFreeAsync", address, self.stream())

    def launch_host(self, function: Any, argument: int) -> None:
        self.call("cuLaunchHostFunc", self.stream(), function, ctypes.c_void_p(argument))

    def retain(self, graph: torch.cuda.CUDAGraph, destructor: Any, argument: int) -> None:
        """Lets the graph, and what is made of it, keep something until `destructor` is called."""
        thing, moved = ctypes.c_void_p(), ctypes.c_uint(1)  # CU_GRAPH_USER_OBJECT_MOVE
        count, unordered = ctypes.c_uint(1), ctypes.c_uint(1)  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
        self.call(
            "cuUserObjectCreate",
            ctypes.byref(thing),
            ctypes.c_void_p(argument),
            destructor,
            count,
            unordered,
        )
        template = ctypes.c_void_p(graph.raw_cuda_graph())
        self.call("cuGraphRetainUserObject", template, thing, count, moved)

    def shape(self, graph: torch.cuda.CUDAGraph) -> tuple[int, int]:
        """Nodes and edges of a graph whose template is kept; not those within child graphs."""
        handle = ctypes.c_void_p(graph.raw_cuda_graph())
        nodes, edges = ctypes.c_size_t(0), ctypes.c_size_t(0)
        # Without arrays to fill, they say how long these would have to be.
        self.call("cuGraphGetNodes", handle, None, ctypes.byref(nodes))
        if hasattr(self._cuda, "cuGraphGetEdges_v2"):  # CUDA 12.3: with the edges' data
            self.call("cuGraphGetEdges_v2", handle, None, None, None, ctypes.byref(edges))
        else:
            self.call("cuGraphGetEdges", handle, None, None, ctypes.byref(edges))
        return nodes.value, edges.value

    def add_child(self, graph: torch.cuda.CUDAGraph) -> None:
        """A child graph, in the capture of the current stream."""
        stream = self.stream()
        status, number, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_size_t()
        parent, before, edges = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.call(
            "cuStreamGetCaptureInfo_v3",
            stream,
            ctypes.byref(status),
            ctypes.byref(number),
            ctypes.byref(parent),
            ctypes.byref(before),
            ctypes.byref(edges),
            ctypes.byref(count),
        )
        node = ctypes.c_void_p()
        child = ctypes.c_void_p(graph.raw_cuda_graph())
        self.call("cuGraphAddChildGraphNode", ctypes.byref(node), parent, before, count, child)
        replace = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES
        self.call(
            "cuStreamUpdateCaptureDependencies_v2",
            stream,
            ctypes.byref(node),
            None,
            ctypes.c_size_t(1),
            ctypes.c_uint(replace),
        )
