"""One variant of a function's calls, and its captures at all sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._borrow import borrow
from ..sizes import Buckets, Size
from . import padding
from .arguments import Call, Signature
from .captures import Captures, Span, Usage
from .padding import Copies, Cuts, Input
from .report import Measured, SizeReport
from .training import Backward, BackwardPass, address_of


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
    forward: Measured
    leaves: list[Any]  # what it returns: tensors where the graph leaves them, and constants
    tree: pytree.TreeSpec  # how these make up what the function returned
    backward: Backward | None
    addresses: bytes  # of the weights that it reads
    cost: SizeReport
    eager: Span | None  # a run of the function
    last_used: int = 0  # larger the later it was
    streams: set[int] = field(default_factory=set)  # that what calls write is recorded for

    def report(self, seconds: Callable[[Span], float]) -> SizeReport:
        """What it cost, with what its first replays have shown."""
        spans = self.forward.spans
        more = self.forward.driver_bytes
        if self.backward is not None:
            more += self.backward.graph.driver_bytes
        return replace(
            self.cost,
            driver_bytes=self.cost.driver_bytes + more,
            eager_seconds=self.eager and seconds(self.eager),
            replay_seconds=statistics.median(map(seconds, spans)) if spans else None,
        )


class Program:
    """What all calls share that run the same Python code as ``call``, the first of them."""

    def __init__(self, setup: Setup, call: Call) -> None:
        leaves = setup.signature.named_leaves(call.args, call.kwargs)
        parameters = setup.signature.parameters
        known = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        for option, value in (("dim", setup.dim), ("pad", setup.pad)):
            padding.check_names(option, value, [path for path, _ in leaves], known)
        self.setup = setup
        self.captured: dict[Size, Captured] = {}
        self.cuts: Cuts | None = None
        self.grad_inputs: dict[int, Input] = {}  # gradients of outputs, by place
        self.inputs = [
            self._input(
                *(path, x, padding.dims_of(setup.dim, path, setup.buckets.axes)),
                padding.pad_of(setup.pad, path),
            )
            for path, x in leaves
            if isinstance(x, Tensor)
        ]
        self._eager: dict[Size, Span] = {}

    def _input(self, path: str, tensor: Tensor, dims: padding.Dims, pad: float) -> Input:
        device, sizes = self.setup.captures.device, self.setup.buckets.listed
        return Input(path, tensor, dims, pad, device, sizes)

    def size_of(self, call: Call) -> Size:
        """The size of a call; raises ValueError for one that this cannot run."""
        for given, tensor in zip(self.inputs, call.tensors, strict=True):
            given.check(tensor)
        return padding.size_of(self.inputs, call.tensors, self.setup.buckets.axes)

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

    def capture(self, call: Call, bucket: Size, before: Usage) -> Usage:
        """Captures a bucket, its backward pass included. The memory of what it returns goes back
        to the pool when all of it is captured. Returns what is used then, by what was before.
        pre: it was warmed up.
        """
        assert self.cuts is not None
        began = time.perf_counter()
        signature, captures, *_ = self.setup
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

        graphs = [captures.capture(run)]
        after = captures.usage()
        self.cuts.check(padding.describe(results[0], captures.device), bucket)
        leaves, tree = pytree.tree_flatten(results.pop())
        follows = BackwardPass(leaves, statics, signature.weights)
        follows.refuse_others(captures)
        grad_outputs = [self._gradient_at(n, x, bucket) for n, x in follows.outputs.items()]
        gradients: list[Tensor | None] = []
        if grad_outputs:
            graphs.append(captures.capture(lambda: gradients.extend(follows.run(grad_outputs))))
            after = captures.usage()._replace(peak=max(after.peak, captures.usage().peak))
        owner = captures, statics, grad_outputs, graphs  # live as long as one of the outputs

        def keep(x: Any) -> Any:
            """What lies in the pool is borrowed from it; inputs and weights are not."""
            if not isinstance(x, Tensor):
                return x
            return borrow(x, owner) if captures.holds(x) else x.detach()

        forward, *rest = [Measured(graph, captures) for graph in graphs]
        backward = None
        if rest:
            backward = Backward(
                *(rest[0], [*follows.outputs], grad_outputs, follows.parameters),
                *([*map(keep, gradients)], follows.reached_from),
            )
        cost = SizeReport(
            bucket,
            nodes=sum(graph.nodes for graph in (forward, *rest)),
            peak_bytes=after.peak,
            pool_bytes=after.pool - before.pool,
            driver_bytes=after.execs - before.execs,
            capture_seconds=time.perf_counter() - began,
        )
        self.captured[bucket] = Captured(
            *(statics, forward, [*map(keep, leaves)], tree, backward),
            *(signature.weights.read()[0], cost, self._eager.get(bucket)),
        )
        return after

    def _run(self, call: Call, size: Size, at: Size) -> Any:
        """Runs the function, its backward pass included, and returns what it returned.

        The inputs hold as much of a call as they can; but where that is not all, none of its
        integers: an index may be of something that they do not hold.
        """
        captures, signature = self.setup.captures, self.setup.signature
        statics = [given.at(at) for given in self.inputs]
        part = tuple(map(min, size, at))
        with torch.no_grad():
            held = [
                padding.cut(x, given.dims, part)
                for x, given in zip(call.tensors, self.inputs, strict=True)
            ]
            Copies(self.inputs, statics, part)(held)
            for given, static in zip(self.inputs, statics, strict=True):
                if part != size and given.is_integer:
                    static.fill_(given.pad)
        args, kwargs = call.with_tensors(statics)
        began = captures.mark()
        result = signature.function(*args, **kwargs)
        follows = BackwardPass(pytree.tree_leaves(result), statics, signature.weights)
        if follows.outputs:
            follows.run([*map(torch.zeros_like, follows.outputs.values())])
        self._eager[at] = began, captures.mark()
        return result

    def _gradient_at(self, place: int, output: Tensor, bucket: Size) -> Tensor:
        """Where the backward pass of a bucket reads the gradient of a leaf. Its padding is zero."""
        assert self.cuts is not None
        if place not in self.grad_inputs:
            path, dims = f"the gradient of output {place}", self.cuts.dims[place]
            self.grad_inputs[place] = self._input(path, output.detach(), dims, 0)
        return self.grad_inputs[place].at(bucket)
