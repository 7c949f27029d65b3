"""Graph pools: as objects, for eager work, and what all of this process hold."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from . import _leases
from ._adapter import loaded_adapter
from ._lazy import torch
from ._leases import Keep, Key, Lease
from ._shared_exec import _MAX_EXECS, caches
from .switch import _require_booleans, _require_enabled, _require_type

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_LARGEST: Final = 2**64 - 1  # in ids that torch never makes


class _ReplayOrder:
    """The order of replays of one pool's graphs: each overwrites what those before it left."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held for as long as it takes to launch one
        self.stream: torch.cuda.Stream | None = None  # of the last one
        # Of the last one, and for errors what it was. One that failed, and a capture, have a number
        # too: they have written to what graphs read.
        self.number = 0
        self.what = ""
        self.wrote = (0, "")  # number and description of the last one that left outputs
        self._last: weakref.ref[Any] | None = None

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Orders what ``stream`` gets next behind the last replay."""
        if self.stream == stream:
            return
        if self.stream is not None:
            stream.wait_stream(self.stream)
        self.stream = stream

    def begin(self, what: str) -> int:
        """Something writes to what graphs read; returns its number."""
        self.what = what
        self.number += 1
        return self.number

    def overwrite(self, captured: Any) -> None:
        """What was begun overwrites the outputs that the last one left, by those it was for."""
        self._invalidate_last()
        self._last = weakref.ref(captured)
        self.wrote = self.number, self.what

    def lose(self, what: str) -> None:
        """What the last replay left is lost: a capture makes room, or the pool sleeps."""
        self.begin(what)
        self._invalidate_last()

    def _invalidate_last(self) -> None:
        if self._last and (last := self._last()):
            last.invalidate()


class GraphPool:
    r"""A memory pool that CUDA graphs share.

    The pool stays open while this object or a graph captured into it is alive. After that
    :func:`torch.cuda.empty_cache` gives back its memory, except for pages with a live tensor.

    Arguments:
        device (torch.device or int, optional): The device of the pool. Default: the current one.
        shared_exec (bool, optional): Whether graphs captured by :class:`cudagraph_pool.graph` share
            executables, unless that is told otherwise. Default: ``False``.
        max_execs (int, optional): The most executables at a time; the least recently used goes
            first. ``None``: one for all graphs that differ in sizes and addresses alone. There are
            fewer where the GPU has no memory for them. Default: 4.
        exec_budget (int, optional): Bytes of device memory for executables beyond ``max_execs``.
            A replayed graph keeps its own while all together take about so much. Default: 0.

    Raises:
        RuntimeError: :func:`cudagraph_pool.enable` was not called.
        ValueError: ``device`` is no CUDA device of this machine, ``max_execs`` is less than 1,
            ``exec_budget`` is negative, or has no ``max_execs`` to exceed.
    """

    _open = False  # until it is made, which may fail

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        *,
        shared_exec: bool = False,
        max_execs: int | None = _MAX_EXECS,
        exec_budget: int = 0,
    ) -> None:
        _require_booleans(shared_exec=shared_exec)
        _require_type(int | None, "an integer", max_execs=max_execs)
        _require_type(int, "an integer", exec_budget=exec_budget)
        if max_execs is not None and max_execs < 1:
            raise ValueError(f"max_execs is {max_execs}, but a graph needs an executable to run")
        if exec_budget < 0 or (exec_budget > 0 and max_execs is None):
            raise ValueError(
                f"exec_budget is {exec_budget} and max_execs is {max_execs}, but a budget is a "
                "number of bytes for executables beyond a number of them"
            )
        self._adapter = _require_enabled("GraphPool")
        self._device = _cuda_device(device)
        self._id: _POOL_HANDLE = torch.cuda.graph_pool_handle()
        self._shared_exec = shared_exec
        self._max_execs = max_execs
        self._exec_budget = exec_budget
        # Of its graphs; it lives on in them.
        self._execs = self._adapter.ExecCache(self._device.index, max_execs, exec_budget)
        self._order = _ReplayOrder()
        self._adapter.register_pool(*self._key)
        self._open = True
        _pools[self._key] = self

    @functools.cached_property
    def _own_stream(self) -> torch.cuda.Stream:
        """A stream for this pool's captures alone, as long as the pool or a graph has it."""
        idle = _idle_streams.setdefault(self._device.index, [])
        try:
            stream = idle.pop()
        except IndexError:
            stream = self._adapter.make_stream(self._device.index)
        own = torch.cuda.ExternalStream(stream, self._device)
        weakref.finalize(own, idle.append, stream)
        return own

    @property
    def id(self) -> _POOL_HANDLE:
        r"""What ``torch.cuda.graph(pool=...)`` and ``make_graphed_callables(pool=...)`` take."""
        self._require_open()
        return self._id

    @property
    def device(self) -> torch.device:
        r"""The device that the pool's memory is on."""
        return self._device

    def stats(self) -> dict[str, Any]:
        r"""Return what the pool holds, in bytes and counts.

        - ``reserved_bytes``: physical memory, in ``pages`` of ``page_bytes``.
        - ``allocated_bytes``: memory of the ``live_blocks``; ``requested_bytes``: what was asked
          for.
        - ``peak_reserved_bytes``, ``peak_allocated_bytes``: the peaks of both;
          ``scope_peak_bytes``: the peak in the last capture or ``use_pool`` block.
        - ``allocations``, ``frees``: counts so far.
        - ``ranges``: reserved address ranges; ``page_mappings``: driver calls that mapped pages,
          one or in large pools up to 64 at a time.
        - ``execs``: executables of graphs with ``shared_exec``; ``exec_instantiations``,
          ``exec_updates``: how often one was made, or updated for another graph; ``exec_alone``: by
          reason, how many of these graphs keep their own.
        - ``asleep``, ``away_bytes``: whether it sleeps, and what leases gave to the device, without
          which ``reserved_bytes`` are; ``last_sleep_bytes``: what the last sleep gave;
          ``last_wake_seconds``, ``last_wake_exec_seconds``: how long the last wake took for pages,
          and for executables.
        - ``lendable_bytes``: what it could lend now; ``lent_bytes``: what live tensors borrow.
        - ``unnamed_captures``: captures of unknown graphs, whose pages :meth:`trim` leaves: before
          torch 2.14 all but those of :class:`cudagraph_pool.graph` and :class:`GraphRunner`.
        """
        self._require_open()
        held = self._adapter.stats(*self._key)
        return {**held, **_leases.last(self._key), **self._execs.stats()}

    def snapshot(self) -> dict[str, Any]:
        r"""Return the live blocks and the mapped ranges of the pool.

        A dictionary with ``stats`` (as :meth:`stats`), ``blocks`` (``address``, ``bytes``,
        ``requested_bytes``, ``stream``, and ``pieces``: page, offset and length of each piece of
        physical memory), ``ranges`` (``address``, ``pages``) and ``gone``: pages away or lent.
        """
        self._require_open()
        return dict(self._adapter.snapshot(*self._key))

    def plot(self, path: str | os.PathLike[str]) -> None:
        r"""Draw the pool's memory over all its graphs: where every block lay, and when.

        Time is counted in allocations and frees. Each graph has a colour, and blocks stitched of
        several pieces are hatched. Needs ``pip install 'cudagraph-pool[plot]'``, and
        ``torch.cuda.memory._record_memory_history(context=None)`` before the captures.

        Arguments:
            path (str or os.PathLike): The file to write: png, svg or pdf, by its ending.

        Raises:
            ImportError: There is no matplotlib.
            RuntimeError: The history has nothing of the pool.
        """
        self._require_open()
        from .tools.pool_report import draw_pool

        draw_pool(pool_stats(self._adapter, *self._key), path)

    def sleep(self, keep: Keep = "live") -> int:
        r"""Give the pool's pages to the device until :meth:`wake`; return how many bytes.

        Waits for the device. Addresses stay reserved, and tensors may be freed meanwhile. A replay
        of the pool's graphs raises an error, before it is launched. So does one in another thread,
        unless it has begun: let none replay meanwhile. What begins to allocate in the pool (a
        capture, :func:`use_pool`) wakes it. Executables that its graphs share go too, where that
        gives memory back. If the pool sleeps already, what became free since goes too.

        Arguments:
            keep (str, optional): What becomes of pages with live tensors. ``"live"`` (default):
                they stay. ``"offload"``: live tensors are copied to pinned memory of the host, and
                :meth:`wake` copies them back. ``"nothing"``: what they hold is lost. With these two
                nobody may use the tensors, only :meth:`wake` wakes the pool, and a graph of another
                pool is refused too if it was captured since this pool was first used.

        Raises:
            RuntimeError: A capture is under way, something allocates in the pool, its pages are
                exportable or may be registered (NCCL), or, unless ``keep="live"``, a workspace of
                cuBLAS lies in it.
        """
        self._require_open()
        return self._sleep(keep)

    def _sleep(self, keep: Keep) -> int:
        """Of a closed one too: what a GraphRunner holds of it lives on."""
        with self._order.lock:
            try:
                return _leases.sleep(self._key, keep, [self._execs])
            finally:
                if self._adapter.stats(*self._key)["asleep"]:
                    self._order.lose("a sleep")

    def wake(self) -> None:
        r"""Make all pages anew that are away, behind the same addresses. Replays are right again.

        Executables that went are made again too, as far as there is memory; the next replays make
        the rest. It does nothing if none is away.

        Raises:
            torch.OutOfMemoryError: There is no memory for them. The pool sleeps on, and is whole.
        """
        self._require_open()
        _leases.wake(self._key, [self._execs])

    @contextlib.contextmanager
    def asleep(self, keep: Keep = "live") -> Iterator[None]:
        r"""Context manager in which the pool sleeps: :meth:`sleep`, then :meth:`wake`."""
        self.sleep(keep)
        try:
            yield
        finally:
            self.wake()

    def lend(self) -> contextlib.AbstractContextManager[None]:
        r"""Context manager in which this thread's eager work allocates in the pool's free pages.

        Backward passes that the thread runs within it do so, too. What is borrowed comes after the
        last replay in the order of the device, without a wait of the host, and lies at addresses of
        its own. Where the free pages do not suffice, PyTorch's own allocator serves.

        A replay raises an error while a borrowed tensor lives in what its graph needs, and says
        which. After that is freed the replay waits for the work on it, on the device.

        Raises:
            RuntimeError: The pool sleeps already, or it cannot sleep, as :meth:`sleep` says.
        """
        self._require_open()
        return _leases.lend(self._key, self._order.lock)

    def trim(self) -> int:
        r"""Give to the device what no graph and no live tensor needs; return how many bytes.

        Other graphs of the pool live on. Waits for the device. A graph needs each page in which
        anything lived during its capture; ``unnamed_captures`` of :meth:`stats` keep theirs.

        Raises:
            RuntimeError: It cannot sleep, as :meth:`sleep` says.
        """
        self._require_open()
        return int(self._adapter.trim(*self._key)[0])

    def lease(self, tensors: Sequence[torch.Tensor]) -> Lease:
        r"""Return a :class:`Lease` of tensors of the pool: their memory can go, and come back.

        It comes back to the same addresses. For activations between captured passes::

            with pool.lease(activations) as lease:
                copies = [x.to("cpu", copy=True) for x in activations]
                lease.release()
                ...  # other work has the memory
                lease.restore(copies)

        Arguments:
            tensors (sequence of Tensor): Live tensors of this pool, or views of them.

        Raises:
            RuntimeError: A tensor is not of the pool, or it cannot sleep, as :meth:`sleep` says.
        """
        self._require_open()
        return Lease(self._key, tensors)

    def close(self) -> None:
        r"""Release the pool. Graphs captured into it go on working."""
        if self._open:
            self._open = False
            self._adapter.unregister_pool(*self._key)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a GraphPool cannot be copied or pickled: graphs have its addresses")

    def __repr__(self) -> str:
        held = "released"
        if self._open:
            stats = self.stats()
            held = f"reserved={stats['reserved_bytes']}, allocated={stats['allocated_bytes']}"
        return f"GraphPool(id={self._id}, device={str(self._device)!r}, {held})"

    @property
    def _key(self) -> Key:
        return self._device.index, self._id

    def _require_open(self) -> None:
        if not self._open:
            raise RuntimeError(
                f"this GraphPool (id {self._id} of {self._device}) was released by close(); "
                "create another one"
            )


def _require_pool(pool: object) -> None:
    if not isinstance(pool, GraphPool):
        raise TypeError(
            f"pool must be a cudagraph_pool.GraphPool, not {type(pool).__name__}; "
            "torch.cuda.graph takes a pool's id"
        )
    pool._require_open()


# By device, streams that were some pool's own. They are kept: a tensor may be recorded for one,
# libraries have made workspaces for it, and torch's own 32 streams are handed out again and again.
_idle_streams: dict[int, list[int]] = {}

_pools: weakref.WeakValueDictionary[Key, GraphPool] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def use_pool(pool: GraphPool) -> Iterator[None]:
    r"""Context manager in which this thread's eager allocations go to ``pool``.

    The pool grows page by page, as expandable segments do. Tensors may outlive the block and be
    used on any stream (:meth:`torch.Tensor.record_stream` as ever). Blocks of different pools nest.

    Arguments:
        pool (GraphPool): The pool to allocate in. Graphs may be captured into it before and after:
            pages that one of them needs are not taken. :meth:`GraphPool.lend` lends these.

    Raises:
        RuntimeError: The package is not enabled, the pool was released, a capture or another
            ``use_pool`` block fills it, or the current stream is capturing.
        ValueError: The pool is not on the current device.
    """
    adapter = _require_enabled("cudagraph_pool.use_pool")
    _require_pool(pool)
    device, pool_id = pool.device.index, pool.id
    if device != torch.cuda.current_device():
        raise ValueError(
            f"the pool is on {pool.device}, but the current device is "
            f"cuda:{torch.cuda.current_device()}; use it inside `with torch.cuda.device({device})`"
        )
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "use_pool() is for eager work, but the current stream is capturing; "
            "name the pool where the capture begins instead"
        )
    adapter.end_failed_capture(device, pool_id)  # what began there before is over
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool_id)
    with contextlib.ExitStack() as ends:
        ends.callback(torch._C._cuda_releasePool, device, pool_id)
        ends.callback(torch._C._cuda_endAllocateToPool, device, pool_id)  # the first of the two
        yield


def _cuda_device(device: torch.device | str | int | None) -> torch.device:
    """The CUDA device meant, with an index."""
    index = torch.cuda._utils._get_device_index(device, optional=True)
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise ValueError(f"there is no device cuda:{index}; torch sees {count} CUDA device(s)")
    return torch.device("cuda", index)


def stats() -> dict[str, Any]:
    r"""Return what every graph pool of this process holds, and where captures went.

    Pools of every kind are listed: of a :class:`GraphPool`, a :class:`torch.cuda.MemPool`, a
    :func:`torch.cuda.graph_pool_handle` (as of ``torch.compile``), one capture that named none, and
    the one of ``enable(share_captures=True)``. Memory of PyTorch's own allocator is not;
    :func:`torch.cuda.memory_stats` counts both. A dictionary with

    - ``captures``: how many have begun since the package was first enabled, ``ours`` in these pools
      and ``base`` in PyTorch's own. ``base_reasons`` says why there: ``disabled``, ``mempool`` (a
      :class:`torch.cuda.MemPool` of PyTorch's allocator), ``older_pool`` (one that it had before).
    - ``pools``: a list, each with ``device``, ``id``, ``kind``, ``users`` (graphs and objects that
      hold it), what :meth:`GraphPool.stats` returns, and ``graphs``: the last 65,536 captures in
      their order, failed ones too. Of each, ``added_bytes`` is the memory that the pool got
      meanwhile, ``peak_bytes`` the most allocated at once, ``live_before_bytes`` of that what lived
      before, ``allocations`` their number, after ``first_allocation`` of the pool.
    - ``execs``: a list, for each ``device`` with ``enable(shared_exec=True)`` the figures of
      executables that :meth:`GraphPool.stats` has.

    It is empty without a GPU, or before the package was enabled.
    """
    adapter: Any = loaded_adapter()
    if adapter is None:
        reasons = dict.fromkeys(("disabled", "mempool", "older_pool"), 0)
        captures = {"ours": 0, "base": 0, "base_reasons": reasons}
        return {"captures": captures, "pools": [], "execs": []}
    pools = []
    for key in _keys():
        with contextlib.suppress(RuntimeError):  # given back meanwhile
            pools.append(pool_stats(adapter, *key))
    captures = {**adapter.capture_counts(), "base_reasons": adapter.base_captures()}
    execs = [{"device": device, **cache.stats()} for device, cache in caches.items()]
    return {"captures": captures, "pools": pools, "execs": execs}


def pool_stats(adapter: Any, device: int, id: tuple[int, int]) -> dict[str, Any]:
    """What :func:`stats` says of one pool."""
    owner = _owner(device, id)
    stats = owner.stats() if owner else {**adapter.stats(device, id), **_leases.last((device, id))}
    if id[0] == _LARGEST:
        kind = "pluggable allocator" if id[1] == _LARGEST else "shared captures"
    elif owner:
        kind = "GraphPool"
    elif adapter.is_mempool(device, id):
        kind = "MemPool"
    else:
        kind = "one capture's own" if id[1] == 0 else "graph_pool_handle"
    return {
        "device": device,
        "id": id,
        "kind": kind,
        "users": adapter.use_count(device, id),
        **stats,
        "graphs": adapter.captures(device, id),
    }


def _owner(device: int, id: tuple[int, int]) -> GraphPool | None:
    owner = _pools.get((device, id))
    return owner if owner is not None and owner._open else None


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
    return int(sum(given))


def wake() -> None:
    r"""Wake all graph pools of this process that sleep, as :meth:`GraphPool.wake`.

    Raises:
        torch.OutOfMemoryError: There is no memory for some. All others are awake.
    """
    _of_each(lambda key, pool: _leases.wake(key, [pool._execs] if pool else ()))
    for device, cache in dict(caches).items():
        cache.make_dropped(device)


def lend_on_oom(enabled: bool = True) -> None:
    r"""Let eager work that runs out of memory borrow from idle graph pools before it fails.

    It borrows as within :meth:`GraphPool.lend`, from the pool of its GPU that can lend most, and
    outside of captures alone. A replay that needs what a borrowed tensor has raises an error.

    Arguments:
        enabled (bool, optional): Whether to lend from now on. Default: ``True``.

    Raises:
        RuntimeError: The package is not enabled.
    """
    _require_booleans(enabled=enabled)
    adapter = _require_enabled("cudagraph_pool.lend_on_oom")
    if enabled:
        _leases.guard_replays()
    adapter.lend_on_oom(enabled)


def _keys() -> Iterator[Key]:
    """Of all pools of this process."""
    adapter: Any = loaded_adapter()
    if adapter is not None:
        for device in range(torch.cuda.device_count()):
            for pool in adapter.pool_ids(device):
                yield device, pool


def _of_each(act: Callable[[Key, GraphPool | None], Any]) -> list[Any]:
    """Does it for each pool, and its object if there is one, then raises the first error."""
    given, errors = [], []
    for key in _keys():
        if key[1] == (_LARGEST, _LARGEST):
            continue  # of the pluggable allocator: it is eager memory
        try:
            given.append(act(key, _pools.get(key)))  # that may be closed
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return given
