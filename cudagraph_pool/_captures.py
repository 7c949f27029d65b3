"""Captures into one pool: one size of one program at a time.

:class:`Captures` is all that knows CUDA here; the rest runs on any device that something like it
can record and replay work on.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ._adapter import load_adapter
from ._buckets import Size
from ._forecast import count_nodes
from ._function import unwrapped
from ._static_inputs import Static
from ._static_outputs import lend
from .capture import _next_graph, graph
from .pools import GraphPool

if TYPE_CHECKING:
    from . import _torch

T = TypeVar("T")

# Two marks in the work of a stream, of :meth:`Captures.mark`.
Span = tuple[Any, Any]


class Replayable(Protocol):
    """A captured graph."""

    def replay(self) -> None: ...


class Usage(NamedTuple):
    """Bytes.

    Attributes:
        pool: What the pool holds.
        execs: What the driver has taken for executables that were made at captures.
        peak: The most that the last capture had allocated at once, with what lived before.
    """

    pool: int
    execs: int
    peak: int


class Captures:
    """Work that is captured into a pool, and the order in which it is replayed.

    Graphs of one pool overwrite what others of it have left, so that all their replays, on whatever
    streams, form one row; each has a number in it.
    """

    def __init__(self, pool: GraphPool, shared_exec: bool | None, own_workspace: bool) -> None:
        self.device = pool.device
        self.pool = pool
        self.turns = pool._turns
        self._shared_exec = pool._shared_exec if shared_exec is None else shared_exec
        self._exec_bytes = 0
        self._own_workspace = own_workspace
        self._stream = pool._own_stream if own_workspace else graph._capture_stream(pool.device)

    # One capture at a time in a process: most of a device use one stream, and a wait for the device
    # would end that of another thread.
    lock: ClassVar[threading.RLock] = threading.RLock()

    @contextmanager
    def in_a_row(self) -> Iterator[None]:
        """Within it the stream that captures is the current one: so what libraries keep for each
        stream is made by warm-ups, outside of the pool. It comes after all replays of the pool,
        which may still read the static inputs that are overwritten now, and before what follows.
        pre: ``lock`` is held.
        """
        current = torch.cuda.current_stream(self.device)
        with self.turns.lock:
            self.order()
            self._stream.wait_stream(current)
            self.turns.row.take("a capture")
        if self._own_workspace:
            self.synchronize()  # a graph of the pool that had the stream before may still run
        # What graphs hold of cuBLAS's workspaces is not made anew.
        load_adapter().hold_workspaces(self._stream.cuda_stream)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            # It is the captures' of all pools: a call that waited for it later, and without their
            # lock, would be drawn into the capture that another thread has begun on it by then.
            with self.turns.lock:
                current.wait_stream(self._stream)
                self.turns.order(current)

    def warm_up(self, work: Callable[[], T], times: int) -> tuple[T, Span]:
        """What the last run returned, and marks around what it launched.
        pre: it is one of some :meth:`in_a_row`.
        """
        for _ in range(times - 1):
            work()
        began = self.mark(self._stream)
        result = work()
        return result, (began, self.mark(self._stream))

    def empty_caches(self) -> None:
        """Before captures, as torch.cuda.graph does before each."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()

    def capture(self, work: Callable[[], None]) -> Replayable:
        """A graph of the work. pre: it is one of some :meth:`in_a_row`."""
        captured = torch.cuda.CUDAGraph(keep_graph=True)  # so that its nodes can be counted
        # What other threads do with CUDA meanwhile, as those that pin memory for a loader, is none
        # of the capture's business.
        with _next_graph(
            captured,
            self.pool,
            self._stream,
            capture_error_mode="thread_local",
            shared_exec=self._shared_exec,
        ):
            work()
        if not self._shared_exec:
            used = self.device_bytes()
            captured.instantiate()
            self._exec_bytes += max(0, self.device_bytes() - used)
        replayable: Replayable = captured
        return replayable

    def count_nodes(self, captured: Any) -> int:
        """The nodes of a graph of :meth:`capture`."""
        return count_nodes(captured)

    def holds(self, tensor: Tensor) -> bool:
        """Whether it lies in the pool."""
        return bool(self.pool._adapter.pool_of(self.device.index, _address(tensor)) == self.pool.id)

    def usage(self) -> Usage:
        """What is held now. It does not ask the device, which a small capture would feel."""
        stats = self.pool._adapter.stats(self.device.index, self.pool.id)
        return Usage(stats["reserved_bytes"], self._exec_bytes, stats["scope_peak_bytes"])

    def device_bytes(self) -> int:
        """What nobody else can have of the device now. Also of a pool that was closed."""
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)

    def synchronize(self) -> None:
        """Waits for all work on the device."""
        torch.cuda.synchronize(self.device)

    def mark(self, stream: torch.cuda.Stream | None = None) -> Any:
        """A point in a stream's work, by default the current one's: an event, which times."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device) if stream is None else stream)
        return event

    def seconds(self, span: Span) -> float:
        """Between two marks that the device has passed."""
        began, ended = span
        return float(began.elapsed_time(ended)) * 1e-3

    def order(self, captured: Captured | None = None) -> None:
        """Lets what the current stream gets next come after the last replay of the pool.
        pre: ``turns.lock`` is held until the next one is launched.

        Arguments:
            captured: What it launches, whose static tensors another stream has allocated.

        Raises:
            RuntimeError: The stream is capturing.
        """
        if torch._C._cuda_isCurrentStreamCapturing():
            raise RuntimeError(
                "a GraphRunner was called while a capture is under way on the current stream: "
                "graphs of its pool must not become part of another one. Capture what it runs"
            )
        last = self.turns.stream
        current = torch._C._cuda_getCurrentRawStream(self.device.index)
        is_known = captured is None or current in captured.streams
        if is_known and last is not None and last.cuda_stream == current:
            return  # as of most calls, which need no Stream object for it
        stream = torch.cuda.current_stream(self.device)
        self.turns.order(stream)
        if captured is not None and not is_known:
            for tensor in captured.written:
                tensor.record_stream(stream)
            captured.streams.add(current)


@dataclass(slots=True, eq=False)
class Owner:
    """What a graph needs as long as somebody holds one of its outputs.

    Attributes:
        counters: Counts changes of the outputs that the next replay of the pool overwrites.
    """

    captures: Captures
    inputs: list[Tensor]
    graphs: list[Replayable] = field(default_factory=list)
    counters: _torch.Counters | None = None


@dataclass(slots=True)
class Backward:
    """The captured backward pass of a size.

    Attributes:
        gradients_of: The outputs that have gradients, as numbers of leaves.
        grad_outputs: Where the graph reads these.
        parameters: What else than inputs gets gradients.
        grad_inputs: Where it leaves those of the inputs, None for one that has none.
        grad_parameters: Where it leaves those of the parameters.
        reads: The outputs that it reads itself, as numbers of leaves; and those that share memory
            with each other, where it would not know of a change of one as of the other.
        reads_elsewhere: What it reads that lies neither in the pool nor in an input: parameters,
            buffers, what the function has found elsewhere.
        reached_from: Of each input and parameter the outputs that its gradient comes from.
    """

    graph: Replayable
    gradients_of: list[int]
    grad_outputs: list[Static]
    parameters: list[Tensor]
    grad_inputs: list[Tensor | None]
    grad_parameters: list[Tensor | None]
    reads: list[int]
    reads_elsewhere: list[Tensor]
    reached_from: list[set[int]]


@dataclass(slots=True, eq=False)
class Captured:
    """One size of a program.

    Attributes:
        statics: What calls are copied to.
        owner: Lives as long as one of the outputs.
        leaves: What it returns: tensors where the graph leaves them, and constants.
        tree: How these make up what the function returned.
        changed: Counts changes of the weights that each replay changes.
        seconds: What the capture took.
        peak_bytes: The most that it had allocated at once.
        pool_bytes: What the pool holds more than before.
        driver_bytes: What the device has less since executables were made for it.
        eager: A run of the function for it, None if it never ran.
        last_used: A number that is larger the later it was.
        samples: Its first replays.
        replayed: The graphs that were.
        read: What the backward pass of the last call reads, and others can change.
        states: Of these, after that call.
    """

    size: Size
    statics: list[Static]
    owner: Owner
    forward: Replayable
    leaves: list[Any]
    tree: pytree.TreeSpec
    backward: Backward | None
    changed: _torch.Counters
    seconds: float
    peak_bytes: int
    pool_bytes: int
    driver_bytes: int
    eager: Span | None = None
    last_used: int = 0
    samples: list[Span] = field(default_factory=list)
    replayed: list[Replayable] = field(default_factory=list)
    read: list[Tensor] = field(default_factory=list)
    states: list[tuple[int, int]] = field(default_factory=list)
    streams: set[int] = field(default_factory=set)  # that what calls write is recorded for

    @property
    def written(self) -> list[Tensor]:
        """By calls."""
        gradients = [] if self.backward is None else self.backward.grad_outputs
        return [static.tensor for static in (*self.statics, *gradients)]


# Makes what a backward pass reads its gradients from: of the leaves with these numbers.
GradientBuffers = Callable[[Sequence[int], Sequence[Tensor]], list[Static]]


def capture(
    captures: Captures,
    function: Callable[[], Any],
    statics: list[Static],
    size: Size,
    before: Usage,
    gradient_buffers: GradientBuffers,
    weights: Sequence[Tensor],
    trains: bool,
    known: Mapping[int, Tensor],
) -> tuple[Captured, Usage]:
    """Captures what ``function`` does with ``statics``, and its backward pass if there is one.

    The memory of what it returns goes back to the pool when all of it is captured.

    Arguments:
        before: What is used now. Returned is also what is used then.
        weights: Of which replays count changes.
        trains: Whether its outputs lead to something that gets gradients.
        known: What got gradients in warm-ups, by id. What the capture makes itself does not, but
            weights may lie in the pool too.
    """
    began = time.perf_counter()
    inputs = [static.tensor for static in statics]
    owner = Owner(captures, inputs)
    results: list[tuple[list[Any], pytree.TreeSpec]] = []
    saved = _Saved(captures, inputs)
    versions = [x._version for x in weights]
    with saved.noting() if trains else nullcontext():
        forward = captures.capture(lambda: results.append(_leaves_apart(function(), saved.inputs)))
    after = captures.usage()
    owner.graphs.append(forward)
    changed = [x for x, version in zip(weights, versions, strict=True) if x._version != version]
    leaves, tree = results.pop()
    backward = _capture_backward(captures, inputs, leaves, saved, owner, gradient_buffers, known)
    if backward is not None:
        forward_peak, after = after.peak, captures.usage()
        after = after._replace(peak=max(forward_peak, after.peak))
    lent = _lend_outputs(leaves, owner)
    del leaves  # from here on nothing lies in the pool
    captured = Captured(
        size,
        statics,
        owner,
        forward,
        lent,
        tree,
        backward,
        load_adapter().Counters(changed),
        seconds=time.perf_counter() - began,
        peak_bytes=after.peak,
        pool_bytes=after.pool - before.pool,
        driver_bytes=after.execs - before.execs,
    )
    return captured, after


def _capture_backward(
    captures: Captures,
    inputs: list[Tensor],
    leaves: list[Any],
    saved: _Saved,
    owner: Owner,
    gradient_buffers: GradientBuffers,
    known: Mapping[int, Tensor],
) -> Backward | None:
    places = [n for n, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    if not places or not torch.is_grad_enabled():
        return None
    outputs = [leaves[n] for n in places]
    parameters = [
        x
        for x in find_leaves(outputs)
        if not any(x is given for given in inputs)
        and (known.get(id(x)) is x or not captures.holds(x))
    ]
    for parameter in parameters:
        if parameter._backward_hooks:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} has a hook, which would become "
                "part of the graph and run a second time beside it: register hooks after the "
                "capture, or with register_post_accumulate_grad_hook"
            )
    differentiable = [x for x in inputs if x.requires_grad]
    if not differentiable + parameters:
        return None
    grad_outputs = gradient_buffers(places, outputs)
    reached = {n: {id(x) for x in find_leaves([leaves[n]])} for n in places}
    gradients: list[Tensor | None] = []

    def run() -> None:
        # As after the function's own autocast: a backward pass does not choose types anew.
        with torch.autocast(captures.device.type, enabled=False):
            gradients.extend(
                torch.autograd.grad(
                    outputs,
                    differentiable + parameters,
                    [static.tensor for static in grad_outputs],
                    allow_unused=True,
                )
            )

    graph = captures.capture(run)
    owner.graphs.append(graph)
    lent = [None if g is None else _lend(g, owner, captures.holds(g)) for g in gradients]
    gradients.clear()
    of_inputs = iter(lent)
    tensors = [n for n, x in enumerate(leaves) if isinstance(x, Tensor)]
    shared = _shared(places, leaves)
    return Backward(
        graph,
        places,
        grad_outputs,
        parameters,
        [next(of_inputs) if x.requires_grad else None for x in inputs],
        list(of_inputs),
        [n for n in tensors if _address(leaves[n]) in saved.addresses or n in shared],
        saved.elsewhere(parameters),
        [{n for n in places if id(x) in reached[n]} for x in (*inputs, *parameters)],
    )


def find_leaves(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaves whose gradients a backward pass accumulates, whether arguments or not."""
    leaves = [output for output in outputs if output.grad_fn is None]
    seen = set()
    waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return list({id(leaf): leaf for leaf in leaves}.values())


def _lend(tensor: Tensor, owner: Owner, is_held: bool) -> Tensor:
    """What lies in the pool is lent; an input, a weight, and what is no plain tensor is kept."""
    return lend(tensor, owner) if is_held and type(tensor) is Tensor else tensor.detach()


def _lend_outputs(leaves: Sequence[Any], owner: Owner) -> list[Any]:
    """Those that are of one memory count their changes together, as they did."""
    first: dict[int, Tensor] = {}
    outputs = []
    counting: list[Tensor] = []
    for output in leaves:
        if isinstance(output, Tensor):
            is_held = owner.captures.holds(output)
            output = _lend(output, owner, is_held)
            if is_held:
                if type(output) is Tensor:
                    same = first.setdefault(_address(output), output)
                    output = output if same is output else _counting_with(same, output)
                if not output.is_inference():  # which counts none, and autograd does not save
                    counting.append(output)
        outputs.append(output)
    owner.counters = load_adapter().Counters(counting)
    return outputs


def _shared(places: Sequence[int], leaves: Sequence[Any]) -> set[int]:
    """Which leaves may share an element with another: each begins before the other one ends."""
    homes: dict[int, list[int]] = {}
    for n in places:
        homes.setdefault(_address(leaves[n]), []).append(n)
    pairs = (pair for home in homes.values() for pair in itertools.permutations(home, 2))
    return {
        n
        for n, m in pairs
        if _begins_within(leaves[n], leaves[m]) and _begins_within(leaves[m], leaves[n])
    }


def _begins_within(a: Tensor, b: Tensor) -> bool:
    last = sum((n - 1) * step for n, step in zip(b.shape, b.stride(), strict=True))
    return bool(a.data_ptr() <= b.data_ptr() + last * b.itemsize)


def _counting_with(tensor: Tensor, data: Tensor) -> Tensor:
    """The data, as what shares with the tensor how often that was changed."""
    counter = tensor.detach()
    counter.data = data
    return counter


def _leaves_apart(result: Any, inputs: Set[int]) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of what a function returned, with a copy of each that lies in an input: the next
    call writes there before it reads what it was passed, which may be this.
    """
    leaves, tree = pytree.tree_flatten(result)
    leaves = [x.clone() if isinstance(x, Tensor) and _address(x) in inputs else x for x in leaves]
    return leaves, tree


def no_hooks_of_the_caller() -> AbstractContextManager[Any]:
    """Saved tensors are packed by no hooks that the caller has set, as checkpoint does."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()  # hooks of ours would cost a quarter of a small model's time
    hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(
        Tensor.detach, lambda tensor: tensor
    )
    return hooks


class _Saved:
    """What a backward pass reads of what autograd has saved for it. Noted when it does: a branch
    that leads to no gradient saves as well.
    """

    def __init__(self, captures: Captures, inputs: Sequence[Tensor]) -> None:
        self.addresses: set[int] = set()  # of the memory it lies in
        self._elsewhere: dict[Hashable, Tensor] = {}
        self._captures = captures
        self.inputs = {_address(tensor) for tensor in inputs}  # likewise

    def elsewhere(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """What lies neither in the pool nor in an input: parameters, and others that are read."""
        read = [x for x in parameters if _address(x) in self.addresses]
        known = {self._key(x) for x in read}
        return read + [x for key, x in self._elsewhere.items() if key not in known]

    def noting(self) -> AbstractContextManager[Any]:
        """Notes what autograd saves within, once it is read. Without its history, or the hooks
        would keep that, and be kept by it.
        """
        hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(
            Tensor.detach, self._note
        )
        return hooks

    def _note(self, tensor: Tensor) -> Tensor:
        # Of a sparse one its values, which count changes together with it.
        wraps = is_traceable_wrapper_subclass(tensor)
        watched = tensor if wraps or tensor.layout == torch.strided else _values(tensor)
        for part in unwrapped(watched):
            if part.is_nested or not torch._C._has_storage(part):
                continue
            address = _address(part)
            self.addresses.add(address)
            if address not in self.inputs and not self._captures.holds(part):
                self._elsewhere.setdefault(self._key(part), watched)
        return tensor

    @staticmethod
    def _key(tensor: Tensor) -> Hashable:
        """Tensors of one memory may count their changes apart."""
        return tensor.data_ptr(), tensor.numel()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Python's garbage collector leaves alone what there is already. To go through all that torch
    has made takes it a tenth of a second, and it would do so in the middle of a capture.
    """
    if gc.get_freeze_count():
        yield  # the program's own, which is not to be undone
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _values(sparse: Tensor) -> Tensor:
    values: Tensor = sparse._values() if sparse.layout == torch.sparse_coo else sparse.values()
    return values


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage().data_ptr()
    return address


@contextmanager
def no_autocast_cache() -> Iterator[None]:
    """What it keeps for later would be memory that a graph fills in, and no other one finds
    filled. For warm-ups too: torch.compile would compile anew, and in the capture, what they ran
    with it.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
