"""Switching the allocator on and off."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ._adapter import load_adapter, loaded_adapter

if TYPE_CHECKING:
    from torch.cuda.memory import CUDAPluggableAllocator, _CUDAAllocator

_logger = logging.getLogger(__package__)


def enable(
    share_captures: bool = False,
    mempools: bool = True,
    shared_exec: bool = False,
    exportable: bool = False,
) -> None:
    r"""Let CUDA graph captures allocate in memory pools of this package.

    May be called at any time, also after CUDA is initialized and while tensors are alive. Graphs
    captured before stay with the allocator that they were captured with. Calling it again only
    changes its options, for what is made from then on. Observers of memory that runs out hear of
    pools of this package too, whenever they were attached; trackers of allocations
    (``attachAllocatorTraceTracker`` in C++) only if they were attached after this, since PyTorch
    tells nobody who its trackers are.

    Arguments:
        share_captures (bool, optional): Let all captures that name no pool share one for each
            device, for code that cannot be edited. The rules of a shared pool apply then: these
            graphs must not be replayed concurrently, and what one returns must be read or copied
            before another one is replayed, unless it was kept alive since its capture. A capture
            that begins while another one fills the shared pool gets a pool of its own. Statistics
            by pool (torch 2.13) have the shared one under ``(2**64 - 1, 0)``. Default: ``False``.
        mempools (bool, optional): Whether a :class:`torch.cuda.MemPool` that is made from now on,
            without an allocator of its own, is a pool of this package: what is allocated under
            :func:`torch.cuda.use_mem_pool`, and captures into its ``id``. With ``use_on_oom`` it
            lends to eager work that PyTorch's own allocator has no memory for, unless a graph that
            was captured into it is alive; observers of memory that runs out are told all the same.
            With ``no_split`` a block has whole pages. Default: ``True``.
        shared_exec (bool, optional): Whether graphs share executables, as those of
            :class:`cudagraph_pool.graph` may, whoever captures them: four on each device, and more
            where the device would wait for switches, as long as all together take 256 MiB at most.
            A graph made with ``keep_graph=True`` keeps its own. Default: ``False``.
        exportable (bool, optional): Whether other processes can be given the memory that pools take
            from now on (``cuMemExportToShareableHandle``, as file descriptors), which SGLang's
            all-reduce asks for. Default: ``False``.

    Puts ``NCCL_GRAPH_REGISTER=0`` into the environment, unless the variable is set: NCCL must not
    register the buffers of captures by itself, which it does in mapped memory alone. NCCL reads the
    variable once, at the first collective that is captured.

    Raises:
        ImportError: There is no adapter for the torch that is here.
        RuntimeError: There is no GPU, its driver lacks virtual memory management, a capture is
            under way, or another allocator was installed after this one.
        TypeError: An option is neither ``True`` nor ``False``.
    """
    options = {
        "share_captures": share_captures,
        "mempools": mempools,
        "shared_exec": shared_exec,
        "exportable": exportable,
    }
    _require_booleans(**options)
    adapter = load_adapter()
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(
            "cudagraph_pool.enable() needs a CUDA GPU and torch sees none "
            "(torch.cuda.is_available() is False); check the driver and CUDA_VISIBLE_DEVICES. "
            "Without a GPU, `cudagraph-pool replay` runs the same core on recorded captures"
        )
    torch.cuda.init()
    stream = torch.cuda.graph.default_capture_stream
    if stream is not None:
        with torch.cuda.stream(stream):
            capturing = torch.cuda.is_current_stream_capturing()
        if capturing:
            raise RuntimeError(
                "enable() was called while a CUDA graph capture is under way; "
                "call it before the capture begins or after it has ended"
            )
    _let_nccl_register_nothing()
    adapter.enable(share_captures, mempools, exportable)
    _share_execs(shared_exec)
    _log_at_the_end()
    _logger.info("enabled: %s", ", ".join(f"{name}={is_on}" for name, is_on in options.items()))


def _require_booleans(**options: object) -> None:
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}, but must be True or False")


def disable() -> None:
    r"""Let CUDA graph captures allocate in PyTorch's own allocator again.

    Pools that graphs or a :class:`torch.cuda.MemPool` still use go on working until the last of
    them is gone; a capture into one of these stays with it. All other captures go to PyTorch's
    allocator. Calling it when nothing is enabled has no effect.

    Raises:
        RuntimeError: A capture is under way.
    """
    adapter: Any = loaded_adapter()
    if adapter is not None:
        was_enabled = adapter.is_enabled()
        adapter.disable()
        _share_execs(False)
        if was_enabled:
            _log_captures(adapter, "disabled")


@functools.cache
def _log_at_the_end() -> None:
    """What :func:`disable` logs, of a process that ends without it."""
    from multiprocessing.util import Finalize

    def log() -> None:
        if is_enabled():
            _log_captures(load_adapter(), "the process ends")

    Finalize(None, log, exitpriority=0)  # not atexit: multiprocessing's forked processes skip that


def _log_captures(adapter: Any, why: str) -> None:
    """Where they went: who captures is not asked, since that should cost nothing."""
    counts = adapter.capture_counts()
    _logger.info(
        "%s: %d captures went to pools of this package, %d to PyTorch's own allocator (%s)",
        *(why, counts["ours"], counts["base"]),
        ", ".join(f"{reason}: {count}" for reason, count in adapter.base_captures().items()),
    )


def _let_nccl_register_nothing() -> None:
    """NCCL registers the buffers that a capture's collectives have in mapped memory, by address.
    When the graph goes it ends that one collective late: a graph that is captured at the same
    addresses before that gets nothing, since the sender writes to memory that is gone (2.28.9,
    register.cc). Memory that cannot be exported it never lets go of (p2p.cc, ipcRegisterBuffer).
    """
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def _share_execs(shares: bool) -> None:
    """Replaces nothing of torch's where nobody has asked for it."""
    if shares or "cudagraph_pool._shared_capture" in sys.modules:
        from . import _shared_capture

        _shared_capture.set_shares(shares)


def is_enabled() -> bool:
    r"""Return True if CUDA graph captures allocate in memory pools of this package."""
    adapter = loaded_adapter()
    return adapter is not None and bool(adapter.is_enabled())


def _require_enabled(what: str) -> Any:
    if not is_enabled():
        raise RuntimeError(
            f"{what} needs cudagraph_pool to be enabled: call cudagraph_pool.enable() first"
        )
    return load_adapter()


@contextmanager
def enabled(
    share_captures: bool = False,
    mempools: bool = True,
    shared_exec: bool = False,
    exportable: bool = False,
) -> Iterator[None]:
    r"""Context manager that enables the package for a block of code, as :func:`enable` does.

    At its end the package is disabled again. If it was enabled before, it stays so, with the
    options of this call.
    """
    before = is_enabled()
    enable(share_captures, mempools, shared_exec, exportable)
    try:
        yield
    finally:
        if not before:
            disable()


def allocator() -> _CUDAAllocator:
    r"""Return the allocator for :func:`torch.cuda.memory.change_current_allocator`.

    It wraps the allocator that is current now. An alternative to :func:`enable` for programs that
    choose their allocator before CUDA is initialized.

    Raises:
        ImportError: There is no adapter for the torch that is here.
    """
    adapter = load_adapter()
    from torch.cuda.memory import _CUDAAllocator

    _let_nccl_register_nothing()
    return _CUDAAllocator(adapter.allocator())


def pluggable_allocator() -> CUDAPluggableAllocator:
    r"""Return a :class:`torch.cuda.memory.CUDAPluggableAllocator` of this package.

    Its pool hooks are set, so that graphs can be captured with it as the process's allocator
    (:func:`torch.cuda.memory.change_current_allocator`). What PyTorch's class lacks, statistics
    and snapshots above all, it lacks here too: :func:`enable` and :func:`allocator` do not.

    Raises:
        ImportError: There is no adapter for the torch that is here.
    """
    path = library_path()
    from torch.cuda.memory import CUDAPluggableAllocator

    library = ctypes.CDLL(path)
    made = CUDAPluggableAllocator(path, "cudagraph_pool_malloc", "cudagraph_pool_free")
    inner: Any = made.allocator()
    for set_hook, name in (
        (inner.set_reset_fn, "reset"),
        (inner.set_memory_fraction_fn, "memory_fraction"),
        (inner.set_base_alloc_fn, "base_alloc"),
        (inner.set_record_stream_fn, "record_stream"),
        (inner.set_begin_allocate_to_pool, "begin_allocate_to_pool"),
        (inner.set_end_allocate_to_pool_fn, "end_allocate_to_pool"),
        (inner.set_release_pool, "release_pool"),
    ):
        function = getattr(library, f"cudagraph_pool_{name}")
        set_hook(ctypes.cast(function, ctypes.c_void_p).value)
    return made


def library_path() -> str:
    r"""Return the path of the library that holds the C functions of the allocator.

    For :class:`torch.cuda.memory.CUDAPluggableAllocator`, with the names
    ``"cudagraph_pool_malloc"`` and ``"cudagraph_pool_free"``. PyTorch tells such an allocator
    nothing of captures, nor of :meth:`torch.Tensor.record_stream`. So it refuses to allocate during
    a capture, and what another stream uses must not be freed before that stream is done with it.
    :func:`pluggable_allocator` sets the hooks that lift both limits. As the allocator of a
    :class:`torch.cuda.MemPool` it makes that pool's memory expandable, captures included.

    Raises:
        ImportError: There is no adapter for the torch that is here.
    """
    path = str(load_adapter().__file__)
    _let_nccl_register_nothing()
    return path
