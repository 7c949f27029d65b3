"""Which attributes of kernels a driver tells, and what an update makes of those it lets be changed.

    python benchmarks/driver_facts/kernel_attributes.py

The key of graphs that share executables holds the attributes that are named in cuda.h
(docs/graph_updates.md); what a driver tells beside them is what the next key has to hold. The
launch attributes of newer headers are also set on a kernel of one graph, and an executable of
another is updated to it: success says nothing of whether they are carried over, a refusal does.
"""

from __future__ import annotations

import ctypes

import torch

_LAUNCH_ATTRIBUTES = range(1, 33)
_FUNCTION_ATTRIBUTES = range(33)
_SETTABLE = (
    16,
    17,
    18,
)  # NVLink centric scheduling, portable cluster size mode, shared memory mode
_VALUE_BYTES = 64

_cuda = ctypes.CDLL("libcuda.so.1")


def must(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code}")


def captured() -> torch.cuda.CUDAGraph:
    """A graph of one kernel."""
    x = torch.zeros(1024, device="cuda")
    x.add_(1)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        x.add_(1)
    return graph


def kernel_of(graph: torch.cuda.CUDAGraph) -> ctypes.c_void_p:
    count = ctypes.c_size_t(1)
    node = ctypes.c_void_p()
    template = ctypes.c_void_p(graph.raw_cuda_graph())
    must(_cuda.cuGraphGetNodes(template, ctypes.byref(node), ctypes.byref(count)))
    return node


def function_of(node: ctypes.c_void_p) -> ctypes.c_void_p:
    """The first member of CUDA_KERNEL_NODE_PARAMS, as its first form has it."""
    parameters = (ctypes.c_void_p * 32)()
    must(_cuda.cuGraphKernelNodeGetParams(node, ctypes.byref(parameters)))
    return ctypes.c_void_p(parameters[0])


def launch_attribute(node: ctypes.c_void_p, id: int) -> str:
    value = ctypes.create_string_buffer(_VALUE_BYTES)
    code = _cuda.cuGraphKernelNodeGetAttribute(node, id, value)
    return f"error {code}" if code else value.raw.rstrip(b"\0").hex() or "0"


def function_attribute(function: ctypes.c_void_p, id: int) -> str:
    value = ctypes.c_int()
    code = _cuda.cuFuncGetAttribute(ctypes.byref(value), id, function)
    return f"error {code}" if code else str(value.value)


def updated(id: int, number: int) -> str:
    """What an update from a graph without the attribute to one with it says."""
    before, after = captured(), captured()
    value = ctypes.create_string_buffer(_VALUE_BYTES)
    value[0] = bytes([number])
    code = _cuda.cuGraphKernelNodeSetAttribute(kernel_of(after), id, value)
    if code:
        return f"cannot be set to {number}: error {code}"
    told = launch_attribute(kernel_of(after), id)
    exec_ = ctypes.c_void_p()
    template = ctypes.c_void_p(before.raw_cuda_graph())
    must(_cuda.cuGraphInstantiateWithFlags(ctypes.byref(exec_), template, ctypes.c_ulonglong(0)))
    result = (ctypes.c_uint64 * 8)()
    target = ctypes.c_void_p(after.raw_cuda_graph())
    code = _cuda.cuGraphExecUpdate_v2(exec_, target, ctypes.byref(result))
    must(_cuda.cuGraphExecDestroy(exec_))
    outcome = "taken" if code == 0 else f"refused: error {code}, result {result[0] & 0xFFFFFFFF}"
    return f"set to {number}, told as {told}: the update is {outcome}"


def main() -> None:
    version = ctypes.c_int()
    must(_cuda.cuDriverGetVersion(ctypes.byref(version)))
    print(f"{torch.cuda.get_device_name()}, a driver for CUDA {version.value}")
    graph = captured()
    node = kernel_of(graph)
    function = function_of(node)
    for number in _LAUNCH_ATTRIBUTES:
        print(f"launch attribute {number}: {launch_attribute(node, number)}")
    for number in _FUNCTION_ATTRIBUTES:
        print(f"function attribute {number}: {function_attribute(function, number)}")
    for number in _SETTABLE:
        print(f"launch attribute {number}: {updated(number, 1)}")


if __name__ == "__main__":
    main()
