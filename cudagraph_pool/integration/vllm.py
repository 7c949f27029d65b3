"""vLLM's custom all-reduce on graph memory that is mapped.

At the end of its captures it lets the other processes read what they reduced where it lies, by
``cudaIpcGetMemHandle``. Mapped memory has no such handle, ours nor that of PyTorch's expandable
segments, and vLLM ends the process (``custom_all_reduce.cuh:455 'invalid argument'``, vllm#42609).
Outside of captures it copies what it reduces into a buffer that all have opened. So it does in
captures here.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from ..switch import is_enabled

_MODULE = "vllm.distributed.device_communicators.custom_all_reduce"
_CANNOT = "graph memory that is mapped cannot be shared by its address"


@functools.cache
def serve_all_reduce(logger: str) -> None:
    """Changes vLLM's class, once in a process, and says in the log what comes of it.

    It never raises: vLLM runs without, unless it is told to use several GPUs.
    """
    log = logging.getLogger(logger)
    try:
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

        _serve(CustomAllreduce, log)
    except Exception as error:
        instead = "for tensor parallelism set disable_custom_all_reduce=True"
        log.warning("%s is not as expected (%s): %s", _MODULE, error, instead)


def _serve(custom: Any, log: logging.Logger) -> None:
    all_reduce = custom.all_reduce
    registered = inspect.signature(all_reduce).parameters.get("registered")
    if registered is not None and registered.kind is registered.KEYWORD_ONLY:
        custom.all_reduce = _copying(all_reduce, log)
    else:
        custom.should_custom_ar = _refusing(custom.should_custom_ar, log)


def _copying(all_reduce: Callable[..., Any], log: logging.Logger) -> Callable[..., Any]:
    @functools.wraps(all_reduce)
    def copying(self: Any, *args: Any, registered: bool = False, **kwargs: Any) -> Any:
        # Only captures ask for it.
        if registered and is_enabled():
            _say(log, "copies into its buffer in captures")
            registered = False
        return all_reduce(self, *args, registered=registered, **kwargs)

    return copying


def _refusing(should: Callable[..., bool], log: logging.Logger) -> Callable[..., bool]:
    @functools.wraps(should)
    def refusing(*args: Any, **kwargs: Any) -> bool:
        if not is_enabled():
            return should(*args, **kwargs)
        _say(log, "is switched off, since this vLLM's is not known")
        return False

    return refusing


@functools.cache
def _say(log: logging.Logger, what: str) -> None:
    log.info("vLLM's custom all-reduce %s: %s", what, _CANNOT)
