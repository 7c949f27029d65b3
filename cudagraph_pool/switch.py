"""Switching the allocator on and off."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ._adapter import load_adapter, loaded_adapter
from ._lazy import torch
from ._leases import name_all_captures
from ._shared_exec import let_all_share

if TYPE_CHECKING:
    from torch.cuda.memory import CUDAPluggableAllocator, _CUDAAllocator


def enable(
    *,
    share_captures: bool = False,
    mempools: bool = True,
    shared_exec: bool = False,
    exportable: bool = False,
) -> None:
    r"""Let CUDA graph captures allocate in memory pools of this package.

    May be called at any time, also after CUDA is initialized and while tensors are alive. Graphs
    captured before stay with their allocator. Another call changes the options of what is made
    later. It sets ``NCCL_GRAPH_REGISTER=0`` unless the variable is set: NCCL must not register the
    buffers of captures, since they lie in mapped memory.

    Arguments:
        share_captures (bool, optional): Let all captures that name no pool share one for each
            device. Their graphs must not run concurrently, and the output of one must be read or
            copied before another is replayed, unless it was kept alive since its capture. A capture
            that begins while another one fills the shared pool gets its own. Statistics by pool
            (torch 2.13) list the shared one as ``(2**64 - 1, 0)``. Default: ``False``.
        mempools (bool, optional): Make a :class:`torch.cuda.MemPool` without an allocator of its
            own a pool of this package, from now on. With ``use_on_oom`` it lends to eager work that
            has no memory left, unless a graph captured into it is alive. With ``no_split`` a block
            has whole pages. Default: ``True``.
        shared_exec (bool, optional): Let all graphs share executables, as those of
            :class:`cudagraph_pool.graph` may: four on each device, and more while all together take
            256 MiB at most. Graphs of ``keep_graph=True`` keep their own. Default: ``False``.
        exportable (bool, optional): Let other processes be given the memory that pools take from
            now on, as file descriptors, which SGLang's all-reduce needs. Default: ``False``.

    Raises:
        ImportError: There is no adapter for the installed torch.
        RuntimeError: There is no GPU, its driver lacks virtual memory management, a capture is
            under way, or another allocator was installed after this one.
    """
    _require_booleans(**locals())
    adapter = load_adapter()
    if not torch.cuda.is_available():
        raise RuntimeError(
            "cudagraph_pool.enable() needs a CUDA GPU and torch sees none "
            "(torch.cuda.is_available() is False); check the driver and CUDA_VISIBLE_DEVICES. "
            "Without a GPU, `cudagraph-pool replay` runs the same core on recorded captures"
        )
    torch.cuda.init()
    with torch.cuda.stream(torch.cuda.graph.default_capture_stream):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "enable() was called while a CUDA graph capture is under way; "
                "call it before the capture begins or after it has ended"
            )
    _let_nccl_register_nothing()
    adapter.enable(share_captures, mempools, exportable)
    let_all_share(shared_exec)
    name_all_captures()


def _require_type(kind: Any, what: str, **options: object) -> None:
    for name, value in options.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name} is {value!r}, but must be {what}")


_require_booleans = functools.partial(_require_type, bool, "True or False")


def _require_one_of(known: Sequence[str], **options: str) -> None:
    for name, value in options.items():
        if value not in known:
            raise ValueError(f"{name} is {value!r}, but must be one of {known}")


def disable() -> None:
    r"""Let CUDA graph captures allocate in PyTorch's own allocator again.

    Pools that a graph or a :class:`torch.cuda.MemPool` uses go on working, also for captures into
    them. All other captures go to PyTorch's allocator. Without :func:`enable` it has no effect.

    Raises:
        RuntimeError: A capture is under way.
    """
    adapter: Any = loaded_adapter()
    if adapter is not None:
        adapter.disable()
        let_all_share(False)


def _let_nccl_register_nothing() -> None:
    """NCCL 2.28.9 registers a captured collective's buffers by address, and lets go of them one
    collective after the graph is gone (register.cc). A graph captured at the same addresses before
    that receives nothing. Memory that cannot be exported stays registered (p2p.cc).
    """
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


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
    *,
    share_captures: bool = False,
    mempools: bool = True,
    shared_exec: bool = False,
    exportable: bool = False,
) -> Iterator[None]:
    r"""Context manager that enables the package for a block of code, as :func:`enable` does.

    The package is disabled again at the end, unless it was enabled before. Then it stays enabled,
    with the options of this call.
    """
    options = dict(locals())
    before = is_enabled()
    enable(**options)
    try:
        yield
    finally:
        if not before:
            disable()


def allocator() -> _CUDAAllocator:
    r"""Return the allocator for :func:`torch.cuda.memory.change_current_allocator`.

    It wraps the current allocator. An alternative to :func:`enable` for programs that choose their
    allocator before CUDA is initialized.

    Raises:
        ImportError: There is no adapter for the installed torch.
    """
    adapter = load_adapter()
    _let_nccl_register_nothing()
    return torch.cuda.memory._CUDAAllocator(adapter.allocator())


def pluggable_allocator() -> CUDAPluggableAllocator:
    r"""Return a :class:`torch.cuda.memory.CUDAPluggableAllocator` of this package.

    Graphs can be captured with it as the process's allocator
    (:func:`torch.cuda.memory.change_current_allocator`). PyTorch's class has no statistics and no
    snapshots; :func:`enable` and :func:`allocator` do.

    Raises:
        ImportError: There is no adapter for the installed torch.
    """
    path = library_path()
    import ctypes  # which takes as long as the rest of the package

    library = ctypes.CDLL(path)
    functions = "cudagraph_pool_malloc", "cudagraph_pool_free"
    made: CUDAPluggableAllocator = torch.cuda.memory.CUDAPluggableAllocator(path, *functions)
    inner: Any = made.allocator()
    for name, set_hook in {
        "reset": inner.set_reset_fn,
        "memory_fraction": inner.set_memory_fraction_fn,
        "base_alloc": inner.set_base_alloc_fn,
        "record_stream": inner.set_record_stream_fn,
        "begin_allocate_to_pool": inner.set_begin_allocate_to_pool,
        "end_allocate_to_pool": inner.set_end_allocate_to_pool_fn,
        "release_pool": inner.set_release_pool,
    }.items():
        function = getattr(library, f"cudagraph_pool_{name}")
        set_hook(ctypes.cast(function, ctypes.c_void_p).value)
    return made


def library_path() -> str:
    r"""Return the path of the library that holds the C functions of the allocator.

    For :class:`torch.cuda.memory.CUDAPluggableAllocator`, with the names
    ``"cudagraph_pool_malloc"`` and ``"cudagraph_pool_free"``. PyTorch does not tell such an
    allocator of captures or of :meth:`torch.Tensor.record_stream`: it refuses to allocate during a
    capture, and memory that another stream uses must not be freed early.
    :func:`pluggable_allocator` lifts both limits. As the allocator of a
    :class:`torch.cuda.MemPool` it makes that pool expandable, captures included.

    Raises:
        ImportError: There is no adapter for the installed torch.
    """
    path = str(load_adapter().__file__)
    _let_nccl_register_nothing()
    return path
