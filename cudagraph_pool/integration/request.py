"""What ``CUDAGRAPH_POOL`` may ask for, and doing it at the first use of CUDA."""

import functools
import inspect
import logging
import os
import sys
from collections.abc import Mapping
from multiprocessing.util import Finalize
from typing import Any, Final

from .. import switch
from .._adapter import load_adapter
from .._lazy import torch
from .._table import mib
from .environment import OFF, ON, VARIABLE

REPORT = "report"
_WORDS: Final = {**dict.fromkeys(ON, True), **dict.fromkeys(OFF, False)}


def parse(request: str) -> dict[str, bool]:
    """``1``, or ``NAME=1`` and ``NAME=0`` with commas between. Raises ValueError with all names."""
    chosen = {}
    names = [*inspect.signature(switch.enable).parameters, REPORT]
    for part in [] if _WORDS.get(request.lower()) else request.split(","):
        name, _, value = part.strip().partition("=")
        if name not in names or value.lower() not in _WORDS:
            raise ValueError(
                f"{part!r} is not understood: {VARIABLE} is 1, or a list as NAME=1,NAME=0 of "
                + ", ".join(names)
            )
        chosen[name] = _WORDS[value.lower()]
    return chosen


def unparse(chosen: Mapping[str, bool]) -> str:
    return ",".join(f"{name}={chosen[name]:d}" for name in chosen) or "1"


def enable(request: str, logger: str) -> None:
    """Does what is asked for, once in a process, and leaves one line in the log. It never raises:
    that would be an error of ``torch.cuda.init()``, in processes that merely inherit the variable.
    """
    level, text = _enable(request)
    logging.getLogger(logger).log(level, "%s=%s: %s", VARIABLE, request, text)


@functools.cache
def _enable(request: str) -> tuple[int, str]:
    try:
        chosen = parse(request)
        report = chosen.pop(REPORT, False)
        if "torch_memory_saver" in os.environ.get("LD_PRELOAD", ""):
            # It pauses what cudaMalloc gives its MemPools, and sees nothing that is mapped.
            chosen.setdefault("mempools", False)
        switch.enable(**chosen)
    except Exception as error:
        return logging.ERROR, f"CUDA graphs stay in PyTorch's own pools, since {error}"
    if report:
        # Not atexit: multiprocessing's forked processes end without it.
        Finalize(None, _print_report, exitpriority=0)
    return logging.INFO, "CUDA graphs are captured into pools of cudagraph_pool"


def _print_report() -> None:
    for line in report_lines(load_adapter(), torch.cuda):
        print(f"cudagraph_pool, process {os.getpid()}: {line}", file=sys.stderr, flush=True)


def report_lines(adapter: Any, cuda: Any) -> list[str]:
    """What was captured, and for each GPU what that took; ``cuda`` is :mod:`torch.cuda`."""
    counts = adapter.capture_counts()
    lines = [
        f"{counts['ours'] + counts['base']} CUDA graph captures, {counts['ours']} of them in pools "
        "of cudagraph_pool"
    ]
    for device in range(cuda.device_count()):
        if peak := cuda.memory_stats(device).get("reserved_bytes.all.peak", 0):
            held, needed = adapter.most_bytes(device)
            lines.append(
                f"GPU {device}: reserved {mib(peak)} MiB at most; graph pools took {mib(held)} "
                f"MiB, of which {mib(needed)} were in use at once"
            )
    return lines
