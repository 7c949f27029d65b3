"""Which of cuBLAS's workspaces a graph computes in: until torch 2.15 a thread has one a stream."""

import ctypes
import functools
import itertools
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from .._adapter import load_adapter

_KERNEL, _MEMSET = 0, 2  # CUgraphNodeType
_RELAXED = 2  # CUstreamCaptureMode
_POINTER, _SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_...

# By address: the stream that it is for.
Workspaces = dict[int, int]


class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("launch", ctypes.c_uint * 7),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.POINTER(ctypes.c_void_p)),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def used_by(graph: int) -> Workspaces:
    """Those within which a kernel or memset of a cudaGraph_t has an address. A kernel that gets it
    in memory is not seen, nor are graphs within the graph.
    """
    spans = load_adapter().blas_workspaces()
    if not spans:
        return {}
    # Asking after a function may load it, which breaks other threads' captures, or this one's.
    mode = ctypes.c_int(_RELAXED)
    _cuda().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        words = sorted(set(_words(graph)))
    finally:
        _cuda().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return {
        address: stream
        for address, size, stream in spans
        if bisect_left(words, address) < bisect_left(words, address + size)
    }


def used_by_capture(stream: int) -> Workspaces:
    """Those of the graph that is being captured on the stream."""
    status, number, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_size_t()
    graph, nodes, edges = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _cuda().cuStreamGetCaptureInfo_v3(
        ctypes.c_void_p(stream), *map(ctypes.byref, (status, number, graph, nodes, edges, count))
    )
    return {} if graph.value is None else used_by(graph.value)  # the capture has failed


@functools.cache
def _cuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _words(graph: int) -> Iterator[int]:
    """What may be an address among the arguments of its nodes."""
    count = ctypes.c_size_t()
    _cuda().cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    _cuda().cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count))
    for node in map(ctypes.c_void_p, nodes):
        kind = ctypes.c_int()
        _cuda().cuGraphNodeGetType(node, ctypes.byref(kind))
        if kind.value == _MEMSET:
            target = (ctypes.c_uint64 * 5)()  # CUDA_MEMSET_NODE_PARAMS, where it comes first
            _cuda().cuGraphMemsetNodeGetParams(node, target)
            yield target[0]
        elif kind.value == _KERNEL:
            kernel = _Kernel()
            _cuda().cuGraphKernelNodeGetParams_v2(node, ctypes.byref(kernel))
            for address, size in _arguments(kernel):
                yield from (ctypes.c_uint64 * (size // 8)).from_address(address)


def _arguments(kernel: _Kernel) -> Iterator[tuple[int, int]]:
    """Addresses and bytes of its arguments: all together, as cuBLAS's own are, or one by one."""
    if kernel.extra:
        pairs = {}
        for place in itertools.count(step=2):
            if kernel.extra[place] is None:
                break
            pairs[kernel.extra[place]] = kernel.extra[place + 1]
        yield pairs[_POINTER], ctypes.c_size_t.from_address(pairs[_SIZE]).value
    if not kernel.arguments:
        return
    # Drivers before CUDA 12.4 cannot say how long arguments are.
    name = "cuFuncGetParamInfo" if kernel.function else "cuKernelGetParamInfo"
    info = getattr(_cuda(), name, lambda *_: 1)
    function = ctypes.c_void_p(kernel.function or kernel.kernel)
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    for number in itertools.count():
        if info(function, ctypes.c_size_t(number), ctypes.byref(offset), ctypes.byref(size)):
            break
        yield kernel.arguments[number], size.value
