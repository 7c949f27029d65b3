"""One callable, captured for many sizes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from typing import Any, Literal, NoReturn, get_args

import torch
from torch.autograd import forward_ad
from tqdm import tqdm

from .._leases import Keep
from .._shared_exec import _EXEC_BUDGET
from ..pools import GraphPool, _require_pool
from ..sizes import Buckets, Size, cost, shown
from ..switch import _require_booleans, _require_enabled, _require_one_of, _require_type
from .arguments import Call, Signature
from .captures import Captures, Report, undisturbed
from .padding import size_of
from .plan import Plan
from .program import Program, Setup

Order = Literal["largest_first", "smallest_first", "given"]

_MAX_PLANS = 4096  # one for each shape that calls have had: some kB each


class GraphRunner:
    r"""Runs a function or module by CUDA graphs: one for each of several sizes, all in one pool.

    A call takes the smallest size that holds its arguments, fills up the rest with ``pad``, replays
    that size's graph, and returns what belongs to the call::

        runner = cgp.GraphRunner(model, sizes=cgp.sizes.powers_of_two(64))
        logits = runner(tokens)  # captures all sizes at the first call

    **The next call overwrites what a call returns**, also one of another runner on the same pool.
    Copy it before, or ask for ``clone_outputs``. A call on any stream waits for the one before.

    **What the function reads must stay where it is**: parameters, buffers and other tensors. For a
    module, or a method of one, each call compares the addresses of all parameters and buffers with
    the captured ones, and captures a size anew if one has moved. After any other change call
    :meth:`reset`: of a submodule, a closure, a global, an attribute or a hook.

    The rows of a call must not depend on each other, nor on how many there are, or the padding
    shows. Padding is computed with: what it writes, it writes, and its NaNs reach the gradients of
    parameters. The function must not change its arguments, nor put tensors into them: it gets
    copies. Its Python code runs at captures only, and more than once.

    With gradients enabled the backward pass is captured too, for arguments and the parameters of
    the module. It runs once, before the next call; until then outputs and saved tensors must stay
    as they are. An output that the loss does not use gets a gradient of zero.

    Constants among the arguments, autocast, training modes, and what requires gradients make
    graphs of their own. Captures of a process take turns.

    Arguments:
        function (Callable): What is captured: a module, a method of one, or a function.
        sizes (sequence or str): The sizes to capture: integers, or tuples for several dimensions
            (:mod:`cudagraph_pool.sizes`). ``"auto"``: what calls need, with at most ``padding``.
        dim (int, tuple or dict): Which dimension of the tensor arguments is as large as the size.
            For several dimensions a tuple with an entry for each: ``None`` for one that a tensor
            has not, a tuple for one that it has several times. A dictionary says it by name;
            tensors that it does not name are the same at all sizes. Default: 0.
        pool (GraphPool, optional): What to capture into. Default: a new one on the current device.
        pad (number or dict): What fills up arguments. A dictionary says it by name: of a parameter
            of the function, or a path to a tensor (``batch['ids']``). Default: 0.
        warmup (int): How often each size runs before it is captured. Default: 3.
        shared_exec (bool or str): As for :class:`cudagraph_pool.graph`. ``"auto"``: as ``pool`` was
            made; graphs of a new one share executables beyond 256 MiB. Default: ``"auto"``.
        own_workspace (bool): As for :class:`cudagraph_pool.graph`, for runners of different pools
            on several streams at once. Default: ``False``.
        order (str): Of captures: ``"largest_first"`` (default), ``"smallest_first"``, ``"given"``.
        overflow (str): For a call larger than all sizes: ``"error"`` (default), or ``"eager"``.
        clone_outputs (bool): Return copies, which stay as they are. Default: ``False``.
        lazy (bool): Capture a size when it is first used, as ``"auto"`` does. Default: ``False``.
        max_graphs (int, optional): The most sizes that are captured at a time, for ``lazy`` and
            ``"auto"``; the least recently used goes first, with the memory that no other graph and
            no tensor needs. Default: all.
        max_bytes (int, optional): The most that the pool holds after captures, likewise. What
            executables take beside it is in :meth:`report`. Default: no limit.
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
        max_bytes: int | None = None,
        padding: float = 0.25,
        progress: bool = True,
    ) -> None:
        _require_type(Callable, "callable", function=function)
        _require_booleans(
            own_workspace=own_workspace, clone_outputs=clone_outputs, lazy=lazy, progress=progress
        )
        _require_one_of(get_args(Order), order=order)
        _require_one_of(("error", "eager"), overflow=overflow)
        buckets = Buckets(sizes, dim, padding)
        self._lazy = lazy or not buckets.listed
        limits = (("max_graphs", max_graphs, 1), ("max_bytes", max_bytes, 1))
        for name, number, least in (("warmup", warmup, 0), *limits):
            if number is not None and not isinstance(number, int):
                raise TypeError(f"{name} is {number!r}, but must be an integer")
            if number is not None and number < least:
                raise ValueError(f"{name} is {number}, but must be {least} or more")
            if number is not None and least and not self._lazy:
                raise ValueError(f"{name} is {number}: it needs lazy=True or sizes='auto'")
        self._overflow, self._listed = overflow, buckets.listed
        if order != "given":
            self._listed = sorted(self._listed, key=cost, reverse=order == "largest_first")
        self._max_graphs, self._max_bytes, self._progress = max_graphs, max_bytes, progress
        captures = self._new_captures(pool, shared_exec, own_workspace)
        signature = Signature(function, captures.device)
        self._setup = Setup(signature, captures, buckets, dim, pad, warmup, clone_outputs)
        # Of calls. Captures hold theirs before it, since what is captured may call another runner.
        self._lock = threading.RLock()
        self._programs: dict[Any, Program] = {}
        self._plans: dict[Any, Plan | Literal[False]] = {}  # False: of calls larger than all sizes
        self._capturing = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        r"""Return what the function returns for these arguments.

        Raises:
            RuntimeError: It comes from the function itself, or within forward-mode derivatives.
            ValueError: A tensor is not as captured, or the call is larger than all sizes.
            TypeError: An argument holds neither plain strided tensors nor hashable constants.
        """
        if torch.compiler.is_dynamo_compiling():
            return self._call_uncompiled(args, kwargs)
        with self._lock:
            call = self._read(args, kwargs)
            plan = self._plans.get(call.key)
            outputs = plan.run(call.tensors) if plan else ()
        if plan is None:
            with self._setup.captures.lock, self._lock:
                call = self._plan(args, kwargs)
                plan = self._plans[call.key]
                outputs = plan.run(call.tensors) if plan else ()
        # Without locks: both may run code of the caller's, which may wait for other threads.
        return plan.assemble(outputs) if plan else self._setup.signature.function(*args, **kwargs)

    def capture(self, *args: Any, **kwargs: Any) -> None:
        r"""Capture now what a call with these arguments would capture, and replay nothing."""
        with self._setup.captures.lock, self._lock:
            self._plan(args, kwargs)

    def reset(self) -> None:
        r"""Let go of all graphs. The next call captures again."""
        with self._setup.captures.lock, self._lock:
            self._setup.captures.synchronize()
            self._programs.clear()
            self._plans.clear()
            signature = Signature(self._setup.signature.function, self._setup.captures.device)
            self._setup = self._setup._replace(signature=signature)

    def sleep(self, keep: Keep = "live") -> int:
        r"""Let the pool sleep as :meth:`GraphPool.sleep`. Calls raise errors until :meth:`wake`.

        What calls returned may not be used meanwhile, unless ``clone_outputs``: it has no memory.
        """
        with self._setup.captures.lock, self._lock:
            return self._setup.captures.pool.sleep(keep)

    def wake(self) -> None:
        r"""Wake the pool, as :meth:`GraphPool.wake`."""
        with self._setup.captures.lock, self._lock:
            self._setup.captures.pool.wake()

    def report(self) -> Report:
        r"""Return what each size cost and gains: a list, which printed is a table."""
        with self._setup.captures.lock, self._lock:
            self._setup.captures.synchronize()
            programs = self._programs.values()
            return Report(p.report(size) for p in programs for size in sorted(p.captured, key=cost))

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
        if not isinstance(shared_exec, bool) and shared_exec != "auto":
            raise ValueError(f"shared_exec is {shared_exec!r}, but must be a boolean or 'auto'")
        if pool is None:
            pool = GraphPool(shared_exec=shared_exec is not False, exec_budget=_EXEC_BUDGET)
        _require_pool(pool)
        return Captures(pool, None if shared_exec == "auto" else shared_exec, own_workspace)

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        if forward_ad._current_level >= 0:
            raise RuntimeError("graphs have no tangents: call the runner outside of dual_level()")
        if self._capturing:
            raise RuntimeError(
                "the function calls the GraphRunner that captures it: a module whose forward is "
                "replaced by a runner is captured by GraphRunner(module.forward)"
            )
        return self._setup.signature.read(args, kwargs)

    def _plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Plans a call, and captures what that needs. pre: both locks are held."""
        call = self._read(args, kwargs)
        if call.key in self._plans:
            return call
        program = self._programs.get(call.variant) or Program(self._setup, call)
        size = size_of(program.inputs, call.tensors, self._setup.buckets.axes)
        bucket = self._setup.buckets.fit(size)
        if bucket is None and self._overflow == "error":
            raise ValueError(
                f"the call has size {shown(size)}, but the largest that was captured is "
                f"{self._setup.buckets.largest()}; capture a larger one, or pass overflow='eager'"
            )
        made = bucket and program.captured.get(bucket)
        if bucket and (not made or made.addresses != self._setup.signature.addresses()):
            sizes = [bucket] if made or self._lazy else self._listed
            made = None  # its graph goes with the capture
            self._capture(program, call, size, sizes)
            call = self._read(args, kwargs)  # weights may have been made
            self._programs[call.variant] = program
            self._make_room()
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[call.key] = bucket is not None and Plan(program, bucket, size)
        return call

    def _capture(self, program: Program, call: Call, size: Size, sizes: list[Size]) -> None:
        """Captures some buckets. Where one fails none of these is kept."""
        signature, captures = self._setup.signature, self._setup.captures
        made, at = {}, sizes[0]
        shows = self._progress and len(sizes) > 1 and sys.stderr is not None
        bar = tqdm(sizes, unit="graph", disable=not shows)
        self._capturing = True
        try:
            with bar, undisturbed(), captures.on_capture_stream():
                for at in sizes:
                    bar.set_description(f"warming up size {shown(at)}")
                    program.warm_up(call, size, at)
                addresses = signature.addresses()  # some may be made when it first runs
                captures.empty_caches()
                for at in bar:
                    bar.set_description(f"capturing size {shown(at)}")
                    made[at] = program.capture(call, at)
                    held = captures.stats()["reserved_bytes"]
                    bar.set_postfix_str(f"pool {held / 2**20:,.0f} MiB")
            if signature.addresses() != addresses:
                raise ValueError(
                    "the function replaces a parameter or buffer of its module each time it runs; "
                    "a graph goes on reading the old one. Change it in place: buffer.copy_(...)"
                )
        except BaseException as error:
            error.add_note(f"while a GraphRunner captured size {shown(at)}")
            raise
        finally:
            self._capturing = False
        program.captured |= made
        self._plans.clear()  # those of graphs that were replaced, too

    def _make_room(self) -> None:
        """Lets graphs go that were not used for the longest time, if there is too much of them."""
        captures, programs = self._setup.captures, self._programs.values()
        used = [(p.captured[size].last_used, p, size) for p in programs for size in p.captured]
        used.sort(key=lambda entry: entry[0], reverse=True)
        most, limit = self._max_graphs or len(used), self._max_bytes
        if limit and captures.stats()["reserved_bytes"] > limit:
            captures.trim()  # what only graphs needed that were captured anew
        while used and (
            len(used) > most or (limit and (held := captures.stats()["reserved_bytes"]) > limit)
        ):
            _, program, oldest = used.pop()
            captures.synchronize()
            del program.captured[oldest]
            with nullcontext() if limit else suppress(RuntimeError):  # others may have its pages
                captures.trim()
        self._programs = {variant: p for variant, p in self._programs.items() if p.captured}
        if not used:
            raise RuntimeError(
                f"the pool holds {held:,} bytes with the graph of size {shown(oldest)} alone, but "
                f"max_bytes is {limit:,}: raise it, or let go of what else lies in the pool"
            )
