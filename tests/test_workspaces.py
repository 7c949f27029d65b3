"""Which workspaces a graph computes in, of graphs that are made up."""

from __future__ import annotations

import ctypes
import functools
import gc
import struct
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from cudagraph_pool import pools
from cudagraph_pool._guard import workspaces as _workspaces
from cudagraph_pool.capture import graph

# Address, bytes, and the stream it is for.
SPANS = [(0x10000, 0x1000, 0x30), (0x20000, 0x1000, 0x40)]


class FakeCuda:
    """The driver's functions that read a graph."""

    def __init__(self) -> None:
        self.mode = 0
        self._kept: list[Any] = []  # what arguments lie in
        self._nodes: list[tuple[int, Any]] = []
        self._sizes: list[list[int]] = []

    def add_memset(self, target: int) -> None:
        self._nodes.append((_workspaces._MEMSET, target))

    def add_kernel(self, *arguments: bytes, of_library: bool = False) -> None:
        buffers = [ctypes.create_string_buffer(argument, len(argument)) for argument in arguments]
        pointers = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        self._kept += [buffers, pointers]
        self._sizes.append([*map(len, arguments)])
        name = "kernel" if of_library else "function"
        fields = {"arguments": ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))}
        self._nodes.append((_workspaces._KERNEL, fields | {name: len(self._sizes)}))

    def add_kernel_of_cublas(self, arguments: bytes) -> None:
        """All of them in one buffer."""
        buffer = ctypes.create_string_buffer(arguments, len(arguments))
        size = ctypes.c_size_t(len(arguments))
        extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 0)
        self._kept += [buffer, size, extra]
        fields = {"extra": ctypes.cast(extra, ctypes.POINTER(ctypes.c_void_p)), "function": 1}
        self._nodes.append((_workspaces._KERNEL, fields))

    def __getattr__(self, function: str) -> Any:
        return functools.partial(self.answer, function)

    def answer(self, function: str, *given: Any) -> int:
        match function, given:
            case "cuThreadExchangeStreamCaptureMode", (mode,):
                self.mode, mode._obj.value = mode._obj.value, self.mode
            case "cuStreamGetCaptureInfo_v3", (stream, _, _, graph, *_):
                graph._obj.value = stream.value
            case "cuGraphGetNodes", (_, nodes, count):
                if nodes is not None:
                    nodes[:] = range(1, len(self._nodes) + 1)
                count._obj.value = len(self._nodes)
            case "cuGraphNodeGetType", (node, kind):
                kind._obj.value = self._nodes[node.value - 1][0]
            case "cuGraphMemsetNodeGetParams", (node, memset):
                memset[0] = self._nodes[node.value - 1][1]
            case "cuGraphKernelNodeGetParams_v2", (node, kernel):
                for name, value in self._nodes[node.value - 1][1].items():
                    setattr(kernel._obj, name, value)
            case "cuFuncGetParamInfo" | "cuKernelGetParamInfo", (kernel, number, _, size):
                assert self.mode == 2, "it may load the function"
                sizes = self._sizes[kernel.value - 1]
                if number.value >= len(sizes):
                    return 1
                size._obj.value = sizes[number.value]
            case _:
                raise AssertionError(function)
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    adapter = SimpleNamespace(blas_workspaces=lambda: SPANS)
    monkeypatch.setattr(_workspaces, "load_adapter", lambda: adapter)
    monkeypatch.setattr(_workspaces, "_cuda", lambda: fake)
    return fake


def words(*values: int) -> bytes:
    return struct.pack(f"{len(values)}Q", *values)


def test_layout_of_the_drivers_structure() -> None:
    kernel = _workspaces._Kernel
    offsets = [getattr(kernel, name).offset for name, _ in kernel._fields_]
    assert offsets == [0, 8, 40, 48, 56, 64]
    assert ctypes.sizeof(kernel) == 72


def test_no_node_has_an_address_of_a_workspace(cuda: FakeCuda) -> None:
    assert _workspaces.used_by(1) == {}
    cuda.add_memset(0xFFF8)
    cuda.add_kernel(words(0x11000), b"\x00\x01\x01\x00", words(0x21000, 0x1FFFF))
    cuda.add_kernel()
    assert _workspaces.used_by(1) == {}
    assert cuda.mode == 0


@pytest.mark.parametrize("address", [0x10000, 0x10FF8])
@pytest.mark.parametrize("of_library", [False, True])
def test_an_argument_of_a_kernel(cuda: FakeCuda, address: int, of_library: bool) -> None:
    cuda.add_kernel(words(1), b"\x07", words(2, address, 3), of_library=of_library)
    assert _workspaces.used_by(1) == {0x10000: 0x30}
    assert cuda.mode == 0


def test_a_memset_and_a_kernel_of_a_capture(cuda: FakeCuda) -> None:
    cuda.add_memset(0x10010)
    cuda.add_kernel_of_cublas(words(0x20000))
    assert _workspaces.used_by_capture(0x50) == {0x10000: 0x30, 0x20000: 0x40}
    assert _workspaces.used_by_capture(0) == {}, "its capture has failed"


def test_a_stream_is_one_pools_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self, cuda_stream: int, device: object) -> None:
            self.cuda_stream = cuda_stream

    made = iter([0x10, 0x20, 0x30])
    adapter = SimpleNamespace(make_stream=lambda device: next(made))
    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    monkeypatch.setattr(pools, "_idle_streams", {})

    def new_pool() -> Any:
        pool = pools.GraphPool.__new__(pools.GraphPool)
        pool._device, pool._adapter = torch.device("cuda", 0), adapter
        return pool

    first, second = new_pool(), new_pool()
    assert first._own_stream is first._own_stream
    assert (first._own_stream.cuda_stream, second._own_stream.cuda_stream) == (0x10, 0x20)
    graph = first._own_stream  # has it
    del first
    gc.collect()
    third = new_pool()
    assert third._own_stream.cuda_stream == 0x30
    del graph
    gc.collect()
    assert new_pool()._own_stream.cuda_stream == 0x10


class Context(SimpleNamespace):
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        if self.fails:
            raise RuntimeError("invalidated")


def made_up_capture(monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> Any:
    """A ``cudagraph_pool.graph`` on stream 0x10, of a graph that has no methods."""
    stream = SimpleNamespace(cuda_stream=0x10)
    capture: Any = graph.__new__(graph)
    capture._graph, capture._shared_exec = SimpleNamespace(), False
    capture._context, capture._stream = Context(fails=fails), stream
    capture._pool = SimpleNamespace(_require_open=lambda: None, _key=(0, (0, 1)))
    capture._adapter = SimpleNamespace(
        hold_workspaces=lambda stream: [], name_capture=lambda device, pool: (0, 0)
    )
    monkeypatch.setattr("cudagraph_pool.capture._require_enabled", lambda what: None)
    monkeypatch.setattr(graph, "_check_devices", lambda self: None)
    monkeypatch.setattr(graph, "_current_stream", lambda self: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return capture


def test_what_a_capture_has_computed_in_stays_whoever_goes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Workspace: ...

    by_stream = {0x10: Workspace()}  # torch's map
    was_there = weakref.ref(by_stream[0x10])
    capture = made_up_capture(monkeypatch)
    capture._adapter.hold_workspaces = lambda stream: [by_stream[stream]]
    with capture:
        by_stream[0x10] = Workspace()  # another graph went, and this one goes on
    graph = capture._graph
    del capture
    assert was_there() is not None
    del graph
    gc.collect()
    assert was_there() is None


def test_a_capture_that_fails_is_reset_before_its_pool_forgets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From torch 2.14 on a graph that failed holds its pool until then."""
    calls: list[str] = []
    capture = made_up_capture(monkeypatch, fails=True)
    capture._graph.reset = lambda: calls.append("reset")
    monkeypatch.setattr(graph, "_clean_up", lambda self, before: calls.append("clean up"))
    with pytest.raises(RuntimeError, match="invalidated"), capture:
        pass
    assert calls == ["reset", "clean up"]
