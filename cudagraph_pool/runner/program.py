"""One variant of a function's calls, and its captures at all sizes."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._borrow import borrow
from ..sizes import Buckets, Size
from .arguments import Call, Signature, is_plain, refuse
from .captures import Captures, Graph, SizeReport, Span
from .padding import Copies, Cuts, Input, check_names, cut, describe, dims_of, pad_of


class Setup(NamedTuple):
    """What a runner captures, and how: as it was told."""

    signature: Signature
    captures: Captures
    buckets: Buckets
    dim: Any
    pad: Any
    warmup: int
    clone_outputs: bool


class Backward:
    """The backward pass of a run, which may be a capture. It holds no weights."""

    gradients: "Sequence[Tensor | None]" = ()  # what it leaves for inputs and parameters

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], setup: Setup) -> None:
        trained = [n for n, x in enumerate(outputs) if x.requires_grad and torch.is_grad_enabled()]
        reached = {n: _leaves_behind(outputs[n]) for n in trained}
        found = {key: x for each in reached.values() for key, x in each.items()}
        weights = setup.signature.weights()
        kept = {id(x): (members, name) for members, name, x in weights if id(x) in found}
        keys = [*map(id, inputs), *kept]
        # Where the module keeps parameters that get gradients: dictionaries, and names in them.
        self.parameters = [*zip(*kept.values(), strict=True)] or [(), ()]
        # For each input and parameter the outputs that it gets a gradient from, by number.
        self.reached_from = [{n for n in reached if key in reached[n]} for key in keys]
        # The outputs that have gradients, unless these would reach nothing.
        self.places = [*reached] if any(self.reached_from) else []
        self._others = [x for key, x in found.items() if key not in keys]

    def refuse_others(self, inputs: Sequence[Tensor], setup: Setup) -> None:
        """Raises ValueError for a tensor that should get gradients of a capture, and would not."""
        others, self._others = self._others, []
        weights = (x for _, _, x in setup.signature.weights() if is_plain(x))
        memory = set(map(_address_of, (*inputs, *weights)))
        for x in others:
            # What the function makes, or detaches from an input or a weight, is its own.
            if not is_plain(x) or not (_address_of(x) in memory or setup.captures.holds(x)):
                raise ValueError(
                    f"the outputs depend on a tensor of shape {(*x.shape,)} that requires "
                    "gradients and is neither an argument nor a parameter of the module. Pass the "
                    "module itself, a method of it, or the tensor; or call within torch.no_grad()"
                )

    def run(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> None:
        if not self.places:
            return
        sources = [*inputs, *map(dict.__getitem__, *self.parameters)]
        wanted = [x for x, reached in zip(sources, self.reached_from, strict=True) if reached]
        trained = [outputs[n] for n in self.places]
        # As after the function's own autocast: a backward pass does not choose types anew.
        with torch.autocast(trained[0].device.type, enabled=False):
            found = torch.autograd.grad(trained, wanted, grads, allow_unused=True)
        for x, gradient in zip(wanted, found, strict=True):
            if gradient is not None and not is_plain(gradient):
                refuse(gradient, f"the gradient of shape {(*x.shape,)}")
        rest = iter(found)
        self.gradients = [next(rest) if reached else None for reached in self.reached_from]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Captured:
    """One size of a program. It holds no weights."""

    written: list[Tensor]  # what calls are copied to; then what gradients of outputs are copied to
    graphs: list[Graph]  # of the forward pass, and of the backward pass
    outputs: list[Tensor]  # where the graph leaves them
    counted: list[Tensor]  # of these: inference mode counts no versions, and autograd saves none
    leaves: list[Any]  # what else it returns, with ... for each output
    tree: pytree.TreeSpec  # how these make up what the function returned
    backward: Backward  # without places there is none
    addresses: bytes  # of the weights that it reads
    pool_bytes: int
    capture_seconds: float
    last_used: int  # the number of its last replay, or of its capture
    streams: set[int] = field(default_factory=set)  # that what calls write is recorded for

    def invalidate(self) -> None:
        """Autograd refuses, from now on, what it has saved of the outputs."""
        torch._C._increment_version(self.counted)


class Program:
    """What all calls share that run the same Python code as ``call``, the first of them."""

    def __init__(self, setup: Setup, call: Call) -> None:
        leaves = setup.signature.named_leaves(call.args, call.kwargs)
        for option, value in (("dim", setup.dim), ("pad", setup.pad)):
            check_names(option, value, leaves, setup.signature.parameters)
        self.setup = setup
        self.captured: dict[Size, Captured] = {}
        self.cuts: Cuts | None = None
        self.inputs = []
        for path, leaf in leaves:
            if isinstance(leaf, Tensor):
                if leaf.device != setup.captures.device:
                    refuse(leaf, path)
                dims, pad = dims_of(setup.dim, path, setup.buckets.axes), pad_of(setup.pad, path)
                self.inputs.append(Input(path, leaf, dims, pad, setup.buckets.listed))
        self.grad_inputs: dict[int, Input] = {}  # gradients of outputs, padded by zero
        self._eager: dict[Size, Span] = {}

    def report(self, size: Size) -> SizeReport:
        """What it cost, with what its first replays have shown."""
        captured, seconds = self.captured[size], self.setup.captures.seconds
        replays = [seconds(span) for span in captured.graphs[0].spans]
        return SizeReport(
            size,
            nodes=sum(graph.nodes for graph in captured.graphs),
            peak_bytes=max(graph.peak_bytes for graph in captured.graphs),
            pool_bytes=captured.pool_bytes,
            driver_bytes=sum(graph.driver_bytes for graph in captured.graphs),
            capture_seconds=captured.capture_seconds,
            eager_seconds=seconds(eager) if (eager := self._eager.get(size)) else None,
            replay_seconds=statistics.median(replays) if replays else None,
        )

    def warm_up(self, call: Call, size: Size, bucket: Size) -> None:
        """Runs a bucket, with what the tensors of a call hold, which is of ``size``."""
        device, times = self.setup.captures.device, self.setup.warmup
        if self.cuts is None:
            beside = self.setup.buckets.neighbours(bucket)
            self.cuts = Cuts(lambda at: describe(self._run(call, size, at), device), bucket, beside)
            times -= 1  # it has run once
        for _ in range(times):
            self._run(call, size, bucket)

    def capture(self, call: Call, bucket: Size) -> Captured:
        """Captures a bucket, and its backward pass, into the pool. pre: it was warmed up."""
        assert self.cuts is not None
        began = time.perf_counter()
        signature, captures = self.setup.signature, self.setup.captures
        held = captures.stats()["reserved_bytes"]
        statics = [given.at(bucket) for given in self.inputs]
        args, kwargs = call.with_tensors(statics)
        addresses = set(map(_address_of, statics))
        results: list[Any] = []

        def own(x: Tensor) -> Tensor:
            """Not what lies in an input: a call that is passed it would overwrite it first."""
            return x.clone() if _address_of(x) in addresses else x

        def run() -> None:
            result = signature.function(*args, **kwargs)
            results.append(pytree.tree_map_only(Tensor, own, result))

        graphs = [captures.capture(run)]
        self.cuts.check(describe(results[0], captures.device), bucket)
        leaves, tree = pytree.tree_flatten(results.pop())
        outputs = [x for x in leaves if isinstance(x, Tensor)]
        backward = Backward(outputs, statics, self.setup)
        backward.refuse_others(statics, self.setup)
        for n in backward.places:
            if n not in self.grad_inputs:
                dims, sizes = self.cuts.tensor_dims[n], self.setup.buckets.listed
                self.grad_inputs[n] = Input("a gradient", outputs[n].detach(), dims, 0, sizes)
        grads = [self.grad_inputs[n].at(bucket) for n in backward.places]
        if grads:
            graphs.append(captures.capture(lambda: backward.run(outputs, statics, grads)))
        owner = captures, statics, grads, graphs  # lives as long as one of the outputs

        def keep(x: Tensor) -> Tensor:
            """What lies in the pool is borrowed from it; inputs and weights are not."""
            return borrow(x, owner) if captures.holds(x) else x.detach()

        backward.gradients = [None if x is None else keep(x) for x in backward.gradients]
        outputs = [*map(keep, outputs)]
        return Captured(
            *([*statics, *grads], graphs, outputs, [x for x in outputs if not x.is_inference()]),
            *([... if isinstance(x, Tensor) else x for x in leaves], tree),
            backward=backward,
            addresses=signature.addresses(),
            pool_bytes=captures.stats()["reserved_bytes"] - held,
            capture_seconds=time.perf_counter() - began,
            last_used=captures.order.number,
        )

    def _run(self, call: Call, size: Size, at: Size) -> Any:
        """Runs the function and its backward pass on what its inputs can hold of a call. If that is
        not all, they hold none of its integers: these may be indices of the rest.
        """
        captures, signature = self.setup.captures, self.setup.signature
        statics = [given.at(at) for given in self.inputs]
        part = tuple(map(min, size, at))
        with torch.no_grad():
            pairs = zip(call.tensors, self.inputs, strict=True)
            Copies(self.inputs, statics, part)([cut(x, given.dims, part) for x, given in pairs])
            for given, static in zip(self.inputs, statics, strict=True):
                if part != size and given.is_integer:
                    static.fill_(given.pad)
        args, kwargs = call.with_tensors(statics)
        began = captures.mark()
        result = signature.function(*args, **kwargs)
        outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        backward = Backward(outputs, statics, self.setup)
        backward.run(outputs, statics, [torch.zeros_like(outputs[n]) for n in backward.places])
        self._eager[at] = began, captures.mark()
        return result


def _leaves_behind(output: Tensor) -> dict[int, Tensor]:
    """The leaves whose gradients a backward pass accumulates, by id."""
    leaves: dict[int, Tensor] = {}
    waiting, seen = [torch.autograd.graph.get_gradient_edge(output).node], {None}
    while waiting:
        if (node := waiting.pop()) not in seen:
            seen.add(node)
            if type(node).__name__ == "AccumulateGrad":
                leaves[id(node.variable)] = node.variable
            waiting += [following for following, _ in node.next_functions]
    return leaves


def _address_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())
