"""One variant of a function's calls, and its captures at all sizes."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._borrow import borrow
from ..sizes import Buckets, Size
from . import padding
from .arguments import Call, Signature, require_plain
from .captures import Captures, Graph, Span
from .padding import Copies, Cuts, Input
from .report import SizeReport
from .training import Backward, address_of


class Setup(NamedTuple):
    """What a runner captures, and how: as it was told."""

    signature: Signature
    captures: Captures
    buckets: Buckets
    dim: Any
    pad: Any
    warmup: int
    clone_outputs: bool


@dataclass(slots=True, eq=False)
class Captured:
    """One size of a program. It holds no weights."""

    statics: list[Tensor]  # what calls are copied to
    forward: Graph
    leaves: list[Any]  # what it returns: tensors where the graph leaves them, and constants
    tree: pytree.TreeSpec  # how these make up what the function returned
    backward: Backward | None
    addresses: bytes  # of the weights that it reads
    peak_bytes: int
    pool_bytes: int
    capture_seconds: float
    last_used: int = 0  # larger the later it was
    streams: set[int] = field(default_factory=set)  # that what calls write is recorded for


class Program:
    """What all calls share that run the same Python code as ``call``, the first of them."""

    def __init__(self, setup: Setup, call: Call) -> None:
        leaves = setup.signature.named_leaves(call.args, call.kwargs)
        for option, value in (("dim", setup.dim), ("pad", setup.pad)):
            padding.check_names(option, value, leaves, setup.signature.parameters)
        self.setup = setup
        self.captured: dict[Size, Captured] = {}
        self.cuts: Cuts | None = None
        self.inputs = []
        for path, leaf in leaves:
            if isinstance(leaf, Tensor):
                require_plain(leaf, path, setup.captures.device)
                dims = padding.dims_of(setup.dim, path, setup.buckets.axes)
                pad = padding.pad_of(setup.pad, path)
                self.inputs.append(Input(path, leaf, dims, pad, setup.buckets.listed))
        self.grad_inputs: dict[int, Input] = {}  # gradients of outputs, by place; padded by zero
        self._eager: dict[Size, Span] = {}

    def size_of(self, call: Call) -> Size:
        """The size of a call; raises ValueError for one that this cannot run."""
        for given, tensor in zip(self.inputs, call.tensors, strict=True):
            given.check(tensor)
        return padding.size_of(self.inputs, call.tensors, self.setup.buckets.axes)

    def is_current(self, bucket: Size) -> bool:
        """Whether it was captured with the weights that there are."""
        captured = self.captured.get(bucket)
        addresses, _ = self.setup.signature.weights.read()
        return captured is not None and captured.addresses == addresses

    def report(self, size: Size) -> SizeReport:
        captured, eager = self.captured[size], self._eager.get(size)
        graphs = [captured.forward]
        if captured.backward is not None:
            graphs.append(captured.backward.graph)
        seconds = self.setup.captures.seconds
        replays = [seconds(span) for span in captured.forward.spans]
        return SizeReport(
            size,
            nodes=sum(graph.nodes for graph in graphs),
            peak_bytes=captured.peak_bytes,
            pool_bytes=captured.pool_bytes,
            driver_bytes=sum(graph.driver_bytes for graph in graphs),
            capture_seconds=captured.capture_seconds,
            eager_seconds=eager and seconds(eager),
            replay_seconds=statistics.median(replays) if replays else None,
        )

    def warm_up(self, call: Call, size: Size, bucket: Size) -> None:
        """Runs a bucket, with what the tensors of a call hold, which is of ``size``."""
        device, times = self.setup.captures.device, self.setup.warmup
        if self.cuts is None:
            self.cuts = Cuts(
                lambda at: padding.describe(self._run(call, size, at), device),
                bucket,
                self.setup.buckets.neighbours(bucket),
            )
            times -= 1  # it has run once
        for _ in range(times):
            self._run(call, size, bucket)

    def capture(self, call: Call, bucket: Size) -> None:
        """Captures a bucket, its backward pass included. The memory of what it returns goes back
        to the pool when all of it is captured. pre: it was warmed up.
        """
        assert self.cuts is not None
        began = time.perf_counter()
        signature, captures = self.setup.signature, self.setup.captures
        held = captures.usage().held
        statics = [given.at(bucket) for given in self.inputs]
        args, kwargs = call.with_tensors(statics)
        addresses = set(map(address_of, statics))
        results: list[Any] = []

        def own(x: Tensor) -> Tensor:
            """What lies in an input is copied: the next call writes there before it reads what it
            was passed, which may be this.
            """
            return x.clone() if address_of(x) in addresses else x

        def run() -> None:
            result = signature.function(*args, **kwargs)
            results.append(pytree.tree_map_only(Tensor, own, result))

        forward = captures.capture(run)
        peak = captures.usage().peak
        self.cuts.check(padding.describe(results[0], captures.device), bucket)
        leaves, tree = pytree.tree_flatten(results.pop())
        backward = Backward(leaves, statics, signature.weights)
        backward.refuse_others(statics, signature.weights, captures)
        owner = [captures, statics, forward]  # lives as long as one of the outputs
        if backward.places:
            grads = [self._gradient_at(n, leaves[n], bucket) for n in backward.places]
            backward.graph = captures.capture(lambda: backward.run(leaves, statics, grads))
            backward.grad_outputs = grads
            owner += backward.graph, grads
            peak = max(peak, captures.usage().peak)

        def keep(x: Any) -> Any:
            """What lies in the pool is borrowed from it; inputs and weights are not."""
            if not isinstance(x, Tensor):
                return x
            return borrow(x, owner) if captures.holds(x) else x.detach()

        backward.gradients = [*map(keep, backward.gradients)]
        self.captured[bucket] = Captured(
            *(statics, forward, [*map(keep, leaves)], tree),
            backward=backward if backward.places else None,
            addresses=signature.weights.read()[0],
            peak_bytes=peak,
            pool_bytes=captures.usage().held - held,
            capture_seconds=time.perf_counter() - began,
        )

    def _run(self, call: Call, size: Size, at: Size) -> Any:
        """Runs the function, its backward pass included, and returns what it returned.

        The inputs hold as much of a call as they can; but where that is not all, none of its
        integers: an index may be of something that they do not hold.
        """
        captures, signature = self.setup.captures, self.setup.signature
        statics = [given.at(at) for given in self.inputs]
        part = tuple(map(min, size, at))
        with torch.no_grad():
            pairs = zip(call.tensors, self.inputs, strict=True)
            held = [padding.cut(x, given.dims, part) for x, given in pairs]
            Copies(self.inputs, statics, part)(held)
            for given, static in zip(self.inputs, statics, strict=True):
                if part != size and given.is_integer:
                    static.fill_(given.pad)
        args, kwargs = call.with_tensors(statics)
        began = captures.mark()
        result = signature.function(*args, **kwargs)
        leaves = pytree.tree_leaves(result)
        backward = Backward(leaves, statics, signature.weights)
        backward.run(leaves, statics, [torch.zeros_like(leaves[n]) for n in backward.places])
        self._eager[at] = began, captures.mark()
        return result

    def _gradient_at(self, place: int, output: Tensor, bucket: Size) -> Tensor:
        """Where the backward pass of a bucket reads the gradient of a leaf."""
        assert self.cuts is not None
        if place not in self.grad_inputs:
            dims, sizes = self.cuts.dims[place], self.setup.buckets.listed
            self.grad_inputs[place] = Input("a gradient", output.detach(), dims, 0, sizes)
        return self.grad_inputs[place].at(bucket)
