"""Pages of a pool that are away while its graphs are idle, and what a replay asks about them."""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal

from ._adapter import load_adapter
from ._lazy import torch

if TYPE_CHECKING:
    from . import _torch

Key = tuple[int, tuple[int, int]]  # device and id of a pool
Keep = Literal["live", "offload", "nothing"]

_NEVER: Final = {"last_sleep_bytes": 0, "last_wake_seconds": None, "last_wake_exec_seconds": None}
_last: dict[Key, dict[str, Any]] = {}
# Of pools that sleep without their live blocks: copies of these, with their addresses.
_contents: dict[Key, list[tuple[int, torch.Tensor]]] = {}
# By device, whether the driver gives memory back when executables go.
_execs_pay: dict[int, bool] = {}
_lock = threading.Lock()


# --- Graphs and their captures ---


def name_capture(adapter: Any, graph: Any, device: int, pool: tuple[int, int]) -> None:
    """Tells the adapter that ``graph`` is this thread's last capture, and when that is gone."""
    capture, place = adapter.name_capture(device, pool)
    if capture == 0:
        return  # it has a name, or is none of ours
    _watch_resets()
    graph._captured = device, pool, capture, place
    graph._gone = weakref.finalize(graph, adapter.drop_capture, device, pool, capture)
    graph._gone.atexit = False


@functools.cache
def name_all_captures() -> None:
    """From torch 2.14 on, also of graphs that other code captures."""
    register = getattr(torch.cuda.graphs, "register_graph_capture_end_hook", None)
    if register is not None:
        name = functools.partial(name_capture, load_adapter())
        register(lambda graph: name(graph, torch.cuda.current_device(), tuple(graph.pool())))


@functools.cache
def _watch_resets() -> None:
    """A graph that is reset is gone, though its object may capture another one."""
    native = torch.cuda.CUDAGraph.reset

    @functools.wraps(native)
    def reset(self: Any) -> None:
        try:
            native(self)
        finally:
            if gone := vars(self).pop("_gone", None):
                del self._captured
                gone()

    torch.cuda.CUDAGraph.reset = reset


def guard_replays() -> None:
    """From now on each replay asks first whether what it needs is there.

    torch's global hooks (2.14) cannot refuse a replay: it swallows their errors.
    """
    _find_trees()
    with _lock:
        _replace_replays()


@functools.cache
def _replace_replays() -> None:
    from . import _shared_exec

    # That of graphs that share, before an executable is made. Else the native one, which those of
    # Python call: so that bound methods that were stored before ask, too.
    kinds: tuple[Any, ...] = _shared_exec._SharesExec, torch._C._CUDAGraph
    for kind in kinds:
        kind.replay = preceded(kind.replay, by=_begin_replay)


def _find_trees() -> None:
    """torch imports them late. A node replays its graph when it is made, and runs later."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if node := getattr(trees, "CUDAGraphNode", None):
        _guard_trees(node)


@functools.cache
def _guard_trees(node: Any) -> None:
    """Before its replay a node of torch.compile's trees copies into inputs that no longer live."""
    node.run = preceded(node.run, by=lambda replayed: _begin_replay(replayed.graph))


def preceded(native: Callable[..., Any], by: Callable[[Any], None]) -> Callable[..., Any]:
    """A method that calls ``by`` with the object first, which may refuse the call."""

    @functools.wraps(native)
    def method(self: Any, *args: Any) -> Any:
        by(self)
        return native(self, *args)

    return method


def _begin_replay(graph: Any) -> None:
    _find_trees()
    captured = vars(graph).get("_captured")
    if captured is None:
        try:
            captured = None, graph.pool(), 0, 0
        except RuntimeError:
            return  # it holds nothing, as its replay will say
    adapter = load_adapter()
    try:
        adapter.begin_replay(*captured)
    except RuntimeError as error:
        for line in _borrowers(adapter, *captured[:2]):
            error.add_note(line)
        raise


def _borrowers(adapter: Any, device: int | None, pool: tuple[int, int]) -> Iterator[str]:
    """What borrows from the pool and, if torch has noted it, where that was made."""
    borrowed = adapter.borrowed(torch.cuda.current_device() if device is None else device, pool)
    made: dict[int, Any] = {}
    if borrowed and torch._C._cuda_isHistoryEnabled():
        blocks = (b for s in torch.cuda.memory_snapshot() for b in s["blocks"])
        made = {block["address"]: block.get("frames") for block in blocks}
    for address, size in borrowed:
        frames = [f for f in made.get(address) or () if f["filename"].endswith(".py")]
        where = "".join(f", made at {f['filename']}:{f['line']}" for f in frames[:1])
        yield f"{size:,} bytes at {address:#x} are borrowed{where}"


# --- What a pool does ---


def last(key: Key) -> dict[str, Any]:
    return _last.get(key, _NEVER)


def sleep(key: Key, keep: Keep, caches: Iterable[_torch.ExecCache]) -> int:
    """See :meth:`GraphPool.sleep`. ``caches`` have the executables of its graphs."""
    if keep not in ("live", "offload", "nothing"):
        raise ValueError(f"keep is {keep!r}, but must be 'live', 'offload' or 'nothing'")
    adapter = load_adapter()
    guard_replays()
    for known in (_contents, _last):
        for other in [other for other in known if other[1] not in adapter.pool_ids(other[0])]:
            del known[other]  # the pool is gone
    is_new = keep != "live" and key not in _contents
    if is_new:
        _settle(adapter, key)
        _contents[key] = _copies(adapter, key) if keep == "offload" else []
    try:
        given, *_ = adapter.sleep(*key, keep == "live")
    except BaseException:
        if is_new and not adapter.stats(*key)["asleep"]:
            del _contents[key]
        raise
    _last[key] = {**last(key), "last_sleep_bytes": given}
    drop_execs(key[0], caches)
    return int(given)


def wake(key: Key, caches: Iterable[_torch.ExecCache]) -> None:
    """See :meth:`GraphPool.wake`. ``caches`` have the executables of its graphs."""
    adapter = load_adapter()
    began = time.perf_counter()
    contents = _contents.get(key)
    brought, *_ = adapter.wake(*key)
    if contents:
        live = {block["address"] for block in _present(adapter, key)}
        for address, copy in contents:
            if address in live:
                _block(key[0], address, copy.nbytes).copy_(copy, non_blocking=True)
        torch.cuda.synchronize(key[0])
    if contents is not None:
        adapter.note_filled(*key)  # replays have been refused so far
        del _contents[key]
    awake = time.perf_counter()
    for cache in caches:
        cache.make_dropped(key[0])  # as far as there is memory: a replay makes the rest
    if brought:
        _last[key] = {
            **last(key),
            "last_wake_seconds": awake - began,
            "last_wake_exec_seconds": time.perf_counter() - awake,
        }


def _settle(adapter: Any, key: Key) -> None:
    """Waits for the device, or raises what a sleep without live tensors would raise: copies would
    break a capture, and a wake would bring them back after a sleep that was refused.
    """
    with Lease(key, ()) as nothing:
        nothing.release()
    for address, size, _ in adapter.blas_workspaces():
        if adapter.pool_of(key[0], address) == key[1]:
            raise RuntimeError(
                f"graph pool {key[1]} holds a workspace of cuBLAS's, of {size:,} bytes, in which "
                "other work computes: its live tensors must stay. Use keep='live', or multiply on "
                "the capture's stream before the first capture"
            )


def _present(adapter: Any, key: Key) -> list[dict[str, Any]]:
    """The live blocks that no lease has given away."""
    snapshot = adapter.snapshot(*key)
    gone, blocks = set(snapshot["gone"]), snapshot["blocks"]
    return [block for block in blocks if gone.isdisjoint(page for page, *_ in block["pieces"])]


def _copies(adapter: Any, key: Key) -> list[tuple[int, torch.Tensor]]:
    """The live blocks in pinned memory."""
    blocks = _present(adapter, key)
    sizes = [block["bytes"] for block in blocks]
    # One allocation for all, since torch rounds each up to a power of two.
    pinned = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=True).split(sizes)
    copies = [(block["address"], copy) for block, copy in zip(blocks, pinned, strict=True)]
    for address, copy in copies:
        copy.copy_(_block(key[0], address, copy.nbytes), non_blocking=True)
    torch.cuda.synchronize(key[0])
    return copies


def _block(device: int, address: int, size: int) -> torch.Tensor:
    at = torch.device("cuda", device)
    storage = torch._C._construct_storage_from_data_pointer(address, at, size)
    return torch.empty(0, dtype=torch.uint8, device=at).set_(storage, 0, (size,), (1,))


def drop_execs(device: int, caches: Iterable[_torch.ExecCache]) -> None:
    """Lets shared executables go, if that gives memory back: the driver may keep it for the next
    ones, which is found out the first time. pre: the device is idle.
    """
    filled = [cache for cache in caches if cache.stats()["execs"]]
    if not filled or not _execs_pay.get(device, True):
        return
    free, _ = torch.cuda.mem_get_info(device)
    for cache in filled:
        cache.drop_idle()
    _execs_pay.setdefault(device, torch.cuda.mem_get_info(device)[0] > free)


@contextmanager
def lend(key: Key, launches: AbstractContextManager[object]) -> Iterator[None]:
    """See :meth:`GraphPool.lend`. ``launches`` is held while something is launched."""
    adapter = load_adapter()
    guard_replays()
    with launches:
        loan = adapter.begin_loan(*key)
    try:
        yield
    finally:
        adapter.end_loan(key[0], loan)


class Lease:
    r"""Tensors whose memory can leave while their addresses stay: see :meth:`GraphPool.lease`.

    As a context manager it brings the memory back at its end.
    """

    def __init__(self, key: Key, tensors: Sequence[torch.Tensor]) -> None:
        guard_replays()
        self._adapter = adapter = load_adapter()
        self._tensors = list(tensors)
        blocks = sorted({x.untyped_storage().data_ptr() for x in self._tensors})
        self._key, self._number = key, adapter.begin_lease(*key, blocks)
        self._end = weakref.finalize(self, adapter.end_lease, key[0], key[1], self._number)
        self._end.atexit = False

    def release(self) -> int:
        r"""Give the memory back to the device, after waiting for it; return the bytes.

        What the tensors hold is lost: copy it to the host first. A page stays if another live
        tensor lies in it. Replays that need the pages raise an error until :meth:`restore`.
        """
        return int(self._adapter.release_lease(*self._key, self._number)[0])

    def restore(self, from_host: Sequence[torch.Tensor] | None = None) -> None:
        r"""Bring memory back to the same addresses.

        Arguments:
            from_host (sequence of Tensor, optional): What each tensor is to hold, copied on the
                current stream. Default: they hold anything.

        Raises:
            torch.OutOfMemoryError: There is no memory for it. Nothing has changed.
        """
        if from_host is not None and len(from_host) != len(self._tensors):
            raise ValueError(
                f"from_host has {len(from_host)} tensors, but {len(self._tensors)} were leased"
            )
        self._adapter.restore_lease(*self._key, self._number)
        for tensor, host in zip(self._tensors, from_host or (), strict=False):
            tensor.data.copy_(host, non_blocking=True)  # unseen by autograd, which may have it

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._adapter.end_lease(*self._key, self._number)
        self._end.detach()
