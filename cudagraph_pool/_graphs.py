"""Pools and captures, as objects."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

from . import _shared_exec
from ._adapter import load_adapter
from ._allocator import _require_booleans, is_enabled

if TYPE_CHECKING:
    import torch
    from torch.cuda import _POOL_HANDLE

    from . import _torch

# The more there are, the fewer replays switch. With so many even 16 graphs of 2,400 nodes keep to
# a quarter of what executables of their own would take: benchmarks/shared_execs.py has the table.
_MAX_EXECS = 4
# For more of them, where nobody says how much they may take.
_EXEC_BUDGET = 256 << 20

_logger = logging.getLogger(__package__)


def _require_enabled(what: str) -> Any:
    if not is_enabled():
        raise RuntimeError(
            f"{what} needs cudagraph_pool to be enabled: call cudagraph_pool.enable() first"
        )
    return load_adapter()


class _Turns:
    """The order of the replays of one pool's graphs, if they are asked to: each overwrites what
    those before it left, on whatever streams.

    Attributes:
        lock: Held for as long as it takes to launch one.
        stream (torch.cuda.Stream): Of the last one.
        number (int): Of the last one. One that failed, and a capture, have a number too: they have
            written to what graphs read.
        what (str): The last one was, for errors.
        wrote: Number and description of the last one that left outputs.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.stream: torch.cuda.Stream | None = None
        self.number = 0
        self.what = ""
        self.wrote = (0, "")
        self._last: Callable[[], Any] = lambda: None

    def order(self, stream: torch.cuda.Stream) -> None:
        """Lets what ``stream`` gets next come after the last one."""
        if self.stream == stream:
            return
        if self.stream is not None:
            stream.wait_stream(self.stream)
        self.stream = stream

    def begin(self, what: str) -> int:
        """Something writes to what graphs read; returns its number."""
        self.what = what
        self.number += 1
        return self.number

    def overwrite(self, owner: Any) -> None:
        """A graph is replayed. Who has saved what the last one left gets autograd's error.

        Arguments:
            owner: Of the outputs, with the ``versions`` that count their changes.
        """
        import torch

        last = self._last()
        if last is not None:
            torch._C._increment_version(last.versions)
        self._last = weakref.ref(owner)
        self.wrote = self.number, self.what

    def left(self, owner: Any) -> bool:
        """Whether the last replay was of this owner."""
        return self._last() is owner


class GraphPool:
    r"""A memory pool that CUDA graphs share.

    The pool stays open while this object or a graph captured into it is alive. Once neither is,
    :func:`torch.cuda.empty_cache` gives back its memory, but for pages in which a tensor lives.

    Arguments:
        device (torch.device or int, optional): The device of the pool. Default: the current one.
        shared_exec (bool, optional): Whether graphs captured by :class:`cudagraph_pool.graph` share
            executables, unless it is told otherwise. Default: ``False``.
        max_execs (int, optional): How many executables these graphs may have at a time; the one
            that was not used for the longest time goes first. ``None``: one for all graphs that are
            alike but for sizes and addresses. Where the GPU has no memory for so many, there are
            fewer. Default: 4.
        exec_budget (int, optional): Bytes of device memory that executables may take beyond
            ``max_execs``: each graph that is replayed keeps its own, as long as all together take
            about so much at most. Default: 0.

    Raises:
        RuntimeError: :func:`cudagraph_pool.enable` was not called.
        TypeError: ``shared_exec`` is no boolean, ``max_execs`` or ``exec_budget`` no integer.
        ValueError: ``device`` is no CUDA device of this machine, ``max_execs`` is less than 1,
            ``exec_budget`` is negative, or has no ``max_execs`` to exceed.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        *,
        shared_exec: bool = False,
        max_execs: int | None = _MAX_EXECS,
        exec_budget: int = 0,
    ) -> None:
        self._open = False
        _require_booleans(shared_exec=shared_exec)
        for name, value in (("max_execs", max_execs), ("exec_budget", exec_budget)):
            if not isinstance(value, int) and (name, value) != ("max_execs", None):
                raise TypeError(f"{name} is {value!r}, but must be an integer")
        if max_execs is not None and max_execs < 1:
            raise ValueError(f"max_execs is {max_execs}, but a graph needs an executable to run")
        if exec_budget < 0 or (exec_budget > 0 and max_execs is None):
            raise ValueError(
                f"exec_budget is {exec_budget} and max_execs is {max_execs}, but a budget is a "
                "number of bytes for executables beyond a number of them"
            )
        self._adapter = _require_enabled("GraphPool")
        import torch

        self._device = _cuda_device(device)
        first, second = torch.cuda.graph_pool_handle()
        self._id = cast("_POOL_HANDLE", (int(first), int(second)))
        self._shared_exec = shared_exec
        self._max_execs = max_execs
        self._exec_budget = exec_budget
        self._execs: _torch.ExecCache | None = None
        self._execs_lock = threading.Lock()
        self._turns = _Turns()
        self._adapter.register_pool(self._device.index, self._id)
        self._open = True
        _pools[self._device.index, self._id] = self
        _logger.debug("%s of %s: made", self._id, self._device)
        # By itself also before a process ends: __del__ may come when there is nothing left to log.
        self._log_release = weakref.finalize(
            self, _logger.debug, "%s of %s: released", self._id, self._device
        )

    @functools.cached_property
    def _own_stream(self) -> torch.cuda.Stream:
        """One that captures of no other pool run on, as long as this one or a graph has it."""
        import torch

        idle = _idle_streams.setdefault(self._device.index, [])
        try:
            stream = idle.pop()
        except IndexError:
            stream = self._adapter.make_stream(self._device.index)
        own = torch.cuda.ExternalStream(stream, self._device)
        weakref.finalize(own, idle.append, stream)
        return own

    @property
    def id(self) -> _POOL_HANDLE:
        r"""What ``torch.cuda.graph(pool=...)`` and ``make_graphed_callables(pool=...)`` take."""
        self._require_open()
        return self._id

    @property
    def device(self) -> torch.device:
        r"""The device that the pool's memory is on."""
        return self._device

    def stats(self) -> dict[str, Any]:
        r"""Return what the pool holds, in bytes and counts.

        - ``reserved_bytes``: physical memory, ``pages`` of ``page_bytes`` each.
        - ``allocated_bytes``: what its live tensors occupy, ``live_blocks`` of them;
          ``requested_bytes``: what they asked for.
        - ``peak_reserved_bytes``, ``peak_allocated_bytes``: the most of these so far;
          ``scope_peak_bytes``: the most that was allocated at once in the last capture or
          ``use_pool`` block.
        - ``allocations``, ``frees``: how many there were so far.
        - ``ranges``: of addresses; ``page_mappings``: how many calls of the driver mapped what lies
          behind these: one for each page, or in a large pool for up to 64 pages.
        - ``execs``: executables that graphs with ``shared_exec`` have now;
          ``exec_instantiations``, ``exec_updates``: how often one was made, and how often one was
          brought up to date for another graph; ``exec_alone``: a dictionary that says why some of
          these graphs keep one of their own, and how many do for that reason.
        """
        self._require_open()
        stats: dict[str, Any] = self._adapter.stats(self._device.index, self._id)
        if self._execs is not None:
            return stats | self._execs.stats()
        counts = ("execs", "exec_instantiations", "exec_updates")
        return stats | dict.fromkeys(counts, 0) | {"exec_alone": {}}

    def snapshot(self) -> dict[str, Any]:
        r"""Return the live blocks and the mapped ranges of the pool.

        A dictionary with ``stats`` (as :meth:`stats`), ``blocks`` (each with ``address``,
        ``bytes``, ``requested_bytes``, ``stream`` and ``pieces``: page, offset and length of each
        stretch of physical memory behind it) and ``ranges`` (``address`` and ``pages``).
        """
        self._require_open()
        snapshot: dict[str, Any] = self._adapter.snapshot(self._device.index, self._id)
        return snapshot

    def plot(self, path: str | os.PathLike[str]) -> None:
        r"""Draw the pool's memory over all its graphs: where every block lay, and when.

        Time is counted in allocations and frees; each graph has a colour, and blocks stitched of
        several pieces are darker. Lines show what the pool held, and the minimum. Needs
        ``pip install 'cudagraph-pool[plot]'``, and :func:`torch.cuda.memory._record_memory_history`
        to have been called before the captures (``context=None`` is enough).

        Arguments:
            path (str or os.PathLike): Where to; the ending says in which format: png, svg, pdf.

        Raises:
            ImportError: There is no matplotlib.
            RuntimeError: The history has nothing of the pool.
        """
        self._require_open()
        from ._live_map import draw_pool

        draw_pool(self._device.index, self._id, path)

    def close(self) -> None:
        r"""Release the pool. Graphs captured into it go on working."""
        if self._open:
            self._open = False
            self._adapter.unregister_pool(self._device.index, self._id)
            self._log_release()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a GraphPool cannot be copied or pickled: graphs have its addresses")

    def __repr__(self) -> str:
        if not self._open:
            return f"GraphPool(id={self._id}, device={str(self._device)!r}, released)"
        stats = self.stats()
        return (
            f"GraphPool(id={self._id}, device={str(self._device)!r}, "
            f"reserved={stats['reserved_bytes']}, allocated={stats['allocated_bytes']})"
        )

    def _exec_cache(self) -> _torch.ExecCache:
        """Of its graphs; it lives on in them."""
        with self._execs_lock:
            if self._execs is None:
                self._execs = self._adapter.ExecCache(
                    self._device.index, self._max_execs, self._exec_budget
                )
            cache: _torch.ExecCache = self._execs
        return cache

    def _require_open(self) -> None:
        if not self._open:
            raise RuntimeError(
                f"this GraphPool (id {self._id} of {self._device}) was released by close(); "
                "create another one"
            )


def _require_pool(pool: object) -> None:
    if not isinstance(pool, GraphPool):
        raise TypeError(
            f"pool must be a cudagraph_pool.GraphPool, not {type(pool).__name__}; "
            "torch.cuda.graph takes a pool's id"
        )
    pool._require_open()


# By device, what was some pool's own. They are kept, as is what libraries have made for them: a
# tensor may be recorded for one, and torch's own streams are 32, which come again.
_idle_streams: dict[int, list[int]] = {}

# By device and id.
_pools: weakref.WeakValueDictionary[tuple[int, tuple[int, int]], GraphPool] = (
    weakref.WeakValueDictionary()
)


class graph:  # noqa: N801
    r"""Context manager that captures CUDA work into a :class:`torch.cuda.CUDAGraph`.

    :class:`torch.cuda.graph` on a :class:`GraphPool`. In addition it checks its arguments before
    anything is changed; after a capture that failed it puts the current stream back and ends the
    failed capture's hold on the pool and on the device's generator of random numbers, so that eager
    work and the next capture go on; and after one that succeeded the current stream waits for what
    PyTorch itself ran on the capture's stream.

    Arguments:
        cuda_graph (torch.cuda.CUDAGraph): Graph object used for capture.
        pool (GraphPool): The pool that the capture allocates in.
        stream (torch.cuda.Stream, optional): If supplied, will be set as the current stream in the
            context. Default: one stream for each device, shared by all captures.
        capture_error_mode (str, optional): ``"global"``, ``"thread_local"`` or ``"relaxed"``, as
            for :class:`torch.cuda.graph`.
        shared_exec (bool, optional): Keep the graph as a template, which costs no device memory,
            and run it by executables that the pool's graphs share. To the caller ``cuda_graph`` is
            as ever: ``replay()``, ``reset()``, ``pool()``, random generators, ``debug_dump()``. A
            replay that finds no executable of its graph takes that of another one: it updates it,
            at 1 to 2 microseconds of CPU time for each node, or, in a program whose replays stay
            with a graph for a while, makes a new one in its place, at 4 to 6 (an updated one is
            slower on the device). ``instantiate()`` does so ahead. Graphs with child graphs,
            conditional or memory nodes keep an executable of their own, as do all on a driver that
            is too new to know what it carries over: :meth:`GraphPool.stats` says why
            (``exec_alone``). A graph that is replayed while one that it shares with still runs on
            another stream gets one more, so that neither waits for the other on the device. On the
            CPU a replay waits while another thread's is making a switch, and up to a tenth of a
            second for an executable that has to make room and still runs. Where the GPU has no
            memory for another executable, those that there are make room for it, in the end all of
            them. Hooks that newer releases of torch call when a graph is instantiated are not
            called: no executable is this graph's alone.
            Default: what the pool was made with.
        own_workspace (bool): Capture on a stream of the pool's own, so that graphs of other pools
            may run at the same time: until torch 2.15 cuBLAS has one workspace for each stream and
            thread, and matrix products that were captured on one stream overwrite what each other
            compute with, whatever their pools. Costs a workspace for each such pool and thread: 32
            MiB on Hopper, 8 on most others, and 1 for cuBLASLt. They are kept for later such pools.
            Default: ``False``.

    Raises:
        RuntimeError: The package is not enabled, the pool was released, or the current stream is
            capturing already.
        TypeError: An argument is of another type.
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
        import torch

        _require_pool(pool)
        for name, value, kind in (
            ("cuda_graph", cuda_graph, torch.cuda.CUDAGraph),
            ("stream", stream, torch.Stream),
        ):
            if not isinstance(value, kind) and (name, value) != ("stream", None):
                raise TypeError(f"{name} is {value!r}, but must be a torch.cuda.{kind.__name__}")
        modes = ("global", "thread_local", "relaxed")
        if capture_error_mode not in modes:
            raise ValueError(
                f"unknown capture error mode {capture_error_mode!r}; expected one of {modes}"
            )
        self._graph: Any = cuda_graph
        self._pool = pool
        self._stream = stream
        self._shared_exec = pool._shared_exec if shared_exec is None else shared_exec
        _require_booleans(shared_exec=self._shared_exec, own_workspace=own_workspace)
        if own_workspace and stream is not None:
            raise ValueError("own_workspace=True captures on the pool's own stream: pass no stream")
        self._execs: _torch.ExecCache | None = None
        self._kept_template = False
        self._check_devices()
        if own_workspace:
            self._stream = pool._own_stream
        self._before: torch.cuda.Stream | None = None
        self._held: object = None
        self._context = self._new_context(capture_error_mode)

    def __enter__(self) -> None:
        import torch

        _require_enabled("cudagraph_pool.graph")
        self._pool._require_open()
        self._check_devices()
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a capture is under way on the current stream; captures do not nest: "
                "end that one first"
            )
        before = self._current_stream()
        if self._shared_exec:
            self._execs = self._pool._exec_cache()
            self._kept_template = _shared_exec.capture_template(self._graph)
        try:
            # What was lost of them is there again, and what is there stays: another graph may go
            # while this one is captured.
            self._held = self._hold_workspaces()
            self._context.__enter__()
        except BaseException:
            self._clean_up(before)
            raise
        self._before = before

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
        except BaseException:
            # From torch 2.14 on a graph that failed releases its pool late, and never if it is
            # captured again first.
            with contextlib.suppress(RuntimeError):
                self._graph.reset()
            self._clean_up(before)
            raise
        # A capture begins with eager work: PyTorch fills in what random numbers start from, on the
        # capture's stream. On a busy GPU that could come after a replay has filled in its own,
        # which would then draw the wrong numbers.
        try:
            if before is not None and before != self._context.capture_stream:
                before.wait_stream(self._context.capture_stream)
            # As long as the graph is there, the stream is no other pool's own, and cuBLAS's
            # workspace is not freed: from torch 2.12 to 2.14 any graph that goes frees it.
            self._graph._keeps = self._context.capture_stream, held, self._hold_workspaces()
        except BaseException:
            self._graph.reset()
            self._clean_up(before)
            raise
        if _logger.isEnabledFor(logging.DEBUG):
            self._log_capture()
        if self._execs is not None:
            _shared_exec.share(
                self._graph, self._execs, self._pool.device.index, self._kept_template
            )

    def _hold_workspaces(self) -> object:
        return self._adapter.hold_workspaces(self._context.capture_stream.cuda_stream)

    def _log_capture(self) -> None:
        took = self._adapter.captures(self._pool.device.index, self._pool.id)[-1]
        _logger.debug(
            "%s of %s: captured a graph of %d allocations; %d bytes were in use at once, and the "
            "pool took %d more",
            *(self._pool.id, self._pool.device, took["allocations"]),
            *(took["peak_bytes"], took["added_bytes"]),
        )

    def _current_stream(self) -> torch.cuda.Stream:
        import torch

        return torch.cuda.current_stream()

    def _new_context(self, capture_error_mode: str) -> Any:
        import torch

        return torch.cuda.graph(
            self._graph,
            pool=self._pool.id,
            stream=self._stream or self._capture_stream(self._pool.device),
            capture_error_mode=capture_error_mode,
        )

    @classmethod
    def _capture_stream(cls, device: torch.device) -> torch.cuda.Stream:
        """torch.cuda.graph has one for all devices, which suits the first that captured alone."""
        import torch

        stream = cls._capture_streams.get(device.index)
        if stream is None:  # another thread may be here too
            stream = cls._capture_streams.setdefault(device.index, torch.cuda.Stream(device))
        return stream

    def _clean_up(self, before: torch.cuda.Stream | None) -> None:
        """After torch.cuda.graph gave up half-way: it leaves both behind."""
        import torch

        if before is not None:
            torch.cuda.set_stream(before)
        if self._shared_exec:
            _shared_exec.forget_template(self._graph, self._kept_template)
        self._adapter.end_failed_capture(self._pool.device.index, self._pool.id)
        self._free_generator()

    def _free_generator(self) -> None:
        """In torch 2.11 a capture that failed leaves the device's generator believing that it is
        under way, so that ``torch.randn`` raises until another one ends: an empty one.
        """
        import torch

        empty = torch.cuda.CUDAGraph(keep_graph=True)
        stream = torch.cuda.Stream(self._pool.device)  # the capture's may be one that cannot
        # What failed before may fail again; it is the first error that the caller is told.
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            with torch.cuda.stream(stream):
                empty.capture_begin(capture_error_mode="thread_local")
                empty.capture_end()
            # As after a capture that succeeds.
            torch.cuda.current_stream().wait_stream(stream)

    def _check_devices(self) -> None:
        import torch

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
    """One of several captures in a row: what :class:`torch.cuda.graph` does before each, to wait
    for the device and to empty caches, was done once. pre: ``stream`` is given, and current.
    """

    def _current_stream(self) -> torch.cuda.Stream:
        return cast("torch.cuda.Stream", self._stream)

    def _new_context(self, capture_error_mode: str) -> Any:
        return _OnStream(self._graph, self._pool.id, self._current_stream(), capture_error_mode)


class _OnStream:
    """A capture on the current stream, and nothing around it."""

    def __init__(
        self,
        cuda_graph: torch.cuda.CUDAGraph,
        pool_id: tuple[int, int],
        stream: torch.cuda.Stream,
        capture_error_mode: str,
    ) -> None:
        self._graph = cuda_graph
        self._arguments = {"pool": pool_id, "capture_error_mode": capture_error_mode}
        self.capture_stream = stream

    def __enter__(self) -> None:
        self._graph.capture_begin(**self._arguments)

    def __exit__(self, *_: object) -> None:
        self._graph.capture_end()


@contextlib.contextmanager
def use_pool(pool: GraphPool) -> Iterator[None]:
    r"""Context manager in which this thread's eager allocations go to ``pool``.

    The pool grows page by page, and what does not fit into one free piece may lie in several: one
    block of code needs no ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``. Tensors made inside
    may outlive the block and may be used by any stream (:meth:`torch.Tensor.record_stream` as
    ever). Blocks of different pools nest.

    Arguments:
        pool (GraphPool): The pool to allocate in. No graph that was captured into it may be alive:
            its replays write to memory that is free for the pool, and would overwrite what is
            allocated now. Graphs may be captured into it later.

    Raises:
        RuntimeError: The package is not enabled, the pool was released, graphs or another
            ``use_pool`` block hold it, or the current stream is capturing.
        TypeError: ``pool`` is not a :class:`GraphPool`.
        ValueError: The pool is not on the current device.
    """
    adapter = _require_enabled("cudagraph_pool.use_pool")
    import torch

    _require_pool(pool)
    device, pool_id = pool.device.index, pool.id
    if device != torch.cuda.current_device():
        raise ValueError(
            f"the pool is on {pool.device}, but the current device is "
            f"cuda:{torch.cuda.current_device()}; use it inside `with torch.cuda.device({device})`"
        )
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "use_pool() is for eager work, but the current stream is capturing; "
            "name the pool where the capture begins instead"
        )
    adapter.end_failed_capture(device, pool_id)  # what began there before is over
    holders = adapter.use_count(device, pool_id) - 1  # without the GraphPool itself
    if holders > 0:
        raise RuntimeError(
            f"pool {pool_id} is held by {holders} graph(s) or use_pool block(s): replays would "
            "overwrite what is allocated in it now. Use a GraphPool of its own for eager work"
        )
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool_id)
    try:
        yield
    finally:
        try:
            torch._C._cuda_endAllocateToPool(device, pool_id)
        finally:
            torch._C._cuda_releasePool(device, pool_id)


def _cuda_device(device: torch.device | str | int | None) -> torch.device:
    """The CUDA device meant, with an index."""
    import torch

    if device is None:
        return torch.device("cuda", torch.cuda.current_device())
    if isinstance(device, int):
        index = device
    else:
        found = torch.device(device)
        if found.type != "cuda":
            raise ValueError(f"a GraphPool needs a CUDA device, not {str(found)!r}")
        index = torch.cuda.current_device() if found.index is None else found.index
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise ValueError(f"there is no device cuda:{index}; torch sees {count} CUDA device(s)")
    return torch.device("cuda", index)
