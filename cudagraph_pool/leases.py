"""Memory of idle pools, of the whole process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from . import _leases
from ._adapter import loaded_adapter
from ._leases import Key, Lease
from ._shared_exec import caches
from .pools import _LARGEST, GraphPool, _pools
from .switch import _require_booleans, _require_enabled

__all__ = ["Lease", "lend_on_oom", "sleep", "wake"]

_Given = TypeVar("_Given")


def sleep() -> int:
    r"""Let all graph pools of this process sleep, and return how many bytes the GPUs got back.

    As :meth:`GraphPool.sleep` with ``keep="live"``, for pools of every kind: those of a
    :class:`torch.cuda.MemPool`, of ``torch.compile`` and of captures that named none, too.

    Raises:
        RuntimeError: A pool cannot sleep, as :meth:`GraphPool.sleep` says. All others do.
    """
    given = _of_each(
        lambda key, pool: pool._sleep("live") if pool else _leases.sleep(key, "live", ())
    )
    for device, cache in dict(caches).items():
        _leases.drop_execs(device, [cache])
    return sum(given)


def wake() -> None:
    r"""Wake all graph pools of this process that sleep, as :meth:`GraphPool.wake`.

    Raises:
        torch.OutOfMemoryError: There is no memory for some. All others are awake.
    """
    _of_each(lambda key, pool: _leases.wake(key, pool._exec_caches() if pool else ()))
    for device, cache in dict(caches).items():
        _leases.make_execs(device, [cache])


def _of_each(act: Callable[[Key, GraphPool | None], _Given]) -> list[_Given]:
    """Does it for each pool, and its object if there is one, then raises the first error."""
    adapter: Any = loaded_adapter()
    if adapter is None:
        return []
    import torch

    given: list[_Given] = []
    errors: list[RuntimeError] = []
    for device in range(torch.cuda.device_count()):
        for pool in adapter.pool_ids(device):
            if pool == (_LARGEST, _LARGEST):
                continue  # of the pluggable allocator: it is eager memory
            key = device, pool
            try:
                given.append(act(key, _pools.get(key)))  # that may be closed
            except RuntimeError as error:
                errors.append(error)
    if errors:
        raise errors[0]
    return given


def lend_on_oom(enabled: bool = True) -> None:
    r"""Let eager work that runs out of memory borrow from idle graph pools before it fails.

    It borrows as within :meth:`GraphPool.lend`, from the pool of its GPU that can lend most, and
    outside of captures alone. A replay of a graph whose memory is lent raises an error while the
    borrowed tensor lives.

    Arguments:
        enabled (bool, optional): Whether to lend from now on. Default: ``True``.

    Raises:
        RuntimeError: The package is not enabled.
        TypeError: ``enabled`` is neither ``True`` nor ``False``.
    """
    _require_booleans(enabled=enabled)
    adapter = _require_enabled("cudagraph_pool.lend_on_oom")
    if enabled:
        _leases.guard_replays()
    adapter.lend_on_oom(enabled)
