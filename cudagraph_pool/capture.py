"""Captures into a pool."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import Any, ClassVar

import torch

from . import _leases, _shared_exec
from .pools import GraphPool, _require_pool
from .switch import _require_booleans, _require_enabled, _require_one_of, _require_type


class graph:  # noqa: N801
    r"""Context manager that captures CUDA work into a :class:`torch.cuda.CUDAGraph`.

    :class:`torch.cuda.graph` on a :class:`GraphPool`. It also checks its arguments first. After a
    capture that failed it restores the current stream, the pool and the device's random generator,
    so that eager work and the next capture go on. After one that succeeded the current stream waits
    for what PyTorch ran on the capture's stream.

    Arguments:
        cuda_graph (torch.cuda.CUDAGraph): Graph object used for capture.
        pool (GraphPool): The pool that the capture allocates in.
        stream (torch.cuda.Stream, optional): The current stream of the context. Default: one for
            each device, shared by all captures.
        capture_error_mode (str, optional): ``"global"``, ``"thread_local"`` or ``"relaxed"``, as
            for :class:`torch.cuda.graph`.
        shared_exec (bool, optional): Run the graph by executables that the pool's graphs share, so
            that it costs no device memory of its own. ``cuda_graph`` works as ever. A replay that
            finds no executable of its graph updates another graph's, at 1 to 2 microseconds of CPU
            time for each node, or makes a new one, at 4 to 6; ``instantiate()`` does so ahead.
            Graphs that run at the same time get executables of their own. Graphs with child graphs,
            conditional or memory nodes keep their own, as do all on a driver that is too new:
            :meth:`GraphPool.stats` counts them by reason (``exec_alone``). A replay waits while
            another thread's makes a switch, and up to a tenth of a second for an executable that
            has to make room and still runs. torch's hooks on instantiation are not called.
            Default: what the pool was made with.
        own_workspace (bool): Capture on a stream of the pool's own, so that graphs of other pools
            may run at the same time. Until torch 2.15 cuBLAS has one workspace for each stream and
            thread: products captured on one stream overwrite each other's, whatever their pools.
            Costs a workspace for each such pool and thread: 32 MiB on Hopper, 8 on most others, and
            1 for cuBLASLt. They are kept for later such pools. Default: ``False``.

    Raises:
        RuntimeError: The package is not enabled, the pool was released, or the stream captures.
        ValueError: The pool, the current device and the stream are not of one device, the capture
            error mode is unknown, or a stream is given with ``own_workspace``.
    """

    _capture_streams: ClassVar[dict[int, torch.cuda.Stream]] = {}

    def __init__(
        self,
        cuda_graph: torch.cuda.CUDAGraph,
        pool: GraphPool,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
        *,
        shared_exec: bool | None = None,
        own_workspace: bool = False,
    ) -> None:
        self._adapter = _require_enabled("cudagraph_pool.graph")
        _require_pool(pool)
        _require_type(torch.cuda.CUDAGraph, "a torch.cuda.CUDAGraph", cuda_graph=cuda_graph)
        _require_type(torch.Stream | None, "a torch.cuda.Stream", stream=stream)
        modes = ("global", "thread_local", "relaxed")
        _require_one_of(modes, capture_error_mode=capture_error_mode)
        self._graph: Any = cuda_graph
        self._pool = pool
        self._stream: Any = stream
        self._shared_exec = pool._shared_exec if shared_exec is None else shared_exec
        _require_booleans(shared_exec=self._shared_exec, own_workspace=own_workspace)
        if own_workspace and stream is not None:
            raise ValueError("own_workspace=True captures on the pool's own stream: pass no stream")
        self._kept_template = False
        self._check_devices()
        if stream is None:
            own = own_workspace and pool._own_stream
            self._stream = own or self._capture_stream(pool.device)
        self._before: torch.cuda.Stream | None = None
        self._held: object = None
        self._context = self._new_context(capture_error_mode)

    def __enter__(self) -> None:
        _require_enabled("cudagraph_pool.graph")
        self._pool._require_open()
        self._check_devices()
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a capture is under way on the current stream; captures do not nest: "
                "end that one first"
            )
        self._before = self._current_stream()
        if self._shared_exec:
            self._kept_template = _shared_exec.keep_template(self._graph)
        try:
            # Another graph that goes during this capture must not take its workspaces along.
            self._held = self._hold_workspaces()
            self._context.__enter__()
        except BaseException:
            self._clean_up(self._before)
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        before, self._before = self._before, None
        held, self._held = self._held, None
        try:
            self._context.__exit__(exc_type, exc_value, traceback)
            # A capture begins with eager work: PyTorch writes the seed of random numbers on its
            # stream. On a busy GPU that could overwrite a replay's, which then draws others.
            if before is not None and before != self._stream:
                before.wait_stream(self._stream)
            # The graph keeps its stream from other pools, and cuBLAS's workspace alive: from torch
            # 2.12 to 2.14 any graph that goes frees it.
            self._graph._keeps = self._stream, held, self._hold_workspaces()
            _leases.name_capture(self._adapter, self._graph, *self._pool._key)
        except BaseException:
            # From torch 2.14 on a graph that failed releases its pool late; captured again, never.
            with contextlib.suppress(RuntimeError):
                self._graph.reset()
            self._clean_up(before)
            raise
        if self._shared_exec:
            device = self._pool.device.index
            _shared_exec.share(self._graph, self._pool._execs, device, self._kept_template)

    def _hold_workspaces(self) -> object:
        return self._adapter.hold_workspaces(self._stream.cuda_stream)

    def _current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream()

    def _new_context(self, capture_error_mode: str) -> Any:
        arguments = {"pool": self._pool.id, "capture_error_mode": capture_error_mode}
        return torch.cuda.graph(self._graph, stream=self._stream, **arguments)

    @classmethod
    def _capture_stream(cls, device: torch.device) -> torch.cuda.Stream:
        """One for each device: torch.cuda.graph's single one lies on the first that captured."""
        stream = cls._capture_streams.get(device.index)
        if stream is None:  # another thread may be here too
            stream = cls._capture_streams.setdefault(device.index, torch.cuda.Stream(device))
        return stream

    def _clean_up(self, before: torch.cuda.Stream | None) -> None:
        """Undoes what torch.cuda.graph leaves behind when it fails half-way."""
        if before is not None:
            torch.cuda.set_stream(before)
        if self._shared_exec:
            _shared_exec.keep_template(self._graph, self._kept_template)
        self._adapter.end_failed_capture(*self._pool._key)
        self._free_generator()

    def _free_generator(self) -> None:
        """In torch 2.11 the generator takes a failed capture to be under way until the next one."""
        empty = torch.cuda.CUDAGraph(keep_graph=True)
        stream = torch.cuda.Stream(self._pool.device)  # the capture's may be one that cannot
        # This may fail as the capture did; the caller is told the first error.
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            with torch.cuda.stream(stream):
                empty.capture_begin(capture_error_mode="thread_local")
                empty.capture_end()
            # As after a capture that succeeds.
            torch.cuda.current_stream().wait_stream(stream)

    def _check_devices(self) -> None:
        current = torch.cuda.current_device()
        if self._pool.device.index != current:
            raise ValueError(
                f"the pool is on {self._pool.device}, but the current device is cuda:{current}; "
                f"capture inside `with torch.cuda.device({self._pool.device.index})`"
            )
        if self._stream is not None and self._stream.device != self._pool.device:
            raise ValueError(
                f"the pool is on {self._pool.device}, but the stream is on {self._stream.device}"
            )


class _next_graph(graph):  # noqa: N801
    """One of several captures on ``stream``, the current one: without torch's waits before each."""

    def _current_stream(self) -> torch.cuda.Stream:
        return self._stream

    @contextlib.contextmanager
    def _new_context(self, capture_error_mode: str) -> Iterator[None]:
        self._graph.capture_begin(pool=self._pool.id, capture_error_mode=capture_error_mode)
        try:
            yield
        finally:
            self._graph.capture_end()
