"""``enable(shared_exec=True)``: graphs that any code captures share executables.

torch's own methods that begin and end a capture are replaced, once and for good: others may have
replaced them too since. While sharing is off they do what they did.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _shared_exec
from ._adapter import load_adapter
from ._shared_exec import _EXEC_BUDGET, _MAX_EXECS

if TYPE_CHECKING:
    from . import _torch

_shares = False
_replaced: set[type] = set()
_caches: dict[int, _torch.ExecCache] = {}
_lock = threading.Lock()


def set_shares(shares: bool) -> None:
    """Whether graphs share that are captured from now on."""
    global _shares
    import torch

    graph = torch.cuda.CUDAGraph
    with _lock:
        if shares and graph not in _replaced:
            graph.capture_begin = _beginning(graph.capture_begin)
            graph.capture_end = _ending(graph.capture_end)
            _replaced.add(graph)
        _shares = shares


def _beginning(begin: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(begin)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        import torch

        # Whoever keeps the template himself may be about to change it, or shares it already.
        if _shares and not _shared_exec.capture_template(graph):
            graph._shares_on = torch.cuda.current_device()
        try:
            begin(graph, *args, **kwargs)
        except BaseException:
            _take_device(graph, keep=False)
            raise

    return capture_begin


def _ending(end: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(end)
    def capture_end(graph: Any) -> None:
        try:
            end(graph)
        except BaseException:
            _take_device(graph, keep=False)
            raise
        device = _take_device(graph, keep=True)
        if device is not None:
            _shared_exec.share(graph, _cache(device), device, before=False)

    return capture_end


def _take_device(graph: Any, keep: bool) -> int | None:
    """Where the graph is to share, if it is; what it captures is no template unless ``keep``."""
    device: int | None = vars(graph).pop("_shares_on", None)
    if device is not None and not keep:
        _shared_exec.forget_template(graph, False)
    return device


def _cache(device: int) -> _torch.ExecCache:
    """One for all pools: an executable has no memory of them."""
    with _lock:
        if device not in _caches:
            _caches[device] = load_adapter().ExecCache(device, _MAX_EXECS, _EXEC_BUDGET)
        return _caches[device]
