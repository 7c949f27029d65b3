"""Switching the allocator on and off."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.cuda.memory import CUDAPluggableAllocator, _CUDAAllocator

# Not from PyPI, where the package is not published.
_REBUILD = "in a clone of cudagraph_pool, pip install --no-deps --force-reinstall ."


_logger = logging.getLogger(__package__)


def load_adapter() -> Any:
    """The extension module ``cudagraph_pool._torch``, checked against the torch that is here.

    Raises:
        ImportError: torch is missing, has no CUDA, or is not the one that the adapter was built
            for. The message says which command sets it right.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "cudagraph_pool needs PyTorch to be enabled, and there is none: install a CUDA build "
            f"of torch 2.11 to 2.15, then build the adapter for it: {_REBUILD}"
        ) from error
    if torch.version.cuda is None:
        raise ImportError(
            f"cudagraph_pool needs a CUDA build of PyTorch; torch {torch.__version__} is none. "
            f"Install one, then build the adapter for it: {_REBUILD}"
        )
    if _loaded_adapter() is None and importlib.util.find_spec("cudagraph_pool._torch") is None:
        raise ImportError(
            "cudagraph_pool was installed without its PyTorch adapter, because no CUDA build of "
            f"torch was found then. Build it for torch {torch.__version__}: {_REBUILD}"
        )
    found = ".".join(torch.__version__.split(".")[:2])
    try:
        from cudagraph_pool import _torch
    except ImportError as error:
        raise ImportError(
            f"the PyTorch adapter of cudagraph_pool cannot be loaded by torch {found}: {error}. "
            f"Rebuild it: {_REBUILD}"
        ) from error
    if found != _torch.built_for:
        raise ImportError(
            f"cudagraph_pool was built for torch {_torch.built_for}, but this is torch {found}; "
            f"each minor release needs its own build. Rebuild it: {_REBUILD}"
        )
    return _torch


def _loaded_adapter() -> ModuleType | None:
    """The adapter if something has loaded it: only then can anything be enabled."""
    return sys.modules.get("cudagraph_pool._torch")


def enable(
    share_captures: bool = False,
    mempools: bool = True,
    shared_exec: bool = False,
    exportable: bool = False,
) -> None:
    r"""Let CUDA graph captures allocate in memory pools of this package.

    May be called at any time, also after CUDA is initialized and while tensors are alive. Graphs
    captured before stay with the allocator that they were captured with. Calling it again changes
    nothing but what its arguments say of what is to come. Observers of memory that runs out hear of
    pools of this package too, whenever they were attached; trackers of allocations
    (``attachAllocatorTraceTracker`` in C++) only if they were attached after this, since PyTorch
    tells nobody who its trackers are.

    Arguments:
        share_captures (bool, optional): Let all captures that name no pool share one for each
            device, for code that cannot be edited. That asks of its user what sharing a pool
            always does: graphs captured so must not be replayed concurrently, and what one
            returns must be read or copied before another one is replayed, unless it was kept
            alive since its capture. A capture that begins while another one fills the shared
            pool gets a pool of its own. Statistics by pool (torch 2.13) have the shared one under
            ``(2**64 - 1, 0)``. Default: ``False``.
        mempools (bool, optional): Whether a :class:`torch.cuda.MemPool` that is made from now on,
            without an allocator of its own, is a pool of this package: what is allocated under
            :func:`torch.cuda.use_mem_pool`, and captures into its ``id``. With ``use_on_oom`` it
            lends to eager work that PyTorch's own allocator has no memory for, unless a graph was
            captured into it that lives; observers of memory that runs out are told all the same.
            With ``no_split`` a block has whole pages. Default: ``True``.
        shared_exec (bool, optional): Whether graphs share executables, as those of
            :class:`cudagraph_pool.graph` may, whoever captures them: four on each device, and more
            where the device would wait for switches, as long as all together take 256 MiB at most.
            A graph made with ``keep_graph=True`` keeps its own. Default: ``False``.
        exportable (bool, optional): Whether other processes can be given the memory that pools take
            from now on (``cuMemExportToShareableHandle``, as file descriptors), which SGLang's
            all-reduce asks for. NCCL up to 2.30.7 then registers buffers of captures that lie on
            several handles wrongly. Default: ``False``.

    Raises:
        ImportError: The adapter was not built, or not for this release of torch.
        RuntimeError: There is no GPU, its driver lacks virtual memory management, a capture is
            under way, or another allocator was installed after this one.
    """
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
    adapter.enable(share_captures, mempools, exportable)
    _share_execs(shared_exec)
    _logger.info(
        "enabled: share_captures=%s, mempools=%s, shared_exec=%s, exportable=%s",
        *(share_captures, mempools, shared_exec, exportable),
    )


def disable() -> None:
    r"""Let CUDA graph captures allocate in PyTorch's own allocator again.

    Pools that graphs or a :class:`torch.cuda.MemPool` still use go on working until the last of
    them is gone; a capture into one of these stays with it. All other captures go to PyTorch's
    allocator. Calling it when nothing is enabled has no effect.

    Raises:
        RuntimeError: A capture is under way.
    """
    adapter: Any = _loaded_adapter()
    if adapter is not None:
        was_enabled = adapter.is_enabled()
        adapter.disable()
        _share_execs(False)
        if was_enabled:
            _log_captures(adapter)


def _log_captures(adapter: Any) -> None:
    """Where they went: who captures is not asked, since that should cost nothing."""
    counts = adapter.capture_counts()
    _logger.info(
        "disabled: %d captures went to pools of this package, %d to PyTorch's own allocator (%s)",
        *(counts["ours"], counts["base"]),
        ", ".join(f"{reason}: {count}" for reason, count in adapter.base_captures().items()),
    )


def _share_execs(shares: bool) -> None:
    """Replaces nothing of torch's where nobody has asked for it."""
    if shares or "cudagraph_pool._shared_capture" in sys.modules:
        from . import _shared_capture

        _shared_capture.set_shares(shares)


def is_enabled() -> bool:
    r"""Return True if CUDA graph captures allocate in memory pools of this package."""
    adapter = _loaded_adapter()
    return adapter is not None and bool(adapter.is_enabled())


@contextmanager
def enabled(
    share_captures: bool = False,
    mempools: bool = True,
    shared_exec: bool = False,
    exportable: bool = False,
) -> Iterator[None]:
    r"""Context manager that enables the package for a block of code, as :func:`enable` does.

    At its end the package is disabled again, unless it was enabled before.
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
        ImportError: The adapter was not built, or not for this release of torch.
    """
    adapter = load_adapter()
    from torch.cuda.memory import _CUDAAllocator

    return _CUDAAllocator(adapter.allocator())


def pluggable_allocator() -> CUDAPluggableAllocator:
    r"""Return a :class:`torch.cuda.memory.CUDAPluggableAllocator` of this package.

    Its pool hooks are set, so that graphs can be captured with it as the process's allocator
    (:func:`torch.cuda.memory.change_current_allocator`). What PyTorch's class lacks, statistics
    and snapshots above all, it lacks here too: :func:`enable` and :func:`allocator` do not.

    Raises:
        ImportError: The adapter was not built, or not for this release of torch.
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
    nothing of captures, so this one refuses to allocate during a capture, nor of
    :meth:`torch.Tensor.record_stream`, so what another stream uses must not be freed before that is
    done: :func:`pluggable_allocator` sets the hooks that it takes. As the allocator of a
    :class:`torch.cuda.MemPool` it makes that pool's memory expandable, captures included.

    Raises:
        ImportError: The adapter was not built, or not for this release of torch.
    """
    return str(load_adapter().__file__)
