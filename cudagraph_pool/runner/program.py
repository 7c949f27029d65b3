"""One way of calling a function, and its captures at all sizes."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._borrow import borrow, version_of
from .._guard import is_guarded, lend_for
from ..sizes import Size
from .arguments import Call, Name, Parameters, named_leaves, refuse_transforms, require_plain
from .buckets import Buckets, neighbours_of, shown
from .captures import Captures, Span, Usage
from .inputs import (
    Copies,
    Dims,
    Input,
    Static,
    StaticInputs,
    check_names,
    cut,
    dims_of,
    is_integer,
    pad_of,
    size_of,
)
from .outputs import Cuts, Output, describe
from .training import (
    Backward,
    Graphed,
    SavedTensors,
    address_of,
    capture_backward,
    find_leaves,
)
from .weights import Weights

_SAMPLES = 3  # replays that are timed, for each size


class Owner:
    """What a graph needs as long as somebody holds one of its outputs.

    Attributes:
        versions: Count changes of the outputs that the next replay of the pool overwrites.
    """

    def __init__(self, captures: Captures, inputs: list[Tensor], graphs: list[Any]) -> None:
        self._held = captures, inputs, graphs
        self.versions: tuple[Tensor, ...] = ()


@dataclass(slots=True, eq=False)
class Captured:
    """One size of a program. It holds no weights.

    Attributes:
        statics: What calls are copied to.
        owner: Lives as long as one of the outputs.
        leaves: What it returns: tensors where the graph leaves them, and constants.
        tree: How these make up what the function returned.
        addresses: Of the weights that it reads.
        changed: Counts changes of the weights that each replay changes.
        read: Counts changes of what the backward pass reads.
        read_then: These, after the last call.
        seconds: What the capture took.
        peak_bytes: The most that it had allocated at once.
        pool_bytes: What the pool holds more than before.
        driver_bytes: What the device has less since executables were made for it.
        eager: A run of the function for it, None if it never ran.
        last_used: A number that is larger the later it was.
        samples: Its first replays.
        replayed: The graphs that were.
        streams: Those that what calls write is recorded for.
    """

    size: Size
    statics: list[Static]
    owner: Owner
    forward: Any
    leaves: list[Any]
    tree: pytree.TreeSpec
    backward: Backward | None
    addresses: bytes
    changed: tuple[Tensor, ...]
    read: tuple[Tensor, ...]
    seconds: float
    peak_bytes: int
    pool_bytes: int
    driver_bytes: int
    eager: Span | None
    last_used: int = 0
    read_then: list[int] = field(default_factory=list)
    samples: list[Span] = field(default_factory=list)
    replayed: list[Any] = field(default_factory=list)
    streams: set[int] = field(default_factory=set)


class Program:
    """What all calls that run the same Python code share.

    Arguments:
        call: The first of them.
        dim, pad: As for :class:`GraphRunner`.

    Raises:
        ValueError, TypeError: The call cannot be captured.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        weights: Weights,
        parameters: Parameters,
        call: Call,
        captures: Captures,
        buckets: Buckets,
        dim: int | tuple[Any, ...] | Mapping[str, Any],
        pad: float | Mapping[str, float],
    ) -> None:
        leaves = named_leaves(parameters, call.args, call.kwargs)
        names = [name for name, _ in leaves]
        known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        check_names("dim", dim, names, known)
        check_names("pad", pad, names, known)
        self._function = function
        self._weights = weights
        self._captures = captures
        self._buckets = buckets
        self._inputs = [
            Input.of(name, tensor, dims_of(dim, name, buckets.axes), pad_of(pad, name))
            for name, tensor in leaves
            if isinstance(tensor, Tensor)
        ]
        self._statics: StaticInputs | None = None
        self._gradients: dict[int, StaticInputs] = {}
        self._cuts: Cuts | None = None
        self._eager: dict[Size, Span] = {}
        self._ran: set[Size] = set()  # those that ran already, and were not warmed up yet
        self._trains = False  # its outputs lead to something that gets gradients
        self._found: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # of that, by id
        self.captured: dict[Size, Captured] = {}

    def size_of(self, call: Call) -> Size:
        """The size of a call.

        Raises:
            ValueError: It is not one that this can run.
        """
        for given, tensor in zip(self._inputs, call.tensors, strict=True):
            given.check(tensor, self._captures.device)
        return size_of(self._inputs, call.tensors, self._buckets.axes)

    def warm_up(self, call: Call, size: Size, bucket: Size, times: int) -> None:
        """Runs a bucket, with what the tensors of a call hold, which is of ``size``.

        Raises:
            ValueError, TypeError: The function cannot be captured. Whatever it raises itself.
        """
        if self._statics is None:
            sizes = self._buckets.listed() or (bucket,)
            self._statics = StaticInputs(self._inputs, self._captures.device, sizes)

        def outputs_at(at: Size) -> list[Output]:
            result = self._run(call, size, at, times=1, thoroughly=True)
            refuse_transforms([x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)])
            self._ran.add(at)
            return describe(result, self._captures.device.type)

        if self._cuts is None:
            self._cuts = Cuts(outputs_at, bucket, neighbours_of(bucket, self._buckets))
        left = times - (bucket in self._ran)
        self._ran.discard(bucket)
        if left > 0:
            self._run(call, size, bucket, left)

    def capture(self, call: Call, bucket: Size, before: Usage) -> Usage:
        """Captures a bucket, its backward pass included. The memory of what it returns goes back
        to the pool when all of it is captured. Returns what is used then. pre: it was warmed up.

        Arguments:
            before: What is used now.
        """
        assert self._statics is not None
        assert self._cuts is not None
        began = time.perf_counter()
        captures = self._captures
        statics = self._statics.at(bucket)
        inputs = [static.tensor for static in statics]
        weights = [x for x in self._weights.tensors() if not x.is_inference()]  # which count none
        versions = [x._version for x in (*inputs, *weights)]
        saved = SavedTensors(captures, inputs, weights)
        args, kwargs = call.with_tensors(inputs)
        results: list[tuple[list[Any], pytree.TreeSpec]] = []

        def run() -> None:
            leaves, tree = pytree.tree_flatten(self._function(*args, **kwargs))
            # The next call writes to inputs before it reads what it was passed, which may be this.
            is_input = {address_of(x) for x in inputs}.__contains__
            own = [
                x.clone() if isinstance(x, Tensor) and is_input(address_of(x)) else x
                for x in leaves
            ]
            results.append((own, tree))

        with saved.noting() if self._trains else nullcontext():
            graphs = [captures.capture(run)]
        after = captures.usage()
        leaves, tree = results.pop()
        pairs = zip((*inputs, *weights), versions, strict=True)
        changed = [x._version != version for x, version in pairs]
        self._refuse_changes(changed[: len(inputs)])
        self._cuts.check(
            describe(pytree.tree_unflatten(leaves, tree), captures.device.type), bucket
        )
        backward = capture_backward(
            captures,
            self._weights,
            inputs,
            leaves,
            self._found,
            lambda places, outputs: self._gradients_at(places, outputs, bucket),
        )
        if backward is not None:
            graphs.append(backward.graph)
            peak = after.peak
            after = captures.usage()
            after = after._replace(peak=max(peak, after.peak))
        owner = Owner(captures, inputs, graphs)

        def keep(tensor: Any) -> Any:
            """What lies in the pool is borrowed from it: inputs, weights and constants do not."""
            if not isinstance(tensor, Tensor):
                return tensor
            return borrow(tensor, owner) if captures.holds(tensor) else tensor.detach()

        in_pool = [isinstance(x, Tensor) and captures.holds(x) for x in leaves]
        leaves = [*map(keep, leaves)]
        owner.versions = tuple(
            version_of(x) for x, held in zip(leaves, in_pool, strict=True) if held
        )
        read: list[Tensor] = []
        if backward is not None:
            backward.gradients = [*map(keep, backward.gradients)]
            outputs = [x for x in leaves if isinstance(x, Tensor)]
            read = [x for x in outputs if address_of(x) in saved.addresses]
            read += saved.elsewhere.values()
        self.captured[bucket] = Captured(
            bucket,
            statics,
            owner,
            graphs[0],
            leaves,
            tree,
            backward,
            addresses=self._weights.read()[0],
            changed=tuple(
                version_of(x) for x, is_ in zip(weights, changed[len(inputs) :], strict=True) if is_
            ),
            read=tuple(map(version_of, read)),
            seconds=time.perf_counter() - began,
            peak_bytes=after.peak,
            pool_bytes=after.pool - before.pool,
            driver_bytes=after.execs - before.execs,
            eager=self._eager.get(bucket),
        )
        return after

    def plan(self, size: Size, bucket: Size) -> Plan:
        """How calls of ``size`` are run by the graph of ``bucket``."""
        assert self._cuts is not None
        captured = self.captured[bucket]
        return Plan(self._captures, self._weights, captured, self._inputs, self._cuts.dims, size)

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
            given = zip(call.tensors, self._inputs, strict=True)
            Copies(self._inputs, statics, part)([cut(x, own.dims, part) for x, own in given])
            for own, static in zip(self._inputs, statics, strict=True):
                if part != size and is_integer(own.dtype):
                    static.tensor.fill_(own.pad)
        before = [static.bytes().clone() for static in statics] if thoroughly else []
        for _ in range(times):
            args, kwargs = call.with_tensors([static.tensor for static in statics])
            began = self._captures.mark()
            result = self._function(*args, **kwargs)
            if torch.is_grad_enabled():
                self._run_backward(result)
            self._eager[at] = began, self._captures.mark()
            if thoroughly:
                _refuse_additions((args, kwargs), statics)
        if before:
            pairs = zip(statics, before, strict=True)
            # All in one pageable copy: for a number alone torch pins memory, which takes 1 ms.
            self._refuse_changes(
                torch.stack([(x.bytes() != was).any() for x, was in pairs]).tolist()
            )
        return result

    def _refuse_changes(self, changed: Sequence[bool]) -> None:
        """Raises ValueError if an input was changed."""
        for given, is_changed in zip(self._inputs, changed, strict=True):
            if is_changed:
                raise ValueError(
                    f"the function changes {given.name.path} in place: a graph would change the "
                    "copy that it reads, and not what a call passes. Change a copy, and return it"
                )

    def _run_backward(self, result: Any) -> None:
        """The backward pass of a warm-up."""
        leaves = pytree.tree_leaves(result)
        outputs = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        found = find_leaves(outputs)
        if not found:
            return
        self._trains = True
        self._found.update((id(x), x) for x in found)
        with torch.autocast(self._captures.device.type, enabled=False):
            grads = [torch.zeros_like(x) for x in outputs]
            gradients = torch.autograd.grad(outputs, found, grads, allow_unused=True)
        for x, gradient in zip(found, gradients, strict=True):
            if gradient is not None:
                require_plain(gradient, f"the gradient of a tensor of shape {tuple(x.shape)}")

    def _gradients_at(
        self, places: Sequence[int], outputs: Sequence[Tensor], bucket: Size
    ) -> list[tuple[Input, Static]]:
        """What the backward pass of a bucket reads the gradients of these leaves from. The padding
        of gradients is zero.
        """
        assert self._cuts is not None
        sizes = self._buckets.listed() or (bucket,)
        made = []
        for place, output in zip(places, outputs, strict=True):
            if place not in self._gradients:
                path = f"the gradient of output {place}"
                given = Input.of(Name(path, path), output.detach(), self._cuts.dims[place], pad=0)
                self._gradients[place] = StaticInputs([given], self._captures.device, sizes)
            buffers = self._gradients[place]
            made.append((buffers.inputs[0], buffers.at(bucket)[0]))
        return made


def _refuse_additions(arguments: Any, statics: Sequence[Static]) -> None:
    """Raises ValueError if a tensor was put into the containers among the arguments."""
    known = {id(static.tensor) for static in statics}
    if any(isinstance(x, Tensor) and id(x) not in known for x in pytree.tree_leaves(arguments)):
        raise ValueError(
            "the function puts a tensor into one of its arguments: it is given containers of its "
            "own, and those that a call passes would stay as they are. Return the tensor, or put "
            "it into a copy"
        )


class Plan:
    """How calls of one shape are run: what is decided once for all of them."""

    def __init__(
        self,
        captures: Captures,
        weights: Weights,
        captured: Captured,
        inputs: Sequence[Input],
        dims: Sequence[Dims],
        size: Size,
    ) -> None:
        self.captured = captured
        self.what = f"of size {shown(size)} in the graph of {shown(captured.size)}"
        self.assemble = _assembler(captured.tree)
        self._captures = captures
        self._weights = weights
        self._written = [static.tensor for static in captured.statics]
        self._copies = Copies(inputs, captured.statics, size)
        self._leaves = [
            cut(leaf, own, size) if isinstance(leaf, Tensor) else leaf
            for leaf, own in zip(captured.leaves, dims, strict=True)
        ]
        self.tensor_places = [n for n, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        backward = captured.backward
        if backward is not None:
            grads, statics = zip(*backward.grad_outputs, strict=True)
            self._written += [static.tensor for static in statics]
            self._gradient_copies = Copies(grads, statics, size)
            self._gradients = list(backward.gradients)
            for n, (given, gradient) in enumerate(zip(inputs, self._gradients, strict=False)):
                if gradient is not None:
                    self._gradients[n] = cut(gradient, given.dims, size)

    def run(self, tensors: Sequence[Tensor], clone: bool) -> list[Any]:
        """Replays the graph for a call, and returns the leaves of what belongs to it."""
        backward = self.captured.backward
        if backward is None:
            return self.launch(tensors, clone)[0]
        parameters = [home[name] for home, name in backward.parameters]
        outputs = iter(Graphed.apply(self, clone, *tensors, *parameters))
        return [next(outputs) if isinstance(x, Tensor) else x for x in self._leaves]

    def launch(self, tensors: Sequence[Tensor], clone: bool) -> tuple[list[Any], int]:
        """The forward pass; returns its leaves, and its number among the pool's replays."""
        captured, turns = self.captured, self._captures.turns
        with turns.lock, torch.no_grad():
            self._captures.order(self._written, captured.streams)
            number = turns.begin(self.what)
            self._copies(tensors)
            turns.overwrite(captured.owner)
            torch._C._increment_version(captured.changed)
            if len(captured.samples) < _SAMPLES:
                captured.samples.append(self._replay_noted(captured.forward))
            else:
                captured.forward.replay()
            leaves = list(self._leaves)
            for place in self.tensor_places:
                leaf = leaves[place].clone() if clone else leaves[place].detach()
                leaves[place] = lend_for(leaf, turns, number) if is_guarded() else leaf
            captured.read_then = [x._version for x in captured.read]
        return leaves, number

    def launch_backward(
        self, number: int, gradients: Mapping[int, Tensor | None]
    ) -> list[Tensor | None]:
        """The backward pass of the call with that number; returns the gradients of inputs and
        parameters.

        Raises:
            RuntimeError: There were other calls since, or what it reads was changed.
        """
        captured, turns = self.captured, self._captures.turns
        backward = captured.backward
        assert backward is not None
        with turns.lock, torch.no_grad():
            if turns.number != number or not turns.left(captured.owner):
                raise RuntimeError(
                    f"the backward pass of call {number} of its pool, {self.what}, came after "
                    f"call {turns.number}, {turns.what}, which has overwritten what it needs: "
                    "run it before the next call"
                )
            is_changed = captured.read_then != [x._version for x in captured.read]
            if is_changed or captured.addresses != self._weights.read()[0]:
                raise RuntimeError(
                    f"an output of call {number}, {self.what}, or a parameter, a buffer or "
                    "another tensor that the function reads was changed in place or replaced "
                    "before the backward pass, which reads it: change it after that. Outputs of a "
                    "GraphRunner with clone_outputs=True may be changed at once"
                )
            self._captures.order(self._written, captured.streams)
            given = [gradients[place] for place in backward.places]
            undefined = {place for place in backward.places if gradients[place] is None}
            self._gradient_copies(
                [
                    torch.zeros_like(self._leaves[place]) if x is None else x
                    for place, x in zip(backward.places, given, strict=True)
                ]
            )
            if backward.graph in captured.replayed:
                backward.graph.replay()
            else:
                self._replay_noted(backward.graph)
            # What only outputs without a gradient lead to gets none either, as in eager.
            left = zip(self._gradients, backward.reached_from, strict=True)
            return _copies([None if reached <= undefined else x for x, reached in left])

    def _replay_noted(self, graph: Any) -> Span:
        """Marks around it. The first time it is noted what the driver takes for its executable,
        which is made then.
        """
        captured, captures = self.captured, self._captures
        used = None if graph in captured.replayed else captures.device_bytes()
        began = captures.mark()
        graph.replay()
        ended = captures.mark()
        if used is not None:
            captured.driver_bytes += max(0, captures.device_bytes() - used)
            captured.replayed.append(graph)
        return began, ended


def _copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Of tensors that the next replay overwrites, made by few launches: whoever is given these may
    keep them.
    """
    copies = [None if tensor is None else torch.empty_like(tensor) for tensor in tensors]
    targets = [copy for copy in copies if copy is not None]
    if targets:
        torch._foreach_copy_(targets, [tensor for tensor in tensors if tensor is not None])
    return copies


def _assembler(tree: pytree.TreeSpec) -> Callable[[list[Any]], Any]:
    """Makes of its leaves what a function returned; most return a tensor, or a tuple of some."""
    if tree.is_leaf():
        return operator.itemgetter(0)
    if tree.type is tuple and tree.num_nodes == tree.num_leaves + 1:
        return tuple
    return functools.partial(pytree.tree_unflatten, treespec=tree)
