"""One variant of a function's calls, and its captures at all sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._borrow import borrow, version_of
from ..sizes import Buckets, Size
from . import arguments, inputs, training
from .arguments import Call, Weights, require_plain
from .captures import Captures, Span, Usage
from .inputs import Copies, Input, StaticInputs
from .outputs import Cuts, Output, describe
from .report import SizeReport
from .training import Backward, address_of


class Setup(NamedTuple):
    """What a runner captures, and how: as it was told."""

    function: Callable[..., Any]
    parameters: arguments.Parameters
    weights: Weights
    captures: Captures
    buckets: Buckets
    dim: Any
    pad: Any


class Owner:
    """What a graph needs as long as somebody holds one of its outputs."""

    versions: tuple[Tensor, ...] = ()  # count changes of the outputs, which a replay overwrites

    def __init__(self, *held: Any) -> None:
        self._held = held


@dataclass(slots=True, eq=False)
class Captured:
    """One size of a program. It holds no weights."""

    statics: list[Tensor]  # what calls are copied to
    owner: Owner  # lives as long as one of the outputs
    forward: Any  # its graph
    backward: Backward | None
    leaves: list[Any]  # what it returns: tensors where the graph leaves them, and constants
    tree: pytree.TreeSpec  # how these make up what the function returned
    addresses: bytes  # of the weights that it reads
    changed: tuple[Tensor, ...]  # counts changes of the weights that each replay changes
    read: tuple[Tensor, ...]  # counts changes of what the backward pass reads
    cost: SizeReport
    eager: Span | None  # a run of the function for it
    last_used: int = 0  # larger the later it was
    read_then: list[int] = field(default_factory=list)  # what was read, after the last call
    samples: list[Span] = field(default_factory=list)  # its first replays
    replayed: list[Any] = field(default_factory=list)  # the graphs that were
    streams: set[int] = field(default_factory=set)  # that what calls write is recorded for


class Program:
    """What all calls share that run the same Python code as ``call``, the first of them."""

    def __init__(self, setup: Setup, call: Call) -> None:
        leaves = arguments.named_leaves(setup.parameters, call.args, call.kwargs)
        names = [name for name, _ in leaves]
        known = [p.name for p in setup.parameters if p.kind is not p.VAR_KEYWORD]
        inputs.check_names("dim", setup.dim, names, known)
        inputs.check_names("pad", setup.pad, names, known)
        axes = setup.buckets.axes
        self.setup = setup
        self.inputs = [
            Input.of(name, x, inputs.dims_of(setup.dim, name, axes), inputs.pad_of(setup.pad, name))
            for name, x in leaves
            if isinstance(x, Tensor)
        ]
        self.cuts: Cuts | None = None
        self.captured: dict[Size, Captured] = {}
        self._statics: StaticInputs | None = None
        self._gradients: dict[int, StaticInputs] = {}
        self._eager: dict[Size, Span] = {}
        self._trains = False  # its outputs lead to something that gets gradients
        self._found: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # of that, by id

    def size_of(self, call: Call) -> Size:
        """The size of a call; raises ValueError for one that this cannot run."""
        for given, tensor in zip(self.inputs, call.tensors, strict=True):
            given.check(tensor, self.setup.captures.device)
        return inputs.size_of(self.inputs, call.tensors, self.setup.buckets.axes)

    def warm_up(self, call: Call, size: Size, bucket: Size, times: int) -> None:
        """Runs a bucket, with what the tensors of a call hold, which is of ``size``."""
        captures, buckets = self.setup.captures, self.setup.buckets
        if self._statics is None:  # they are the stream's that captures
            self._statics = StaticInputs(self.inputs, captures.device, buckets.listed or [bucket])

        def outputs_at(at: Size) -> list[Output]:
            result = self._run(call, size, at, times=1, thoroughly=True)
            leaves = pytree.tree_leaves(result)
            arguments.refuse_transforms([x for x in leaves if isinstance(x, Tensor)])
            return describe(result, captures.device.type)

        if self.cuts is None:
            self.cuts = Cuts(outputs_at, bucket, buckets.neighbours(bucket))
            times -= 1  # it has run once
        if times > 0:
            self._run(call, size, bucket, times)

    def capture(self, call: Call, bucket: Size, before: Usage) -> Usage:
        """Captures a bucket, its backward pass included. The memory of what it returns goes back
        to the pool when all of it is captured. Returns what is used then, by what was before.
        pre: it was warmed up.
        """
        assert self._statics is not None
        assert self.cuts is not None
        began = time.perf_counter()
        function, _, weights, captures, *_ = self.setup
        statics = self._statics.at(bucket)
        # Tensors of inference mode count no changes.
        counting = [x for x in weights.tensors() if not x.is_inference()]
        versions = [x._version for x in (*statics, *counting)]
        saved = training.SavedTensors(captures, statics, counting)
        args, kwargs = call.with_tensors(statics)
        results: list[Any] = []

        def run() -> None:
            # What lies in an input is copied: the next call writes there before it reads what it
            # was passed, which may be this.
            results.append(pytree.tree_map_only(Tensor, own, function(*args, **kwargs)))

        def own(x: Tensor) -> Tensor:
            return x.clone() if any(address_of(x) == address_of(given) for given in statics) else x

        with saved.noting() if self._trains else nullcontext():
            graphs = [captures.capture(run)]
        after = captures.usage()
        pairs = zip((*statics, *counting), versions, strict=True)
        is_changed = [x._version != version for x, version in pairs]
        self._refuse_changes(is_changed[: len(statics)])
        changed = zip(counting, is_changed[len(statics) :], strict=True)
        self.cuts.check(describe(results[0], captures.device.type), bucket)
        leaves, tree = pytree.tree_flatten(results.pop())
        backward = training.capture_backward(
            *(captures, weights, statics, leaves, self._found),
            lambda place, output: self._gradient_at(place, output, bucket),
        )
        if backward is not None:
            graphs.append(backward.graph)
            after = captures.usage()._replace(peak=max(after.peak, captures.usage().peak))
        owner = Owner(captures, statics, graphs)

        def keep(x: Any) -> Any:
            """What lies in the pool is borrowed from it; inputs and weights are not."""
            if not isinstance(x, Tensor):
                return x
            return borrow(x, owner) if captures.holds(x) else x.detach()

        in_pool = [isinstance(x, Tensor) and captures.holds(x) for x in leaves]
        leaves = [*map(keep, leaves)]
        borrowed = (x for x, is_ in zip(leaves, in_pool, strict=True) if is_)
        owner.versions = tuple(map(version_of, borrowed))
        read: list[Tensor] = []
        if backward is not None:
            backward.gradients = [*map(keep, backward.gradients)]
            outputs = (x for x in leaves if isinstance(x, Tensor))
            read += (x for x in outputs if address_of(x) in saved.addresses)
            read += saved.elsewhere.values()
        self.captured[bucket] = Captured(
            *(statics, owner, graphs[0], backward, leaves, tree),
            addresses=weights.read()[0],
            changed=tuple(version_of(x) for x, is_ in changed if is_),
            read=tuple(map(version_of, read)),
            cost=SizeReport(
                bucket,
                nodes=sum(map(captures.count_nodes, graphs)),
                peak_bytes=after.peak,
                pool_bytes=after.pool - before.pool,
                driver_bytes=after.execs - before.execs,
                capture_seconds=time.perf_counter() - began,
            ),
            eager=self._eager.get(bucket),
        )
        return after

    def _run(self, call: Call, size: Size, at: Size, times: int, thoroughly: bool = False) -> Any:
        """Runs the function, its backward pass included, and returns what it returned.

        The inputs hold as much of a call as they can; but where that is not all, none of its
        integers: an index may be of something that they do not hold.

        Arguments:
            thoroughly: Whether to see changes of its arguments that autograd does not count; those
                that it does are seen at the capture.
        """
        assert self._statics is not None
        statics = self._statics.at(at)
        part = tuple(map(min, size, at))
        with torch.no_grad():
            given = zip(call.tensors, self.inputs, strict=True)
            Copies(self.inputs, statics, part)([inputs.cut(x, own.dims, part) for x, own in given])
            for own, static in zip(self.inputs, statics, strict=True):
                if part != size and inputs.is_integer(own.dtype):
                    static.fill_(own.pad)
        before = [_bytes(static).clone() for static in statics] if thoroughly else []
        result = None
        for _ in range(times):
            del result  # before there is another one
            args, kwargs = call.with_tensors(statics)
            began = self.setup.captures.mark()
            result = self.setup.function(*args, **kwargs)
            if torch.is_grad_enabled():
                self._run_backward(result)
            self._eager[at] = began, self.setup.captures.mark()
        if before:
            _refuse_additions((args, kwargs), statics)
            pairs = zip(statics, before, strict=True)
            # All in one pageable copy: for a number alone torch pins memory, which takes 1 ms.
            changed = torch.stack([(_bytes(static) != was).any() for static, was in pairs])
            self._refuse_changes(changed.tolist())
        return result

    def _refuse_changes(self, is_changed: Sequence[bool]) -> None:
        """Raises ValueError if an input was changed."""
        for given, was in zip(self.inputs, is_changed, strict=True):
            if was:
                raise ValueError(
                    f"the function changes {given.name.path} in place: a graph would change the "
                    "copy that it reads, and not what a call passes. Change a copy, and return it"
                )

    def _run_backward(self, result: Any) -> None:
        """The backward pass of a warm-up."""
        leaves = pytree.tree_leaves(result)
        outputs = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        found = training.find_leaves(outputs)
        if found:
            self._trains = True
            self._found.update((id(x), x) for x in found)
            with torch.autocast(self.setup.captures.device.type, enabled=False):
                grads = [torch.zeros_like(x) for x in outputs]
                gradients = torch.autograd.grad(outputs, found, grads, allow_unused=True)
            for x, gradient in zip(found, gradients, strict=True):
                if gradient is not None:
                    require_plain(gradient, f"the gradient of a tensor of shape {(*x.shape,)}")

    def _gradient_at(self, place: int, output: Tensor, bucket: Size) -> tuple[Input, Tensor]:
        """Where the backward pass of a bucket reads the gradient of a leaf. Its padding is zero."""
        assert self.cuts is not None
        if place not in self._gradients:
            name = arguments.Name("", f"the gradient of output {place}")
            given = Input.of(name, output.detach(), self.cuts.dims[place], pad=0)
            sizes = self.setup.buckets.listed or [bucket]
            self._gradients[place] = StaticInputs([given], output.device, sizes)
        buffer = self._gradients[place]
        return buffer.inputs[0], buffer.at(bucket)[0]


def _bytes(static: Tensor) -> Tensor:
    """What a static input holds."""
    return static.detach().as_strided((static.numel(),), (1,)).view(torch.uint8)


def _refuse_additions(arguments: Any, statics: Sequence[Tensor]) -> None:
    """Raises ValueError if a tensor was put into the containers among the arguments."""
    known = set(map(id, statics))
    if any(isinstance(x, Tensor) and id(x) not in known for x in pytree.tree_leaves(arguments)):
        raise ValueError(
            "the function puts a tensor into one of its arguments: it is given containers of its "
            "own, and those that a call passes would stay as they are. Return the tensor, or put "
            "it into a copy"
        )
