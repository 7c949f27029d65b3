"""Captures without a GPU: operations are recorded, and replayed into the memory they had.

As in a pool, a replay overwrites what other graphs left: here with values that are noticed.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves

import cudagraph_pool as cgp
from cudagraph_pool._adapter import load_adapter

# For all tests that import this.
try:
    load_adapter()
except ImportError as error:
    pytest.skip(f"needs the adapter: {error}", allow_module_level=True)

from cudagraph_pool.pools import _ReplayOrder
from cudagraph_pool.runner.captures import Graph, Span

# What a graph changes autograd does not see.
_UNSEEN = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


class Stream:
    """Knows which streams it has waited for."""

    cuda_stream = 0  # which calls take for the current one where there is no GPU

    def __init__(self) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


class Tape(TorchDispatchMode):  # type: ignore[misc]
    """A graph: operations, and what they allocated."""

    def __init__(self, pool: CpuCaptures) -> None:
        super().__init__()
        self._pool = pool
        self._operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []
        self.allocated: list[Tensor] = []
        self.read: set[int] = set()  # addresses of all arguments
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(is_traceable_wrapper_subclass, tree_leaves((args, kwargs)))):
            return NotImplemented  # the tape has what it does to the tensors within
        read = {_address(x) for x in _tensors((args, kwargs))}
        self.read |= read
        result = func(*args, **kwargs)
        returned = result if isinstance(result, (tuple, list)) else (result,)
        fresh = []
        for value in returned:
            is_new = isinstance(value, Tensor) and _address(value) not in read
            fresh.append(value if is_new else None)
        self._operations.append((func, args, kwargs, fresh))
        self.allocated += [value for value in fresh if value is not None]
        return result

    def replay(self) -> None:
        self.replays += 1
        self._pool.overwrite_others(self)
        with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(_UNSEEN):
            for func, args, kwargs, fresh in self._operations:
                result = func(*args, **kwargs)
                returned = result if isinstance(result, (tuple, list)) else (result,)
                for value, target in zip(returned, fresh, strict=False):
                    if target is not None:
                        target.data.copy_(value)

    def forget(self) -> None:
        """What was captured: it is not replayed any more."""
        self._operations.clear()
        self.allocated.clear()

    def addresses(self) -> set[int]:
        return {_address(tensor) for tensor in self.allocated}

    def spoil(self) -> None:
        for tensor in self.allocated:
            if tensor.is_floating_point():
                tensor.data.fill_(float("nan"))


def _address(tensor: Tensor) -> int:
    dense = tensor if tensor.layout == torch.strided else tensor.values()
    address: int = dense.untyped_storage().data_ptr()
    return address


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class CpuCaptures:
    """Stands for cudagraph_pool.runner.captures.Captures."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.tapes: list[Tape] = []
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.stream = Stream()
        self.order = _ReplayOrder()
        self.lock = threading.RLock()

    @contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        self.follow(())
        self.order.lose("a capture")
        yield

    def empty_caches(self) -> None:
        pass

    def capture(self, work: Callable[[], None]) -> Graph:
        tape = Tape(self)
        self.tapes.append(tape)
        try:
            with tape:
                work()
        except BaseException:
            self.tapes.remove(tape)
            raise
        captures: Any = self
        graph = Graph(tape, len(tape._operations), captures)
        self._graphs.add(graph)
        return graph

    def overwrite_others(self, replayed: Tape) -> None:
        """But for the one captured before it, if it reads that: as a backward pass does."""
        place = self.tapes.index(replayed)
        for number, tape in enumerate(self.tapes):
            is_forward = number == place - 1 and tape.addresses() & replayed.read
            if number != place and not is_forward:
                tape.spoil()

    def trim(self) -> None:
        kept = {id(graph._graph) for graph in self._graphs}
        self.tapes = [tape for tape in self.tapes if id(tape) in kept]

    def holds(self, tensor: Tensor) -> bool:
        address = _address(tensor)
        return any(address in tape.addresses() for tape in self.tapes)

    def stats(self) -> dict[str, int]:
        held = sum(t.nbytes for tape in self.tapes for t in tape.allocated)
        peak = sum(t.nbytes for tape in self.tapes[-1:] for t in tape.allocated)
        return {"reserved_bytes": held, "scope_peak_bytes": peak}

    def device_bytes(self) -> int:
        return self.stats()["reserved_bytes"]

    def synchronize(self) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, span: Span) -> float:
        began, ended = span
        return float(ended - began)

    def follow(self, written: Sequence[Tensor], streams: set[int] | None = None) -> None:
        stream: Any = self.stream
        self.order.follow(stream)


class CpuRunner(cgp.GraphRunner):
    """A GraphRunner whose graphs run on the CPU."""

    captures: CpuCaptures

    def _new_captures(self, pool: Any, shared_exec: Any, own_workspace: Any) -> Any:
        self.captures = CpuCaptures() if pool is None else pool
        return self.captures

    @property
    def sizes_captured(self) -> list[Any]:
        return [row.size for row in self.report()]


def is_captured() -> bool:
    """Whether what runs now is recorded."""
    return any(isinstance(mode, Tape) for mode in _get_current_dispatch_mode_stack())


def tree_equal(a: Any, b: Any) -> bool:
    """Bit for bit."""
    pairs = list(zip(tree_leaves(a), tree_leaves(b), strict=True))
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


# What tests of GraphRunner start from.

SIZES = [1, 2, 4, 8]


def runner(function: Any, sizes: Any = SIZES, **options: Any) -> CpuRunner:
    return CpuRunner(function, sizes=sizes, progress=False, **options)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3))


def rows(n: int, columns: int = 6, **options: Any) -> Tensor:
    return torch.randn(n, columns, **options)


def double(x: Tensor) -> Tensor:
    return x * 2


class Made(nn.Module):  # type: ignore[misc]
    """A module of a function, which is given the module, and its weights."""

    def __init__(self, function: Callable[..., Any], **weights: Any) -> None:
        super().__init__()
        self._function = function
        for name, weight in weights.items():
            if isinstance(weight, (nn.Module, nn.Parameter)):
                setattr(self, name, weight)
            else:
                self.register_buffer(name, weight)

    def forward(self, *args: Any) -> Any:
        return self._function(self, *args)


def weight(*shape: int, value: float = 1) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, float(value)))


class Quantized(Tensor):  # type: ignore[misc]
    """A weight as bytes and a scale, as quantization makes them: not a tensor with memory."""

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        self.values, self.scale = values, scale

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Quantized:
        made: Quantized = Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Quantized:
        return Quantized(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        args = [a.values.to(a.scale) * a.scale if isinstance(a, cls) else a for a in args]
        return func(*args, **(kwargs or {}))
