"""Graphs that share executables: of ``cgp.graph``, or with ``enable(shared_exec=True)`` all."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from ._adapter import load_adapter
from ._lazy import torch

if TYPE_CHECKING:
    from . import _torch

# The more there are, the fewer replays switch. With so many even 16 graphs of 2,400 nodes keep to
# a quarter of what executables of their own would take: benchmarks/shared_execs.py has the table.
_MAX_EXECS = 4
# For more of them, where nobody says how much they may take.
_EXEC_BUDGET = 256 << 20

# By device, of graphs that any code captures: an executable has no memory of their pools.
caches: dict[int, _torch.ExecCache] = {}

_all_share = False
_lock = threading.Lock()


def all_share() -> bool:
    """Whether graphs share that any code captures from now on."""
    return _all_share


def let_all_share(shares: bool) -> None:
    """The first time replaces torch's methods, for good: others may have replaced them since."""
    global _all_share
    if shares:
        with _lock:
            _replace_methods(torch.cuda.CUDAGraph)
    _all_share = shares


@functools.cache
def _replace_methods(captured: Any) -> None:
    begin, end = captured.capture_begin, captured.capture_end

    @functools.wraps(begin)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        # Whoever keeps the template himself may be about to change it, or shares it already.
        if _all_share and not keep_template(graph):
            graph._shares_on = torch.cuda.current_device()
        _unless_it_fails(graph, begin, *args, **kwargs)

    @functools.wraps(end)
    def capture_end(graph: Any) -> None:
        _unless_it_fails(graph, end)
        device = vars(graph).pop("_shares_on", None)
        if device is not None:
            with _lock:
                if device not in caches:
                    caches[device] = load_adapter().ExecCache(device, _MAX_EXECS, _EXEC_BUDGET)
            share(graph, caches[device], device, before=False)

    captured.capture_begin, captured.capture_end = capture_begin, capture_end


def _unless_it_fails(graph: Any, call: Any, *args: Any, **kwargs: Any) -> None:
    """What failed is no template."""
    try:
        call(graph, *args, **kwargs)
    except BaseException:
        if vars(graph).pop("_shares_on", None) is not None:
            keep_template(graph, False)
        raise


def keep_template(graph: Any, keeps: bool = True) -> bool:
    """Whether the next capture leaves a template without an executable; returns what was set."""
    before: bool = load_adapter().set_keeps_template(graph, keeps)
    if hasattr(graph, "_keep_graph"):  # from torch 2.14 on it is Python that makes the executable
        graph._keep_graph = keeps
    return before


def share(graph: Any, cache: _torch.ExecCache, device: int, before: bool) -> None:
    """Lets a captured template run by executables of ``cache``; ``before`` is as it was kept."""
    try:
        captured: type = type(graph)
        sharing = _sharing(captured)
        graph._shared_graph = load_adapter().SharedGraph(cache, graph, device)
    except BaseException:
        graph.reset()
        keep_template(graph, before)
        raise
    graph._kept_template = before
    graph.__class__ = sharing


class _SharesExec:
    """What differs in a :class:`torch.cuda.CUDAGraph` while it shares executables.

    The caller's object must replay differently: its class is changed, until it is reset.
    """

    # Adds nothing to the layout of an object: else its class could not be changed.
    __slots__ = ()

    _shared_graph: _torch.SharedGraph
    _kept_template: bool

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A graph that is made by the class of one that shares does not share, yet."""
        return cls.__bases__[1](*args, **kwargs)

    def replay(self) -> None:
        self._shared_graph.run(super().replay)  # type: ignore[misc]

    def instantiate(self) -> None:
        r"""Make ready what the next replay on the current stream needs.

        ``raw_cuda_graph()`` must not be changed: it decides which graphs this one shares with.
        """
        self._shared_graph.prepare()

    def raw_cuda_graph_exec(self) -> int:
        r"""Returns the cudaGraphExec_t that holds this graph now.

        The replay of another graph may change what it holds.
        """
        held: int = self._shared_graph.run(super().raw_cuda_graph_exec)  # type: ignore[misc]
        return held

    def capture_begin(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "this CUDAGraph already owns a captured graph; capture into a new one, or reset() it"
        )

    def reset(self) -> None:
        before = self._kept_template
        self._shared_graph.withdraw()
        del self._shared_graph, self._kept_template
        self.__class__ = type(self).__bases__[1]
        self.reset()
        keep_template(self, before)


@functools.cache
def _sharing(captured: type) -> type:
    return type(captured.__name__, (_SharesExec, captured), {"__module__": captured.__module__})
