"""The driver's own calls for one executable of many graphs, with as little Python as can be."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from _graph_shape import driver, require

if TYPE_CHECKING:
    from collections.abc import Callable


class _UpdateResult(ctypes.Structure):
    """CUgraphExecUpdateResultInfo."""

    _fields_ = (
        ("result", ctypes.c_int),
        ("error_node", ctypes.c_void_p),
        ("error_from_node", ctypes.c_void_p),
    )


# As torch instantiates: cudaGraphInstantiateFlagAutoFreeOnLaunch and -UseNodePriority.
_FLAGS = ctypes.c_ulonglong(1 | 8)


class BareSwitch:
    """One executable that templates share: instantiated from the first, updated and launched by
    calls of the driver whose arguments were made before.

    Args:
        templates: graphs made with ``keep_graph=True``.
        stream: where the executable is launched.
    """

    def __init__(
        self, templates: Sequence[torch.cuda.CUDAGraph], stream: torch.cuda.Stream
    ) -> None:
        self._graphs = templates  # as long as they are named
        self._templates = [ctypes.c_void_p(graph.raw_cuda_graph()) for graph in templates]
        self._stream = ctypes.c_void_p(stream.cuda_stream)
        self._result = _UpdateResult()
        self._exec = ctypes.c_void_p()
        require(
            driver().cuGraphInstantiateWithFlags(
                ctypes.byref(self._exec), self._templates[0], _FLAGS
            ),
            "cuGraphInstantiateWithFlags",
        )
        self.switching(1)
        torch.cuda.synchronize()

    def switching(self, times: int) -> list[int]:
        """Updates to each template in turn and launches; returns the nanoseconds of each pair."""
        update, launch, now = driver().cuGraphExecUpdate_v2, driver().cuGraphLaunch, _now
        executable, result, stream = self._exec, ctypes.byref(self._result), self._stream
        spans = []
        codes = 0
        for template in self._templates * times:
            begin = now()
            codes |= update(executable, template, result)
            codes |= launch(executable, stream)
            spans.append(now() - begin)
            torch.cuda.synchronize()
        require(codes, "cuGraphExecUpdate or cuGraphLaunch")
        return spans

    def launching(self, times: int) -> list[int]:
        """Launches what it is; returns the nanoseconds of each call."""
        launch, now = driver().cuGraphLaunch, _now
        executable, stream = self._exec, self._stream
        spans = []
        codes = 0
        for _ in range(times * len(self._templates)):
            begin = now()
            codes |= launch(executable, stream)
            spans.append(now() - begin)
            torch.cuda.synchronize()
        require(codes, "cuGraphLaunch")
        return spans

    def switch(self, index: int) -> None:
        """Updates to one template."""
        require(
            driver().cuGraphExecUpdate_v2(
                self._exec, self._templates[index], ctypes.byref(self._result)
            ),
            "cuGraphExecUpdate",
        )

    def launch(self, times: int) -> None:
        """Launches what it is so many times in a row, and does not wait."""
        for _ in range(times):
            require(driver().cuGraphLaunch(self._exec, self._stream), "cuGraphLaunch")

    def close(self) -> None:
        torch.cuda.synchronize()
        require(driver().cuGraphExecDestroy(self._exec), "cuGraphExecDestroy")


def empty_calls(times: int) -> list[int]:
    """What a call through ctypes with three pointers takes that does nothing, in nanoseconds."""
    nothing: Any = ctypes.CDLL(None).memcmp
    pointer, now = ctypes.c_void_p(), _now
    buffer = ctypes.byref(ctypes.c_char())
    spans = []
    for _ in range(times):
        begin = now()
        nothing(buffer, buffer, pointer)
        spans.append(now() - begin)
    return spans


_now: Callable[[], int] = time.perf_counter_ns
