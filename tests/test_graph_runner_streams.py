"""On which streams GraphRunner works: its own order, among streams that stand in for CUDA's.

A stream that waits for one that is captured is drawn into that capture, as CUDA has it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from cpu_captures import CpuCaptures, CpuRunner, double, rows
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cudagraph_pool.runner.captures import Captures, Graph
from cudagraph_pool.runner.program import _address_of as _address


class Stream:
    """Attributes:
    capture: The one that it is part of.
    drawn: The captures of others that it was drawn into.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.cuda_stream = id(self)
        self.capture = ""
        self.drawn: list[str] = []
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)
        if other is not self and other.capture:
            self.drawn.append(other.capture)


class Cuda:
    """Which stream is whose current one, and which memory which streams are known to use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.default, self.capturing = Stream("default"), Stream("capture")
        self.allocated_on: dict[int, Stream] = {}
        self.recorded: set[tuple[int, str]] = set()
        self.written: set[tuple[int, str]] = set()
        self._of_thread = threading.local()
        empty = torch.empty

        def allocate(*args: Any, **kwargs: Any) -> Tensor:
            made: Tensor = empty(*args, **kwargs)
            self.allocated_on[_address(made)] = self.current()
            return made

        def record(tensor: Tensor, stream: Stream) -> None:
            self.recorded.add((_address(tensor), stream.name))

        monkeypatch.setattr(torch, "empty", allocate)
        monkeypatch.setattr(Tensor, "record_stream", record)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current())
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        is_capturing = "_cuda_isCurrentStreamCapturing"
        monkeypatch.setattr(torch._C, is_capturing, lambda: bool(self.current().capture))
        raw = "_cuda_getCurrentRawStream"
        monkeypatch.setattr(torch._C, raw, lambda device: self.current().cuda_stream, raising=False)

    def current(self) -> Stream:
        stream: Stream = getattr(self._of_thread, "stream", self.default)
        return stream

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = self.current()
        self._of_thread.stream = stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    def unknown_uses(self) -> list[tuple[str, str]]:
        """On which stream memory was allocated, and on which it was written without its knowing."""
        return [
            (self.allocated_on[block].name, stream)
            for block, stream in self.written - self.recorded
            if block in self.allocated_on and self.allocated_on[block].name != stream
        ]


class Writes(TorchDispatchMode):  # type: ignore[misc]
    """Notes on which stream tensors are copied to."""

    def __init__(self, cuda: Cuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith(("aten::copy_", "aten::_foreach_copy_", "aten::fill_")):
            stream = self._cuda.current().name
            self._cuda.written |= {(_address(target), stream) for target in tree_leaves(args[0])}
        return func(*args, **(kwargs or {}))


class StreamCaptures(CpuCaptures):
    """Captures that do with streams what those of a GPU do."""

    follow = Captures.follow
    on_capture_stream = Captures.on_capture_stream
    lock = Captures.lock
    _own_workspace = False

    def __init__(self, cuda: Cuda) -> None:
        super().__init__()
        self._cuda = cuda
        self._stream = cuda.capturing

    def capture(self, work: Callable[[], None]) -> Graph:
        stream = self._cuda.current()
        assert stream is self._cuda.capturing
        stream.capture = f"of {threading.current_thread().name}"
        try:
            return super().capture(work)
        finally:
            stream.capture = ""


class Runner(CpuRunner):
    def _new_captures(self, pool: Any, shared_exec: Any, own_workspace: Any) -> Any:
        self.captures = pool
        return pool


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def new_runner(cuda: Cuda, function: Any, pool: Any = None, sizes: Any = (8,)) -> Runner:
    pool = StreamCaptures(cuda) if pool is None else pool
    return Runner(function, sizes=sizes, pool=pool, progress=False)


@pytest.mark.parametrize("one_pool", [False, True])
def test_calls_are_not_drawn_into_a_capture_of_another_thread(cuda: Cuda, one_pool: bool) -> None:
    captured, called = threading.Event(), threading.Event()

    def slow(x: Tensor) -> Tensor:
        if cuda.capturing.capture:
            captured.set()
            called.wait(10)
        return x + 1

    first = new_runner(cuda, double)
    second = new_runner(cuda, slow, pool=first.captures if one_pool else None)
    first.capture(rows(8))
    mine, other = Stream("mine"), Stream("other")

    def capture() -> None:
        with cuda.on(other):
            second.capture(rows(8))

    thread = threading.Thread(target=capture)
    thread.start()
    assert captured.wait(10)
    with cuda.on(mine):
        first(rows(8))
    called.set()
    thread.join()
    assert cuda.capturing.drawn == mine.drawn == other.drawn == []


def test_a_stream_that_was_another_pools_is_waited_for(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = StreamCaptures(cuda)
    done: list[str] = []
    monkeypatch.setattr(pool, "_own_workspace", True)
    monkeypatch.setattr(pool, "synchronize", lambda: done.append("waited"))

    def ran(x: Tensor) -> Tensor:
        done.append("ran")
        return x * 2

    new_runner(cuda, ran, pool)(rows(8))
    assert done[:2] == ["waited", "ran"]


def test_memory_knows_the_streams_of_its_calls(cuda: Cuda) -> None:
    """Though it was allocated on the stream that captures, and though the pool's turn stays."""
    with Writes(cuda):
        pool = StreamCaptures(cuda)
        runners = [new_runner(cuda, function, pool) for function in (double, lambda x: x + 1)]
        for run in runners:
            run.capture(rows(8))
        for run in runners:
            run(rows(8))
        both_ways = new_runner(cuda, nn.Linear(6, 3))
        for _ in range(2):
            both_ways(rows(8)).sum().backward()
            with torch.no_grad():
                both_ways(rows(8))
        growing = new_runner(cuda, double, sizes="auto")
        for n in (4, 16, 4):
            growing(rows(n))
        assert cuda.written
        assert cuda.unknown_uses() == []
        with cuda.on(Stream("other")):
            for n in (16, 4):
                growing(rows(n))
            both_ways(rows(8)).sum().backward()
    assert "other" in {name for _, name in cuda.written}
    assert cuda.unknown_uses() == []
