"""One callable, captured for many sizes."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

from ._adapter import load_adapter
from ._buckets import Buckets, LadderBuckets, ListedBuckets, Size, cost, shown
from ._call import Call, refuse_transforms, take_apart
from ._captures import Captures, frozen_heap, no_autocast_cache, no_hooks_of_the_caller
from ._function import modules_of, parameters_of, scripted, tensors_of, watch
from ._guard import is_guarded
from ._program import Plan, Program
from ._report import Report
from ._shared_exec import _EXEC_BUDGET
from .pools import GraphPool, _require_pool
from .switch import _require_booleans, _require_enabled

if TYPE_CHECKING:
    from . import _torch

Order = Literal["largest_first", "smallest_first", "given"]

_ORDERS = ("largest_first", "smallest_first", "given")
_MAX_PLANS = 4096  # one for each shape that calls have had: some kB each
_UNKNOWN: Any = object()


class GraphRunner:
    r"""Runs a function or module by CUDA graphs: one for each of several sizes, all in one pool.

    A call takes the smallest size that holds its arguments, fills up the rest with ``pad``, replays
    that size's graph, and returns what belongs to the call::

        runner = cgp.GraphRunner(model, sizes=cgp.sizes.powers_of_two(64))
        logits = runner(tokens)  # captures all sizes at the first call

    **What a call returns is overwritten by the next one**, of this runner or of another one on the
    same pool: read it or copy it before, or ask for ``clone_outputs``. So the outputs of all sizes
    together take the memory of the largest one's. Calls may come on any stream: each waits for the
    one before.

    The rows of a call must not depend on each other, nor on how many there are, or the padding
    would show: as in a batch norm that is trained, or by ``x[:, -1]``. Padding is computed with
    like everything else: what it writes, it writes (a cache at slot 0, if slots are padded by 0),
    and where it gives NaN, as a softmax over a row that is masked as a whole does, the gradients of
    parameters are NaN. Python code of the function runs at captures only. Its arguments must not be
    changed in place, since the graph sees copies of them; tensors that it finds elsewhere, as a
    module's buffers, may. As with :func:`torch.cuda.make_graphed_callables`, random numbers differ
    from replay to replay, and captures run the function some times more than it is called.

    With gradients enabled, a function whose outputs require them is captured together with its
    backward pass. Gradients go to arguments and to whatever parameters the function uses. The
    backward pass of a call runs before the next call, and once; until then the outputs, parameters
    and other tensors that it reads must stay as they are, and so must outputs that share memory.
    There are no second derivatives. Anything else is an error. An output that the loss does not use
    gets a gradient of zero, which becomes NaN where its derivative is infinite, as that of a square
    root is at 0: return such outputs detached.

    Captures of a process take turns, and run the function within: two threads whose functions wait
    for each other (collective operations, with a thread for each device) must not capture at once.

    Graphs are kept for each way of calling: whatever is no tensor among the arguments, whether
    gradients are enabled, autocast, which parts of a module are in training and which arguments and
    parameters require gradients. When a parameter or buffer of a module has got other memory, all
    that was captured with it is captured anew.

    Arguments:
        function (Callable): What is captured: a module, a method of one, or a function. The runner
            sees when weights of modules that it refers to have moved, or tensors in its closure or
            among its globals; whatever else a function uses must stay where it is, and its names
            must go on meaning the same objects.
        sizes (sequence or str): The sizes to capture, as :mod:`cudagraph_pool.sizes` has them:
            integers, or tuples of several dimensions (``sizes.grid``). ``"auto"``: those that the
            calls need, such that none is padded by more than ``padding`` of its own.
        dim (int, tuple or dict): Which dimension of the tensor arguments is as large as the size.
            For sizes of several dimensions a tuple with an entry for each, ``None`` for a dimension
            that a tensor has not, a tuple for one that it has several times. A dictionary says it
            for each argument by name; tensors that it does not name are the same at all sizes.
            Default: 0.
        pool (GraphPool, optional): The pool to capture into. Default: a new one, on the current
            device.
        pad (number or dict): What fills up the arguments of a call that is smaller than its graph;
            a dictionary says it for arguments by name, 0 for others. As for ``dim`` a name is that
            of a parameter of the function, or a path to a tensor: ``batch['ids']``. Default: 0.
        warmup (int): How often each size runs before it is captured. Default: 3.
        shared_exec (bool or str): As for :class:`cudagraph_pool.graph`. ``"auto"``: as ``pool`` was
            made; a new one keeps an executable for each size in use, as long as all take 256 MiB
            at most, and the rest share. Another budget: ``pool=GraphPool(shared_exec=True,
            exec_budget=...)``. Default: ``"auto"``.
        own_workspace (bool): As for :class:`cudagraph_pool.graph`: for runners of different pools
            that are called, or capture, on several streams at once. Default: ``False``.
        order (str): In which order sizes are captured: ``"largest_first"``, ``"smallest_first"`` or
            ``"given"``. Default: ``"largest_first"``.
        overflow (str): What a call larger than all sizes does: ``"error"``, or ``"eager"`` to call
            the function itself. Default: ``"error"``.
        clone_outputs (bool): Return copies, which stay as they are. Default: ``False``.
        lazy (bool): Capture a size when it is first used. Default: ``False``, but ``True`` for
            ``"auto"``.
        max_graphs (int, optional): How many sizes are kept captured at a time, over all ways of
            calling; the one that was not used for the longest time goes. For ``lazy`` and
            ``"auto"``. Default: all.
        padding (float): For ``"auto"``. Default: 0.25.
        progress (bool): Show a progress bar while sizes are captured. Default: ``True``.

    Raises:
        RuntimeError: :func:`cudagraph_pool.enable` was not called, or the pool was released.
        TypeError, ValueError: An argument cannot be meant.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        sizes: Iterable[int | Iterable[int]] | Literal["auto"],
        dim: int | tuple[Any, ...] | Mapping[str, Any] = 0,
        pool: GraphPool | None = None,
        pad: float | Mapping[str, float] = 0,
        warmup: int = 3,
        shared_exec: bool | Literal["auto"] = "auto",
        own_workspace: bool = False,
        order: Order = "largest_first",
        overflow: Literal["error", "eager"] = "error",
        clone_outputs: bool = False,
        lazy: bool = False,
        max_graphs: int | None = None,
        padding: float = 0.25,
        progress: bool = True,
    ) -> None:
        if not callable(function):
            raise TypeError(f"function is {function!r}, but must be callable")
        _require_booleans(
            own_workspace=own_workspace, clone_outputs=clone_outputs, lazy=lazy, progress=progress
        )
        if order not in _ORDERS:
            raise ValueError(f"unknown order {order!r}; expected one of {_ORDERS}")
        if overflow not in ("error", "eager"):
            raise ValueError(f"overflow is {overflow!r}, but must be 'error' or 'eager'")
        for name, value in (("warmup", warmup), ("max_graphs", max_graphs)):
            if not isinstance(value, int) and (name, value) != ("max_graphs", None):
                raise TypeError(f"{name} is {value!r}, but must be an integer")
        if warmup < 0:
            raise ValueError(f"warmup is {warmup}, but must be 0 or more")
        self._buckets: Buckets
        if isinstance(sizes, str):
            if sizes != "auto":
                raise ValueError(f"sizes is {sizes!r}, but must be a sequence or 'auto'")
            self._buckets = LadderBuckets(_axes_of(dim), padding)
        else:
            self._buckets = ListedBuckets(sizes)
        self._lazy = lazy or isinstance(self._buckets, LadderBuckets)
        if max_graphs is not None and (max_graphs < 1 or not self._lazy):
            raise ValueError(
                f"max_graphs is {max_graphs}: it must be at least 1, and is for graphs that are "
                "captured when they are used, with lazy=True or sizes='auto'"
            )
        self._function = function
        self._modules = modules_of(function)
        self._dim, self._pad = dim, pad
        self._warmup, self._order, self._overflow = warmup, order, overflow
        self._clone_outputs, self._max_graphs = clone_outputs, max_graphs
        self._progress = progress
        self._captures = self._new_captures(pool, shared_exec, own_workspace)
        self._device_type = self._captures.device.type
        self._turns = self._captures.turns
        self._lock = threading.RLock()
        self._programs: dict[Any, Program] = {}
        # None: of calls larger than all sizes. No weights that have moved are in a key.
        self._plans: dict[Any, Plan | None] = {}
        # What there is of them is replayed without more ado. None while something is captured.
        self._settled: dict[Any, _torch.Replays] = {}
        self._watch()
        parameters = parameters_of(function)
        self._sort_keywords = bool(parameters) and not any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters
        )
        self._reader = load_adapter().CallReader(self._device_type, self._sort_keywords)
        self._calls = 0
        self._capturing = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        r"""Return what the function returns for these arguments.

        The tensors are overwritten by the next call, unless ``clone_outputs``.

        Raises:
            RuntimeError: It comes from within a transform of ``torch.func`` or a trace, or with
                tangents.
            ValueError: An argument has another shape, dtype, device or memory format than those
                that were captured, or the call is larger than all sizes.
            TypeError: An argument holds what is neither a tensor nor a constant: a number, a
                string, a dtype, a device, a member of an enum, a class or a function.
        """
        if torch.compiler.is_dynamo_compiling():
            return self._call_uncompiled(args, kwargs)
        with self._lock:
            with self._turns.lock:
                known = {} if is_guarded() else self._settled
                settled = self._reader.run(
                    self._weights, known, self._turns.row, args, kwargs, self._clone_outputs
                )
            if settled is not None:
                assemble, leaves = settled
                return assemble(leaves)
        return self._call(args, kwargs)

    def capture(self, *args: Any, **kwargs: Any) -> None:
        r"""Capture now what a call with these arguments would capture, and replay nothing."""
        with self._alone():
            self._plan(args, kwargs)

    def reset(self) -> None:
        r"""Let go of all graphs. The next call captures again."""
        with self._alone():
            self._captures.synchronize()
            self._programs.clear()
            self._forget_plans()

    def report(self) -> Report:
        r"""Return a list of what each size cost and gains; printed, it is a table.

        Each entry has ``size``, ``nodes``, ``peak_bytes``, ``pool_bytes``, ``driver_bytes``,
        ``capture_seconds``, ``eager_seconds`` and ``replay_seconds``; ``help()`` of one says more.
        """
        with self._alone():
            self._captures.synchronize()
            return Report.of(self._captures, (p.captured for p in self._programs.values()))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a GraphRunner cannot be copied or pickled: its graphs are this process's")

    @torch._compile._disable_dynamo  # as torch.compiler.disable, which imports the compiler now
    def _call_uncompiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """From code that is compiled: a graph is replayed between what becomes of that."""
        return self(*args, **kwargs)

    def _new_captures(
        self, pool: GraphPool | None, shared_exec: bool | Literal["auto"], own_workspace: bool
    ) -> Captures:
        _require_enabled("GraphRunner")
        if pool is not None:
            _require_pool(pool)
        if not isinstance(shared_exec, bool) and shared_exec != "auto":
            raise ValueError(f"shared_exec is {shared_exec!r}, but must be a boolean or 'auto'")
        if pool is None:
            pool = GraphPool(shared_exec=shared_exec is not False, exec_budget=_EXEC_BUDGET)
        return Captures(pool, None if shared_exec == "auto" else shared_exec, own_workspace)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            tensors, key = self._key(args, kwargs)
            plan = self._plans.get(key, _UNKNOWN)
            if plan is not None and plan is not _UNKNOWN:
                return self._replay(plan, tensors, key)
        if plan is _UNKNOWN:
            with self._alone():
                plan, tensors, key = self._plan(args, kwargs)
                if plan is not None:
                    return self._replay(plan, tensors, key)
        return self._function(*args, **kwargs)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No capture is under way, and no call of this runner. In this order: what is captured may
        call another runner.
        """
        with self._captures.lock, self._lock:
            yield

    def _replay(self, plan: Plan, tensors: list[Tensor], key: Hashable) -> Any:
        self._calls += 1
        plan.captured.last_used = self._calls
        result = plan.run(tensors, self._clone_outputs)
        # Who trains, or whose graphs may go, has more to do in each call, and other keys than bytes
        # the reader does not find. What assembles the result may have called this runner, and the
        # plan be of the past.
        is_plain = plan.captured.backward is None and self._max_graphs is None
        if is_plain and isinstance(key, bytes) and plan.is_settled and self._plans.get(key) is plan:
            self._settled[key] = plan.replays
        return result

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], Hashable]:
        """The tensors of a call, and what it has in common with those that are run alike."""
        if self._capturing:
            raise RuntimeError(
                "the function calls the GraphRunner that captures it: a module whose forward is "
                "replaced by a runner is captured by GraphRunner(module.forward)"
            )
        # The reader does not know whether these are in training.
        read = None if self._scripted else self._reader.read(self._weights, args, kwargs)
        return read or self._read_any(args, kwargs)

    def _plan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Plan | None, list[Tensor], Hashable]:
        """How this call is run, captures what that needs; and its tensors and key. None: by the
        function itself. pre: :meth:`_alone`.
        """
        tensors, key = self._key(args, kwargs)
        plan = self._plans.get(key, _UNKNOWN)
        if plan is _UNKNOWN:
            plan = self._new_plan(take_apart(args, kwargs, self._sort_keywords))
            if len(self._plans) >= _MAX_PLANS:
                self._forget_plans()
            _, key = self._key(args, kwargs)  # weights may have been made
            self._plans[key] = plan
        return plan, tensors, key

    def _read_any(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Tensor], Hashable]:
        """What the reader returns, for a call that it does not read: one of other arguments too."""
        call = take_apart(args, kwargs, self._sort_keywords)
        refuse_transforms(call.tensors, self._modules)
        what = self._modes(), call.structure, call.constants, call.shapes
        return call.tensors, (self._weights.flags(), *what)

    def _way(self, call: Call) -> Hashable:
        """Calls with the same way run the same Python code, but for sizes."""
        get_gradients = tuple(x.requires_grad for x in call.tensors)
        return self._flags(), (self._modes(), call.structure, call.constants, get_gradients)

    def _modes(self) -> Hashable:
        """What else than arguments and weights decides what the function does."""
        device = self._device_type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return torch.is_grad_enabled(), autocast, tuple(x.training for x in self._scripted)

    def _flags(self) -> bytes:
        """Those of the weights where they are now."""
        flags = self._weights.flags()
        if flags is None:
            self._forget_weights()
            flags = self._weights.flags()
        assert flags is not None
        return flags

    def _new_plan(self, call: Call) -> Plan | None:
        program = self._programs.get(self._way(call)) or Program(
            self._function, call, self._captures, self._buckets, self._dim, self._pad
        )
        size = program.size_of(call)
        bucket = self._buckets.fit(size)
        if bucket is None:
            if self._overflow == "eager":
                return None
            largest = " or ".join(map(shown, _largest(self._buckets.listed())))
            raise ValueError(
                f"the call has size {shown(size)}, but the largest that was captured is {largest}; "
                "capture a larger one, or pass overflow='eager' to run such calls eagerly"
            )
        if bucket not in program.captured:
            self._capture(program, call, size, bucket)
        return program.plan(size, bucket)

    def _capture(self, program: Program, call: Call, size: Size, bucket: Size) -> None:
        """Captures one bucket, or all of them. Where one fails none of these is left."""
        sizes = [bucket] if self._lazy else self._in_order()
        before = dict(program.captured)
        shows = self._progress and len(sizes) > 1 and sys.stderr is not None
        bar = tqdm(sizes, unit="graph", disable=not shows)
        self._capturing = True
        self._settled.clear()
        at = bucket
        try:
            # Backward passes run in this thread: autograd's own one for the device may wait for
            # this capture to end, with a call from within a backward pass of another thread.
            with (
                frozen_heap(),
                no_hooks_of_the_caller(),
                no_autocast_cache(),
                torch.autograd.set_multithreading_enabled(False),
                self._captures.in_a_row(),
            ):
                program.forget_call()
                for at in sizes:
                    bar.set_description(f"warming up size {shown(at)}")
                    program.warm_up(call, size, at, self._warmup)
                if self._weights.flags() is None:  # made or grown when it first ran
                    self._forget_weights()
                    program.captured, before = {}, {}
                self._captures.empty_caches()
                used = self._captures.usage()
                # Tensors of inference mode count no changes.
                weights = [x for x in tensors_of(self._modules) if not x.is_inference()]
                for at in bar:
                    bar.set_description(f"capturing size {shown(at)}")
                    captured, used = program.capture(call, at, used, weights)
                    captured.last_used = self._calls
                    bar.set_postfix_str(f"pool {used.pool / 2**20:,.0f} MiB")
            self._refuse_moving_weights()
        except BaseException as error:
            error.add_note(f"while a GraphRunner captured size {shown(at)}")
            program.captured = before
            raise
        finally:
            self._capturing = False
            bar.close()
        self._programs[self._way(call)] = program
        self._make_room()

    def _forget_weights(self) -> None:
        """Some have moved: graphs that read them are of the past."""
        self.reset()
        self._watch()

    def _watch(self) -> None:
        self._weights = watch(self._modules)
        self._scripted = scripted(self._modules)

    def _refuse_moving_weights(self) -> None:
        if self._weights.flags() is None:
            raise ValueError(
                "the function replaces a parameter or buffer of its module each time it runs; a "
                "graph goes on reading the old one. Change it in place: buffer.copy_(...)"
            )

    def _in_order(self) -> list[Size]:
        sizes = list(self._buckets.listed())
        if self._order == "given":
            return sizes
        return sorted(sizes, key=cost, reverse=self._order == "largest_first")

    def _make_room(self) -> None:
        """Lets the graph go that was not used for the longest time, if there are too many."""
        captured = [(way, c) for way, p in self._programs.items() for c in p.captured.values()]
        if self._max_graphs is None or len(captured) <= self._max_graphs:
            return
        way, oldest = min(captured, key=lambda entry: entry[1].last_used)
        self._captures.synchronize()
        program = self._programs[way]
        del program.captured[oldest.size]
        if not program.captured:
            del self._programs[way]
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._plans.clear()
        self._settled.clear()


def _axes_of(dim: Any) -> int:
    """How many numbers a size has, by what ``dim`` says."""
    entries = list(dim.values()) if isinstance(dim, Mapping) else [dim]
    entries = [(entry,) if isinstance(entry, int) else entry for entry in entries]
    axes = {len(entry) if isinstance(entry, tuple) else 0 for entry in entries if entry is not None}
    if len(axes) != 1 or 0 in axes:
        raise ValueError(
            f"dim is {dim!r}: with sizes='auto' it says how many dynamic dimensions there are, and "
            "says so for one tensor at least, and the same for all"
        )
    return axes.pop()


def _largest(sizes: Sequence[Size]) -> list[Size]:
    """Those that no other one holds."""
    return [
        size
        for size in sizes
        if not any(other != size and all(map(int.__le__, size, other)) for other in sizes)
    ]
