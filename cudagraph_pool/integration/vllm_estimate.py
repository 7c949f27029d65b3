"""What vLLM sets aside for graphs before it sizes its KV cache, where they share a pool of ours.

Its V2 runner captures all but the full graphs, and of these the two largest, and measures what the
device has less. It takes each other full graph for as much as the second one took, or 1 MiB: the
device gives memory in pieces of 2 MiB, and what is freed meanwhile counts against it. In a pool of
ours the others need no memory but their executables, which are forecast here from their nodes.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final

from .._forecast import count_nodes, exec_bytes
from .._shared_exec import _EXEC_BUDGET, _MAX_EXECS, all_share
from ..switch import is_enabled

_UTILS: Final = "vllm.v1.worker.gpu.cudagraph_utils"
_RUNNER: Final = "vllm.v1.worker.gpu.model_runner"
_FULL: Final = "_extrapolate_full_graph_memory"
# Too little would be worse than too much: of what is forecast, and the grain of what is measured.
_MARGIN: Final = 1.25
_GRAIN: Final = 2 << 20


@functools.cache
def serve_estimate(logger: str) -> None:
    """Changes a method of vLLM's runner, once in a process.

    It never raises: where vLLM or torch (before 2.14) lacks what this needs, vLLM's own is left.
    """
    log = logging.getLogger(logger)
    try:
        from torch.cuda.graphs import register_graph_capture_end_hook

        utils = import_module(_UTILS)
        runner = import_module(_RUNNER).GPUModelRunner
        getattr(utils, _FULL)
        profile = runner.profile_cudagraph_memory
        runner.profile_cudagraph_memory = _forecasting(
            profile, utils, register_graph_capture_end_hook, log
        )
    except Exception as error:
        log.debug("vLLM estimates what graphs take by itself: %s", error)


def _forecasting(
    profile: Callable[[Any], int], utils: Any, register: Callable[..., Any], log: logging.Logger
) -> Callable[[Any], int]:
    @functools.wraps(profile)
    def forecasting(runner: Any) -> int:
        if not is_enabled():
            return profile(runner)
        nodes: list[int] = []
        theirs = getattr(utils, _FULL)

        def full_graphs(samples: Sequence[int], total: int) -> int:
            estimate: int = theirs(samples, total)
            others, shares = total - len(samples), all_share()
            # Errors of the hook are torch's to swallow. Where nothing is to come all was measured.
            if not nodes or not (others or shares):
                return estimate
            ours = sum(samples) + more_bytes(nodes, others, shares)
            beside = (ours - estimate) / (1 << 20)
            log.info("sets aside for %d full graphs %+.0f MiB beside vLLM's own", total, beside)
            return ours

        hook = register(lambda graph: nodes.append(count_nodes(graph)))
        setattr(utils, _FULL, full_graphs)
        try:
            return profile(runner)
        finally:
            setattr(utils, _FULL, theirs)
            hook.remove()

    return forecasting


def more_bytes(nodes: Sequence[int], others: int, shares: bool) -> int:
    """What is yet to come, once graphs of so many ``nodes`` are captured, and up to ``others`` more
    of the largest. Replays make executables that graphs share: of these none was measured yet.
    """
    largest = exec_bytes(max(nodes))
    execs = largest * others
    if shares:
        execs = min(execs + sum(map(exec_bytes, nodes)), largest * _MAX_EXECS + _EXEC_BUDGET)
    return math.ceil(execs * _MARGIN) + _GRAIN
