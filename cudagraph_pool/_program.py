"""One way of calling a function, and its captures at all sizes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ._adapter import load_adapter
from ._buckets import Buckets, Size, shown
from ._call import Call, Named, name_leaves, refuse_transforms
from ._captures import (
    Captured,
    Captures,
    Replayable,
    Span,
    Usage,
    capture,
    find_leaves,
)
from ._function import parameters_of
from ._guard import is_guarded, lend_for
from ._static_inputs import (
    Input,
    Static,
    StaticInputs,
    check_names,
    copies,
    dims_of,
    is_integer,
    pad_of,
    size_of,
)
from ._static_outputs import Cuts, Output, check_strided, describe, paths_of

if TYPE_CHECKING:
    from . import _torch

_SAMPLES = 3  # replays that are timed, for each size


class Program:
    """What all calls with equal keys share.

    Arguments:
        call: The first of them.
        dim, pad: As for :class:`GraphRunner`.

    Raises:
        ValueError, TypeError: The call cannot be captured.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        call: Call,
        captures: Captures,
        buckets: Buckets,
        dim: int | tuple[Any, ...] | Mapping[str, Any],
        pad: float | Mapping[str, float],
    ) -> None:
        names = name_leaves(function, call)
        parameters = [p.name for p in parameters_of(function) if p.kind is not p.VAR_KEYWORD]
        check_names("dim", dim, names, parameters)
        check_names("pad", pad, names, parameters)
        self._function = function
        self._captures = captures
        self._buckets = buckets
        self._inputs = [
            Input.of(name, tensor, dims_of(dim, name, buckets.axes), pad_of(pad, name))
            for name, tensor in zip(names, call.leaves, strict=True)
            if isinstance(tensor, Tensor)
        ]
        self._statics: StaticInputs | None = None
        self._gradients: dict[int, StaticInputs] = {}
        self._cuts: Cuts | None = None
        self._eager: dict[Size, Span] = {}
        # Sizes that ran already, and were not warmed up yet.
        self._ran: set[Size] = set()
        # Where all sizes read the same first bytes of each input, those that are filled in do for
        # all sizes below.
        self._are_nested = all(given.is_nested for given in self._inputs)
        self._filled: tuple[Size, bool] | None = None  # and whether with all of a call
        self._trains = False  # its outputs lead to something that gets gradients
        self._known: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # of that, by id
        self.captured: dict[Size, Captured] = {}

    def size_of(self, call: Call) -> Size:
        """The size of a call.

        Raises:
            ValueError: It is not one that this can run.
        """
        for given, tensor in zip(self._inputs, call.tensors, strict=True):
            given.check(tensor, self._captures.device)
        return size_of(self._inputs, call.tensors, self._buckets.axes)

    def forget_call(self) -> None:
        """The static inputs do not hold what the next call does."""
        self._filled = None

    def warm_up(self, call: Call, size: Size, bucket: Size, times: int) -> None:
        """Runs a bucket, with what the tensors of a call hold, which is of ``size``.

        Raises:
            ValueError, TypeError: The function cannot be captured. Whatever it raises itself.
        """
        sizes = self._buckets.listed() or (bucket,)
        if self._statics is None:
            self._statics = StaticInputs(self._inputs, self._captures.device, sizes)
        device_type = self._captures.device.type

        def outputs_at(at: Size) -> list[Output]:
            result, _ = self._run(call, size, at, times=1, thoroughly=True)
            leaves = pytree.tree_leaves(result)
            refuse_transforms([x for x in leaves if isinstance(x, Tensor)], ())
            outputs = describe(leaves, paths_of(result), device_type)
            self._ran.add(at)
            return outputs

        if self._cuts is None:
            neighbours = _neighbours(bucket, self._buckets)
            self._cuts = Cuts(outputs_at, bucket, neighbours, device_type)
        left = times - (bucket in self._ran)
        self._ran.discard(bucket)
        if left > 0:
            _, self._eager[bucket] = self._run(call, size, bucket, left)

    def capture(
        self, call: Call, bucket: Size, before: Usage, weights: Sequence[Tensor]
    ) -> tuple[Captured, Usage]:
        """Captures a bucket. pre: it was warmed up, if with no runs.

        Arguments:
            before: What is used now. Returned is also what is used then.
            weights: Of which replays count changes.
        """
        assert self._statics is not None
        assert self._cuts is not None
        statics = self._statics.at(bucket)
        versions = _versions(statics)
        args, kwargs = call.arguments([static.tensor for static in statics])
        captured, after = capture(
            self._captures,
            lambda: self._function(*args, **kwargs),
            statics,
            bucket,
            before,
            lambda places, outputs: self._gradients_at(places, outputs, bucket),
            weights,
            self._trains,
            self._known,
        )
        self._refuse_changes(versions, _versions(statics))
        self._cuts.check(captured.leaves, captured.tree, bucket)
        captured.eager = self._eager.get(bucket)
        self.captured[bucket] = captured
        return captured, after

    def plan(self, size: Size, bucket: Size) -> Plan:
        """How calls of ``size`` are run by the graph of ``bucket``."""
        assert self._cuts is not None
        return Plan(self._captures, self.captured[bucket], self._inputs, self._cuts, size)

    def _fill(self, call: Call, size: Size, at: Size) -> list[Static]:
        """The static inputs of a size, with as much of a call as they hold; but where that is not
        all, without its integers: an index may be of something that they do not hold.
        """
        assert self._statics is not None
        static = self._statics.at(at)
        part = tuple(map(min, size, at))
        filled, of_all = self._filled or ((0,), False)
        if self._are_nested and at <= filled and of_all == (part == size):
            return static
        self._filled = at, part == size
        with torch.no_grad():
            copies(self._inputs, static, part)(
                [given.cut(x, part) for given, x in zip(self._inputs, call.tensors, strict=True)]
            )
            for tensor, buffer in static if part != size else ():
                if is_integer(tensor.dtype):
                    tensor.fill_(buffer.given.pad)
        return static

    def _run(
        self, call: Call, size: Size, at: Size, times: int, thoroughly: bool = False
    ) -> tuple[Any, Span]:
        """Runs the function, its backward pass included, and returns what it returned, and marks
        around the last run.

        Arguments:
            thoroughly: Whether to see changes of its arguments that autograd does not count; those
                that it does are seen at the capture.
        """
        statics = self._fill(call, size, at)
        held = [static.bytes().clone() for static in statics] if thoroughly else []

        def work() -> Any:
            args, kwargs = call.arguments([static.tensor for static in statics])
            result = self._function(*args, **kwargs)
            if thoroughly:
                _refuse_additions((args, kwargs), statics)
            if torch.is_grad_enabled():
                self._run_backward(result)
            return result

        result, span = self._captures.warm_up(work, times)
        if held:
            pairs = zip(statics, held, strict=True)
            # All in one pageable copy: for a number alone torch pins memory, which takes 1 ms.
            changed = torch.stack([(now.bytes() != was).any() for now, was in pairs])
            self._refuse_changes([False] * len(held), changed.tolist())
        return result, span

    def _refuse_changes(self, before: list[Any], after: list[Any]) -> None:
        """Raises ValueError if an input was changed."""
        for given, was, now in zip(self._inputs, before, after, strict=True):
            if was != now:
                raise ValueError(
                    f"the function changes {given.name.path} in place: a graph would change the "
                    "copy that it reads, and not what a call passes. Change a copy, and return it"
                )

    def _run_backward(self, result: Any) -> None:
        """The backward pass of a warm-up."""
        leaves = pytree.tree_leaves(result)
        outputs = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        differentiable = outputs and find_leaves(outputs)
        if differentiable:
            self._trains = True
            self._known.update((id(x), x) for x in differentiable)
            with torch.autocast(self._captures.device.type, enabled=False):
                gradients = torch.autograd.grad(
                    outputs,
                    differentiable,
                    [torch.zeros_like(x) for x in outputs],
                    allow_unused=True,
                )
            for x, gradient in zip(differentiable, gradients, strict=True):
                if gradient is not None:
                    check_strided(gradient, f"the gradient of a tensor of shape {tuple(x.shape)}")

    def _gradients_at(
        self, places: Sequence[int], outputs: Sequence[Tensor], bucket: Size
    ) -> list[Static]:
        """Where the backward pass of a bucket reads the gradients of these leaves."""
        assert self._cuts is not None
        sizes = self._buckets.listed() or (bucket,)
        made: list[Static] = []
        for place, output in zip(places, outputs, strict=True):
            if place not in self._gradients:
                given = self._gradient_of(place, output)
                self._gradients[place] = StaticInputs([given], self._captures.device, sizes)
            made += self._gradients[place].at(bucket)
        return made

    def _gradient_of(self, place: int, output: Tensor) -> Input:
        """The gradient of an output, as an input of the backward pass; its padding is zero."""
        assert self._cuts is not None
        path = f"the gradient of output {place}"
        dims = self._cuts.dims(place, self._buckets.axes)
        return Input.of(Named(path, path), output.detach(), dims, pad=0)


def _refuse_additions(arguments: Any, statics: Sequence[Static]) -> None:
    """Raises ValueError if a tensor was put into the containers among the arguments."""
    known = {id(static.tensor) for static in statics}
    if any(isinstance(x, Tensor) and id(x) not in known for x in pytree.tree_leaves(arguments)):
        raise ValueError(
            "the function puts a tensor into one of its arguments: it is given containers of its "
            "own, and those that a call passes would stay as they are. Return the tensor, or put "
            "it into a copy"
        )


def _versions(statics: Sequence[Static]) -> list[int]:
    """How often autograd has seen each change."""
    return [static.tensor._version for static in statics]


class Plan:
    """How calls of one shape are run: what is decided once for all of them."""

    def __init__(
        self,
        captures: Captures,
        captured: Captured,
        inputs: Sequence[Input],
        cuts: Cuts,
        size: Size,
    ) -> None:
        self.captured = captured
        self._captures = captures
        self._what = f"of size {shown(size)} in the graph of {shown(captured.size)}"
        self._counters = captured.owner.counters
        self._assemble = _assembler(captured.tree)
        self._leaves = [
            cuts.cut(place, leaf, size) if isinstance(leaf, Tensor) else leaf
            for place, leaf in enumerate(captured.leaves)
        ]
        self.replays: _torch.Replays = load_adapter().Replays(
            *(copies(inputs, captured.statics, size), captured.forward),
            *(self._leaves, self._assemble, self._counters, captured.changed, self._what),
        )
        self._tensor_places = [
            place for place, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)
        ]
        backward = captured.backward
        if backward is not None:
            self._gradient_copies = {
                place: copies([static.buffer.given], [static], size)
                for place, static in zip(backward.gradients_of, backward.grad_outputs, strict=True)
            }
            self._input_gradients = [
                None if gradient is None else given.cut(gradient, size)
                for given, gradient in zip(inputs, backward.grad_inputs, strict=True)
            ]

    def run(self, tensors: list[Tensor], clone: bool) -> Any:
        """Replays the graph for a call, and returns what belongs to it."""
        backward = self.captured.backward
        if backward is None:
            return self._assemble(self.launch(tensors, clone)[0])
        outputs = _Graphed.apply(self, clone, *tensors, *backward.parameters)
        leaves = list(self._leaves)
        for place, output in zip(self._tensor_places, outputs, strict=True):
            leaves[place] = output
        return self._assemble(leaves)

    def launch(self, tensors: list[Tensor], clone: bool) -> tuple[list[Any], int]:
        """The forward pass; returns its leaves, and its number among the pool's replays."""
        captured = self.captured
        turns = self._captures.turns
        with turns.lock:
            self._captures.order(captured)
            self.replays.stream = turns.row.stream
            replay = None if self.is_settled else self._replay_sample
            leaves = self.replays.run(turns.row, tensors, clone, replay)
            number = turns.row.number
            for place in self._tensor_places if is_guarded() else ():
                leaves[place] = lend_for(leaves[place], turns, number)
            return leaves, number

    def launch_backward(
        self, number: int, gradients: Mapping[int, Tensor | None]
    ) -> list[Tensor | None]:
        """The backward pass of the call with that number; returns the gradients of inputs and
        parameters.

        Raises:
            RuntimeError: There were other calls since, or what it reads was changed.
        """
        backward = self.captured.backward
        assert backward is not None
        turns = self._captures.turns
        with turns.lock:
            if turns.row.number != number or not turns.row.left(self._counters):
                raise RuntimeError(
                    f"the backward pass of call {number} of its pool, {self._what}, came after "
                    f"call {turns.row.number}, {turns.row.what}, which has overwritten what it "
                    "needs: run it before the next call"
                )
            if _states(self.captured.read) != self.captured.states:
                raise RuntimeError(
                    f"an output of call {number}, {self._what}, or a parameter, a buffer or "
                    "another tensor that the function reads was changed in place or replaced "
                    "before the backward pass, which reads it, or has another output in the same "
                    "memory: change it after that. Outputs of a GraphRunner with "
                    "clone_outputs=True may be changed at once"
                )
            self._captures.order(self.captured)
            undefined = {place for place in backward.gradients_of if gradients[place] is None}
            for place, static in zip(backward.gradients_of, backward.grad_outputs, strict=True):
                gradient = gradients[place]
                if gradient is None:
                    static.tensor.zero_()
                else:
                    self._gradient_copies[place]([gradient])
            if backward.graph in self.captured.replayed:
                backward.graph.replay()
            else:
                self._replay_noted(backward.graph)
            # What only outputs without a gradient lead to gets none either, as in eager.
            left = self._input_gradients + backward.grad_parameters
            defined = [not reached <= undefined for reached in backward.reached_from]
            return _copies([x if is_ else None for x, is_ in zip(left, defined, strict=True)])

    @property
    def is_settled(self) -> bool:
        """Whether enough of its graph's replays were timed."""
        return len(self.captured.samples) >= _SAMPLES

    def _replay_sample(self) -> None:
        self.captured.samples.append(self._replay_noted(self.captured.forward))

    def _replay_noted(self, graph: Replayable) -> Span:
        """Marks around it; of the first time it is noted what the driver takes for its executable,
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

    def note_read(self) -> None:
        """Notes what the backward pass of the last call reads, and others can change."""
        captured = self.captured
        backward = captured.backward
        assert backward is not None
        outputs = [captured.leaves[place] for place in backward.reads]
        captured.read = outputs + backward.reads_elsewhere
        captured.states = _states(captured.read)


def _states(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Where they lie, and how often they were changed."""
    return [(x.data_ptr(), x._version) for x in tensors]


def _copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Of tensors that the next replay overwrites, made by few launches: whoever is given these may
    keep them.
    """
    copies = [None if tensor is None else torch.empty_like(tensor) for tensor in tensors]
    pairs = [
        (copy, tensor)
        for copy, tensor in zip(copies, tensors, strict=True)
        if copy is not None and tensor is not None
    ]
    if pairs:
        torch._foreach_copy_([copy for copy, _ in pairs], [tensor for _, tensor in pairs])
    return copies


def _assembler(tree: pytree.TreeSpec) -> Callable[[list[Any]], Any]:
    """Makes of its leaves what a function returned; most return a tensor, or a tuple of some."""
    if tree.is_leaf():
        return operator.itemgetter(0)
    if tree.type is tuple and tree.num_nodes == tree.num_leaves + 1:
        return tuple
    return functools.partial(pytree.tree_unflatten, treespec=tree)


class _Graphed(torch.autograd.Function):  # type: ignore[misc]
    """A call whose backward pass is a graph too."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, clone: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        ctx.is_done = False
        inputs = list(tensors[: len(plan.captured.statics)])
        leaves, ctx.number = plan.launch(inputs, clone)
        plan.note_read()
        # Where a checkpoint runs the call again, what is unpacked is the number of that one.
        ctx.is_packed = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        numbers = [torch.tensor(ctx.number, device="cpu")] if ctx.is_packed else []
        ctx.save_for_backward(*(x for x in inputs if x.requires_grad), *numbers)
        outputs = [leaves[place] for place in plan._tensor_places]
        ctx.mark_non_differentiable(
            *(
                output
                for place, output in zip(plan._tensor_places, outputs, strict=True)
                if place not in plan._gradient_copies
            )
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_transforms([x for x in gradients if x is not None], ())
        plan: Plan = ctx.plan
        if ctx.is_done:
            raise RuntimeError(
                f"the backward pass of call {ctx.number}, {plan._what}, has run already, and has "
                "overwritten what it needs: it runs once, also with retain_graph=True"
            )
        by_place = dict(zip(plan._tensor_places, gradients, strict=True))
        unpacks = ctx.is_packed or torch.is_grad_enabled()
        saved: Sequence[Tensor] = ctx.saved_tensors if unpacks else ()
        number = int(saved[-1]) if ctx.is_packed else ctx.number
        with torch.no_grad():
            launched = plan.launch_backward(number, by_place)
        ctx.is_done = True
        if torch.is_grad_enabled():  # create_graph=True
            backward = plan.captured.backward
            assert backward is not None
            depend_on = [*saved, *backward.parameters, *gradients]
            launched = list(_Once.apply(len(launched), *launched, *depend_on))
        return (None, None, *launched)


class _Once(torch.autograd.Function):  # type: ignore[misc]
    """Gradients, with what they depend on behind them: who differentiates them gets an error."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise RuntimeError(
            "the backward pass of a GraphRunner's call is a graph, which cannot be differentiated "
            "again: capture what needs second derivatives together with its gradients"
        )


def _neighbours(size: Size, buckets: Buckets) -> list[list[Size]]:
    """For each axis sizes that differ along it only, the best first; none where no call is ever
    padded.

    The smallest there is, since what a function does for one row only shows there; then, for a
    function that cannot run at it, the smallest that is listed, and where none is, half of it.
    """
    listed = buckets.listed()
    found: list[list[Size]] = []
    for axis, extent in enumerate(size):
        before, behind = size[:axis], size[axis + 1 :]
        beside = [n for n in listed if n != size and (n[:axis], n[axis + 1 :]) == (before, behind)]
        smallest, half = ((*before, n, *behind) for n in (1 if extent > 1 else 2, extent // 2 or 2))
        never_padded = bool(listed) and all(other[axis] == 1 for other in listed)
        found.append([] if never_padded else [smallest, min(beside, default=half)])
    return found
