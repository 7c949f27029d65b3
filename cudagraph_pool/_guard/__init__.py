"""Finding what graphs do to each other that share a pool, or a workspace of cuBLAS."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.cuda import _gpu_trace
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .._borrow import borrow
from .._leases import preceded
from .happens_before import HappensBefore
from .workspaces import Workspaces, used_by, used_by_capture

if TYPE_CHECKING:
    from ..pools import _ReplayOrder

_lock = threading.RLock()  # the garbage collector may end a guard within


@contextmanager
def guard() -> Iterator[None]:
    r"""Context manager that finds graphs that overwrite each other's memory.

    For finding a mistake, not for production: every operation of this thread is looked at. Within
    it these raise an error that names both sides, before anything is launched:

    * an operation that uses what a :class:`GraphRunner` returned, after a later call has
      overwritten it. Holding it is no mistake, so that ``y = runner(x)`` in a loop is none.
    * a graph that is replayed on a stream where nothing orders it behind the last replay of another
      graph of its pool, on another stream, whether or not the two do overlap this time. Order that
      comes from streams, events and waits of the host is seen, that of a loop which queries is not.
      :meth:`torch.cuda.CUDAGraph.replay` is seen in any thread.
    * the same of graphs of any pools whose matrix products compute in one workspace of cuBLAS.
      Until torch 2.15 all that a thread has captured on one stream do. It is seen of graphs that
      are captured within the guard, by :class:`GraphRunner`, with ``shared_exec`` or with
      ``CUDAGraph(keep_graph=True)``; eager products on a stream that was captured on are not.

    Raises:
        RuntimeError: What is described above, from within the context.
    """
    with _lock:
        if not _state.guards:
            _state.replays = _Replays()
            if torch.cuda.is_available():
                _trace()
                torch.cuda.synchronize()  # what came before comes before
                _state.native = torch.cuda.CUDAGraph.replay
                torch.cuda.CUDAGraph.replay = preceded(_state.native, by=_begin_replay)
        _state.guards += 1
    try:
        with _Outputs():
            yield
    finally:
        with _lock:  # guards need not nest: the last one to leave takes it out
            _state.guards -= 1
            if not _state.guards and _state.native is not None:
                torch.cuda.CUDAGraph.replay, _state.native = _state.native, None


def mark_output(tensor: Tensor, order: _ReplayOrder) -> Tensor:
    """The same tensor, as one that is known to a guard."""
    owner = getattr(tensor.untyped_storage(), "_owner", None)
    if owner is None:
        return tensor  # not of the pool
    marked = borrow(tensor, owner)
    storage: Any = marked.untyped_storage()
    storage._returned_by = order, order.number, order.what
    known = tensor.detach()  # which counts changes together with the tensor
    known.data = marked
    return known


class _Outputs(TorchDispatchMode):  # type: ignore[misc]
    """Looks at the arguments of every operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                _check(leaf, func)
        return func(*args, **(kwargs or {}))


def _check(tensor: Tensor, operation: Any) -> None:
    """Raises RuntimeError if the operation would read what has been overwritten."""
    has_storage = torch._C._has_storage(tensor)
    marked = getattr(tensor.untyped_storage(), "_returned_by", None) if has_storage else None
    if marked is None:
        return
    order, own, what = marked
    number, by = order.wrote
    if number != own:
        raise RuntimeError(
            f"{operation} uses what call {own} of its pool returned, {what}, but call {number}, "
            f"{by}, has overwritten it. Copy what must last longer, or pass clone_outputs=True to "
            "the GraphRunner"
        )


def is_guarded() -> bool:
    return _state.guards > 0


class _Replays:
    """The last replay on each stream of what graphs share, and what orders them."""

    def __init__(self) -> None:
        self.order = HappensBefore()
        self.lock = threading.RLock()  # the garbage collector may delete an event within
        # By stream: the number of the launch, and which graph it was.
        self._last: dict[Hashable, dict[int, tuple[int, str]]] = {}

    def replay(
        self, pool: tuple[int, int], graph: str, stream: int, workspaces: Workspaces
    ) -> None:
        """Before a launch. Raises RuntimeError if something that shares memory may still run."""
        with self.lock:
            self._check(pool, f"the pool {pool}", "into pools of their own", graph, stream)
            for address, captured_on in workspaces.items():
                what = f"cuBLAS's workspace of stream {captured_on:#x}, at {address:#x}"
                apart = "with own_workspace=True, or on streams of their own"
                self._check(address, what, apart, graph, stream)
            launched = self.order.launch(stream), graph
            for shared in (pool, *workspaces):
                self._last.setdefault(shared, {})[stream] = launched

    def _check(self, shared: Hashable, what: str, apart: str, graph: str, stream: int) -> None:
        for launched_on, (number, other) in self._last.get(shared, {}).items():
            if launched_on != stream and not self.order.comes_after(stream, launched_on, number):
                raise RuntimeError(
                    f"{graph} is replayed on stream {stream:#x}, and {other}, which shares "
                    f"{what}, was replayed on stream {launched_on:#x}: nothing orders "
                    "the two, and each overwrites what the other one computes with. Let the "
                    "stream wait for the other one (Stream.wait_stream), or capture the graphs "
                    f"{apart}"
                )


class _State:
    """What all guards of the process have in common."""

    guards = 0
    replays = _Replays()
    native: Any = None  # what CUDAGraph.replay was before the first of them


_state = _State()


def _begin_replay(graph: torch.cuda.CUDAGraph) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    _state.replays.replay(tuple(graph.pool()), repr(graph), stream, _workspaces(graph))


def _workspaces(graph: Any) -> Workspaces:
    """Those that it computes in, as far as that can be known."""
    if graph.__dict__.get("_workspaces") is None:
        try:
            graph._workspaces = used_by(graph.raw_cuda_graph())
        except RuntimeError:  # captured before, and not kept
            graph._workspaces = {}
    return dict(graph._workspaces)


def _end_capture(graph: Any) -> None:
    """Notes for guards what the graph computes in."""
    graph._workspaces = None
    if is_guarded():
        graph._workspaces = used_by_capture(torch.cuda.current_stream().cuda_stream)


@functools.cache
def _trace() -> None:
    """Hears of all that orders streams, from now on, and notes what captures compute in."""
    graph: Any = torch.cuda.CUDAGraph
    graph.capture_end = preceded(graph.capture_end, by=_end_capture)
    torch._C._activate_gpu_trace()
    order = HappensBefore
    for register, note in (
        (_gpu_trace.register_callback_for_event_record, order.record),
        (_gpu_trace.register_callback_for_event_wait, order.wait),
        (_gpu_trace.register_callback_for_event_deletion, order.forget),
        (_gpu_trace.register_callback_for_event_synchronization, order.synchronize_event),
        (_gpu_trace.register_callback_for_stream_synchronization, order.synchronize_stream),
        (_gpu_trace.register_callback_for_device_synchronization, order.synchronize_device),
    ):
        register(functools.partial(_tell, note))


def _tell(note: Callable[..., None], *arguments: int) -> None:
    if is_guarded():
        with _state.replays.lock:
            note(_state.replays.order, *arguments)
