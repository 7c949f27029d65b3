"""vLLM's sleep mode where graph pools sleep, too: ``sleep_mode_backend="cudagraph_pool"``.

Weights and KV cache stay with vLLM's own backend, cumem. That one can keep graphs on the host as
well (``sleep_mode_offload_cudagraph``), in a pool of its own, but only where it is chosen itself.
"""

import logging

from vllm.device_allocator.sleep_mode_backend import CuMemBackend

import cudagraph_pool

from .._table import mib

_logger = logging.getLogger("vllm.cudagraph_pool")


class GraphPoolBackend(CuMemBackend):  # type: ignore[misc] # vLLM is not there to be checked
    """Each of vLLM's workers makes one at its first sleep.

    Pools come first both ways: what they do can be undone, while cumem may have lost the KV cache.
    If either fails, pools are as they were, and so is cumem if it was a pool that failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._away: set[str] = set()  # what graphs compute with, and cumem has yet to bring back

    def suspend(self, level: int = 1) -> None:
        try:
            given = cudagraph_pool.sleep()
            super().suspend(level)
        except BaseException:
            cudagraph_pool.wake()
            raise
        self._away = {"weights", "kv_cache"}
        _logger.info("graph pools gave back %s MiB", mib(given))

    def resume(self, tags: list[str] | None = None) -> None:
        """Pools wake with the last tag: vLLM replays nothing before, and weights have the room."""
        away = set() if tags is None else self._away.difference(tags)
        wakes = bool(self._away) and not away
        try:
            if wakes:
                cudagraph_pool.wake()
            super().resume(tags)
        except BaseException:
            if wakes:
                cudagraph_pool.sleep()
            raise
        self._away = away
