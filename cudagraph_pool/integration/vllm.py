"""What vLLM needs where graph memory is ours. Neither function raises: vLLM runs without it.

Custom all-reduce: at the end of its captures it shares what they reduced by
``cudaIpcGetMemHandle``. Mapped memory has no such handle, ours nor that of PyTorch's expandable
segments, and vLLM ends the process (``custom_all_reduce.cuh:455 'invalid argument'``, vllm#42609).
Outside of captures it copies what it reduces into a buffer that all opened; here in captures, too.

What is set aside for graphs before the KV cache is sized: the V2 runner captures all but the full
graphs, and of these the two largest. It takes each other one for as much as the second one took, or
1 MiB: the device gives memory in pieces of 2 MiB, and what is freed meanwhile counts against it. In
a pool of ours the others need memory for executables only, forecast here from their nodes.
"""

import functools
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final

from .._forecast import count_nodes, exec_bytes
from .._shared_exec import _EXEC_BUDGET, _MAX_EXECS, all_share
from ..switch import is_enabled

_ALL_REDUCE: Final = "vllm.distributed.device_communicators.custom_all_reduce"
_UTILS: Final = "vllm.v1.worker.gpu.cudagraph_utils"
_RUNNER: Final = "vllm.v1.worker.gpu.model_runner"
_FULL: Final = "_extrapolate_full_graph_memory"
# Too little would be worse than too much: of what is forecast, and the grain of what is measured.
_MARGIN: Final = 1.25
_GRAIN: Final = 2 << 20


@functools.cache
def serve_all_reduce(logger: str) -> None:
    """Changes vLLM's class, once in a process, and says in the log what comes of it."""
    log = logging.getLogger(logger)
    try:
        custom: Any = import_module(_ALL_REDUCE).CustomAllreduce
        all_reduce = custom.all_reduce
        if "registered" not in inspect.getfullargspec(all_reduce).kwonlyargs:
            custom.should_custom_ar = lambda *_: False
            raise TypeError("all_reduce() is not told by name what is registered, so it is off")
    except Exception as error:
        instead = "for tensor parallelism set disable_custom_all_reduce=True"
        log.warning("%s is not as expected (%s): %s", _ALL_REDUCE, error, instead)
        return

    @functools.cache
    def say() -> None:
        cannot = "graph memory that is mapped cannot be shared by its address"
        log.info("vLLM's custom all-reduce copies into its buffer in captures: %s", cannot)

    @functools.wraps(all_reduce)
    def copying(self: Any, *args: Any, registered: bool = False, **kwargs: Any) -> Any:
        # Only captures ask for it.
        if registered and is_enabled():
            say()
            registered = False
        return all_reduce(self, *args, registered=registered, **kwargs)

    custom.all_reduce = copying


@functools.cache
def serve_estimate(logger: str) -> None:
    """Changes a method of vLLM's runner, once in a process, if vLLM and torch (2.14) have it."""
    log = logging.getLogger(logger)
    try:
        from torch.cuda.graphs import register_graph_capture_end_hook as register

        utils, runner = import_module(_UTILS), import_module(_RUNNER).GPUModelRunner
        getattr(utils, _FULL)
        profile = runner.profile_cudagraph_memory
    except Exception as error:
        log.debug("vLLM estimates what graphs take by itself: %s", error)
        return

    @functools.wraps(profile)
    def forecasting(runner: Any) -> int:
        nodes: list[int] = []
        theirs: Callable[[Sequence[int], int], int] = getattr(utils, _FULL)

        def full_graphs(samples: Sequence[int], total: int) -> int:
            estimate = theirs(samples, total)
            others, shares = total - len(samples), all_share()
            # Errors of the hook are torch's to swallow. Where nothing is to come all was measured.
            if not nodes or not (others or shares):
                return estimate
            ours = sum(samples) + more_bytes(nodes, others, shares)
            beside = (ours - estimate) / (1 << 20)
            log.info("sets aside for %d full graphs %+.0f MiB beside vLLM's own", total, beside)
            return ours

        if not is_enabled():
            return int(profile(runner))
        hook = register(lambda graph: nodes.append(count_nodes(graph)))
        setattr(utils, _FULL, full_graphs)
        try:
            return int(profile(runner))
        finally:
            setattr(utils, _FULL, theirs)
            hook.remove()

    runner.profile_cudagraph_memory = forecasting


def more_bytes(nodes: Sequence[int], others: int, shares: bool) -> int:
    """What is yet to come, once graphs of so many ``nodes`` are captured, and up to ``others`` more
    of the largest. Executables that graphs share are made by replays: none was measured yet.
    """
    largest = exec_bytes(max(nodes))
    execs = largest * others
    if shares:
        execs = min(execs + sum(map(exec_bytes, nodes)), largest * _MAX_EXECS + _EXEC_BUDGET)
    return math.ceil(execs * _MARGIN) + _GRAIN
