"""SGLang's memory saver where graph pools sleep, too.

``/release_memory_occupation`` pauses memory by tags, all unless it is told which: that of graphs,
``cuda_graph``, last, and it resumes it first. torch_memory_saver knows nothing of mapped memory, so
that it has none of this tag, or is not there at all: its adapter is, always.
"""

import functools
import logging
from typing import Final

import cudagraph_pool

from .._table import mib

_ADAPTERS: Final = "sglang.srt.utils.torch_memory_saver_adapter._TorchMemorySaverAdapter"
_GRAPHS: Final = "cuda_graph"

_logger = logging.getLogger("cudagraph_pool")


@functools.cache
def serve_memory_saver() -> None:
    """Registers hooks, which SGLang applies once all of its plugins were called."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for kind in ("Real", "Noop"):
        HookRegistry.register(f"{_ADAPTERS}{kind}.pause", _after_pause, HookType.AFTER)
        HookRegistry.register(f"{_ADAPTERS}{kind}.resume", _before_resume, HookType.BEFORE)


def _after_pause(result: object, adapter: object, tag: str) -> None:
    if tag != _GRAPHS:
        return
    try:
        given = cudagraph_pool.sleep()
    except Exception as error:
        # SGLang would end. The rest of its memory is paused, and that of other pools.
        _logger.warning("a graph pool does not sleep: %s", error)
    else:
        _logger.info("graph pools gave back %s MiB", mib(given))


def _before_resume(adapter: object, tag: str) -> None:
    if tag == _GRAPHS:
        cudagraph_pool.wake()
