"""When a GraphRunner captures, and what it refuses to, on graphs that the CPU records."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import cudagraph_pool as cgp

pytest.importorskip("torch")

import torch
from cpu_captures import (
    SIZES,
    CpuCaptures,
    Quantized,
    double,
    is_captured,
    model,
    rows,
    runner,
    tree_equal,
)
from torch import Tensor, nn

from cudagraph_pool._call import Named
from cudagraph_pool._static_inputs import Input, StaticInputs

# When graphs come and go


def test_a_capture_casts_as_its_warm_ups_do() -> None:
    """torch.compile guards on it: it would compile once more, and in the capture."""
    seen: set[tuple[bool, bool]] = set()

    def work(x: Tensor) -> Tensor:
        seen.add((is_captured(), torch.is_autocast_cache_enabled()))
        return x * 2

    runner(work)(rows(3))
    assert seen == {(False, False), (True, False)}
    assert torch.is_autocast_cache_enabled()


def test_a_part_may_have_the_runner_of_the_whole() -> None:
    """A circle through what C++ holds, which Python's collector has to be told of."""
    net = model()
    net[0].fast = runner(net)
    net[0].fast(rows(3))
    part = weakref.ref(net[0])
    del net
    gc.collect()
    assert part() is None


def test_the_graph_least_used_makes_room() -> None:
    run = runner(double, lazy=True, max_graphs=2)
    for n in (1, 8, 1, 4):  # 8 goes
        assert tree_equal(run(x := rows(n)), x * 2)
    assert run.sizes_captured == [(1,), (4,)]
    assert tree_equal(run(x := rows(8)), x * 2)
    assert run.sizes_captured == [(4,), (8,)]


def test_sizes_that_come_with_the_calls() -> None:
    run = runner(double, sizes="auto", padding=0.5)
    sizes = (7, 100, 8, 33, 1, 99)
    for n in sizes:
        assert tree_equal(run(x := rows(n)), x * 2)
    captured = [n for (n,) in run.sizes_captured]
    assert all(any(n <= b <= 1.5 * n for b in captured) for n in sizes)
    assert len(captured) == 4


def test_a_capture_that_fails_leaves_the_runner_as_it_was() -> None:
    failing = True

    def work(x: Tensor) -> Tensor:
        if failing and len(x) == 2:
            raise OSError("out of luck")
        return x * 2

    run = runner(work)
    with pytest.raises(OSError, match="out of luck") as raised:
        run(rows(3))
    assert raised.value.__notes__ == ["while a GraphRunner captured size 2"]
    assert run.report() == []
    failing = False
    assert tree_equal(run(x := rows(3)), x * 2)


def test_capture_runs_nothing_for_the_caller() -> None:
    run = runner(double)
    run.capture(rows(3))
    assert run.sizes_captured == [(1,), (2,), (4,), (8,)]
    assert sum(tape.replays for tape in run.captures.tapes) == 0


# What cannot be captured


def test_results_that_cannot_be_cut() -> None:
    for work, said in (
        (lambda x: x.flatten(), r"output has the shape \(48,\) at size 8 and \(6,\) at 1"),
        (lambda x: torch.cat([x, x]), "where its padding lies is unknown"),
        (lambda x: (x, len(x)), r"output\[1\] is 8 at size 8 and 1 at 1: a value that Python"),
        (lambda x: list(x), r"returns 8 value\(s\) at size 8 and 1 at 1"),
        (lambda x: x[:2], r"output has the shape \(2, 6\) at size 8 and \(1, 6\) at 1"),
        (lambda x: (x, "few" if len(x) < 3 else "many"), "is 'many' at size 8 and 'few' at 1"),
        (lambda x: (x, x) if len(x) == 4 else x, "at size 8 and 2 at 4, or others"),
        (lambda x: x[:, :3] if len(x) == 4 else x, r"of shape \(8, 6\) at size 8 and of shape \(4"),
        (lambda x: object(), "output is a object; a GraphRunner's function returns tensors"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            runner(work)(rows(3))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sizes": "all"}, "sizes is 'all', but must be a sequence or 'auto'"),
        ({"order": "random"}, "unknown order 'random'"),
        ({"overflow": "ignore"}, "overflow is 'ignore'"),
        ({"sizes": 8}, "sizes is 8, but must be a sequence of integers or of tuples"),
        ({"sizes": [0.5]}, r"sizes has 0.5, but a size is an integer of at least 1"),
        ({"sizes": "auto", "padding": float("inf")}, "padding is inf"),
        ({"warmup": -1}, "warmup is -1"),
        ({"max_graphs": 4}, "max_graphs is 4: .* with lazy=True"),
        ({"max_graphs": 0, "lazy": True}, "max_graphs is 0"),
        ({"sizes": "auto", "dim": {"x": None}}, "says so for one tensor at least"),
        ({"sizes": "auto", "dim": 0.5}, "says how many dynamic dimensions there are"),
        ({"sizes": "auto", "dim": ()}, "says how many dynamic dimensions there are"),
        ({"sizes": "auto", "padding": -1}, "padding is -1"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        runner(double, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"warmup": 1.5}, "warmup is 1.5, but must be an integer"),
        ({"max_graphs": "3", "lazy": True}, "max_graphs is '3', but must be an integer"),
        ({"sizes": "auto", "padding": "x"}, "padding is 'x', but must be a number"),
    ],
)
def test_options_of_another_type(options: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        runner(double, **options)


def test_sizes_of_an_array() -> None:
    numpy = pytest.importorskip("numpy")
    run = runner(double, sizes=numpy.arange(1, 5))
    x = rows(3)
    assert torch.equal(run(x), double(x))


def test_a_runner_is_not_copied() -> None:
    run = runner(double)
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copying(run)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dim": {"y": 0}}, r"dim names \['y'\], but the arguments passed are \['x'\]"),
        ({"pad": {"y": 0}}, r"pad names \['y'\]"),
        ({"dim": 2}, r"x has the shape \(3, 6\), but its dimension 2 should be dynamic"),
        ({"dim": (0, 1)}, r"dim is \(0, 1\) for x, but a size has 1 number"),
        ({"dim": "0"}, "dim is '0' for x, but must be an integer"),
        ({"dim": (0.5,)}, r"dim is \(0.5,\) for x, but must be an integer"),
        ({"pad": "0"}, "pad is '0' for x, but must be a number"),
        ({"pad": 10**400}, "pad is 10{400} for x, but must be a number of 64 bits"),
        ({"dim": ((0, -2),)}, "dim names a dimension of x twice"),
        ({"dim": {"x": None}}, "no argument has a dynamic dimension"),
    ],
)
def test_options_that_do_not_suit_the_call(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        runner(double, **options)(rows(3))


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_call_from_code_that_is_compiled() -> None:
    run = runner(double)
    x = rows(3)
    compiled = torch.compile(lambda x: run(x + 1) - 1, backend="eager")
    assert tree_equal(compiled(x), (x + 1) * 2 - 1)
    assert run.sizes_captured == [(size,) for size in SIZES]


def test_importing_it_does_not_import_the_compiler() -> None:
    """Which takes seconds."""
    script = (
        "import sys, cudagraph_pool as cgp; cgp.GraphRunner; print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_a_function_that_calls_its_own_runner() -> None:
    net = model()
    net.forward = runner(net)
    with pytest.raises(RuntimeError, match="calls the GraphRunner that captures it"):
        net(rows(3))


def test_the_report_has_what_the_driver_takes_for_executables() -> None:
    """Which are made when graphs are first replayed, that of the backward pass too."""
    net = model()
    run = runner(net, sizes=[4, 8])
    x = rows(8, requires_grad=True)
    run.capture(x)
    captures, executables, asked = run.captures, 0, 0

    def device_bytes() -> int:
        nonlocal asked
        asked += 1
        return 100 + 7 * executables

    captures.device_bytes = device_bytes  # type: ignore[method-assign]
    before = {row.size: row.driver_bytes for row in run.report()}
    for tape in captures.tapes:
        inner = tape.replay

        def replay(inner: Any = inner, tape: Any = tape) -> None:
            nonlocal executables
            executables += tape.replays == 0
            inner()

        tape.replay = replay  # type: ignore[method-assign]
    for _ in range(4):
        run(x).sum().backward()
    after = {row.size: row.driver_bytes for row in run.report()}
    assert after == {(4,): before[4,], (8,): before[8,] + 2 * 7}
    assert asked == 4  # before and after the first replay of either graph


def test_it_needs_to_be_enabled() -> None:
    with pytest.raises(RuntimeError, match="GraphRunner needs cudagraph_pool to be enabled"):
        cgp.GraphRunner(double, sizes=SIZES)
    with pytest.raises(TypeError, match="function is 3, but must be callable"):
        runner(3)
    with pytest.raises(TypeError, match="lazy is 'auto', but must be True or False"):
        runner(double, lazy="auto")


def test_garbage_is_not_collected_from_what_was_there_before() -> None:
    gc.unfreeze()  # what a plugin of pytest may have frozen
    frozen = []

    def fail_at_last(x: Tensor) -> Tensor:
        frozen.append(gc.get_freeze_count())
        if len(x) == SIZES[0]:
            raise ValueError("the smallest")
        return x * 2

    with pytest.raises(ValueError, match="the smallest"):
        runner(fail_at_last)(rows(1))
    assert min(frozen) > 0
    assert gc.get_freeze_count() == 0
    gc.freeze()  # by the program: that stays
    try:
        runner(double)(rows(1))
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_sizes_read_one_buffer_by_tensors_of_their_own(requires_grad: bool) -> None:
    """Also those that were read before a larger size came, which made another buffer."""
    given = Input.of(Named("x", "x"), rows(4, requires_grad=requires_grad), ((0,),), pad=0)
    statics = StaticInputs([given], torch.device("cpu"), [(4,)])
    before = statics.at((2,))[0].tensor
    largest = statics.at((8,))[0].tensor
    small, again = (statics.at((2,))[0].tensor for _ in range(2))
    assert before.data_ptr() != largest.data_ptr() == small.data_ptr() == again.data_ptr()
    with torch.no_grad():
        small.unsqueeze_(0)
    assert again.shape == (2, 6)
    assert {x.requires_grad for x in (before, largest, again)} == {requires_grad}


def test_runners_that_call_each_other_from_two_threads() -> None:
    """What is captured may call another runner, which a call in another thread holds."""
    pool = CpuCaptures()
    under_way, called = threading.Event(), threading.Event()
    inner = runner(double, [2], pool=pool, overflow="eager")

    def calls(x: Tensor) -> Tensor:
        under_way.set()
        called.wait(0.3)  # until the other thread has its lock, which nothing tells
        return inner(x) + 1

    outer = runner(calls, [8], pool=pool)
    results: list[Tensor] = []

    def call_inner() -> None:
        under_way.wait()
        with torch.no_grad():
            results.append(inner(torch.ones(1, 2)).clone())

    def call_outer() -> None:
        with torch.no_grad():
            results.append(outer(torch.ones(8, 2)).clone())

    threads = [threading.Thread(target=each, daemon=True) for each in (call_inner, call_outer)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "each waits for the other"
    assert sorted(len(result) for result in results) == [1, 8]


@pytest.mark.parametrize("warmup", [0, 1])
def test_what_is_returned_is_looked_at_however_often_it_ran(warmup: int) -> None:
    functions: list[tuple[Callable[[Tensor], Any], str]] = [
        (lambda x: x[:, :3] if len(x) == 4 else x * 1, "output is of shape"),
        (lambda x: (x * 1, "few" if len(x) == 4 else "many"), r"output\[1\] is 'many'"),
        (lambda x: x.add_(1) if len(x) == 4 else x + 1, "the function changes x in place"),
        (lambda x: (x * 1, x * 2) if len(x) == 4 else x * 1, "value"),
    ]
    for function, message in functions:
        with pytest.raises(ValueError, match=message):
            runner(function, warmup=warmup)(torch.ones(3, 6))


def test_a_function_runs_at_sizes_that_are_listed() -> None:
    def pair(x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, 4)).flatten(0, 1) * 1

    assert runner(pair, cgp.sizes.multiples(4, 8))(torch.ones(4, 2)).shape == (4, 2)


@pytest.mark.parametrize("sizes", [[8], "auto"])
def test_a_function_that_does_not_run_at_the_smallest_size(sizes: Any) -> None:
    net = nn.BatchNorm1d(6)  # in training
    x = rows(8)
    torch.testing.assert_close(runner(net, sizes, padding=0)(x), net(x))


def test_modules_of_torchscript() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        net = torch.jit.trace(nn.Linear(6, 2), rows(3))
        frozen = torch.jit.freeze(torch.jit.script(nn.Linear(6, 2).eval()))
    run, x = runner(net), rows(3)
    with torch.no_grad():
        assert torch.equal(run(x), net(x))
        net.double()
        assert run(x.double()).dtype == torch.double
        assert torch.equal(runner(frozen)(x), frozen(x))


def test_modules_of_torchscript_in_training() -> None:
    """Also parts of others, and those that come later."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drops = [torch.jit.script(nn.Dropout(0.9)) for _ in range(2)]
    net = nn.Sequential(drops[0])
    run, x = runner(net, sizes=[4]), torch.ones(4, 99)
    for drop in drops:
        net[0] = drop
        for trains in (True, False, True, False):
            drop.train(trains)
            for _ in range(5):
                assert (run(x) == 0).any() == trains


def test_outputs_that_no_graph_leaves() -> None:
    nested = torch.nested.nested_tensor([rows(2), rows(3)], layout=torch.jagged)
    for output, said in (
        (rows(2).to_sparse(), "of layout torch.sparse_coo; what a graph leaves must be"),
        (nested, "nested; what a graph leaves must be"),
        (Quantized(rows(2), rows(2)), "a Quantized; what a graph leaves must be a plain tensor"),
        (rows(2).to("meta"), "on meta: a graph would leave it as its capture did"),
    ):
        with pytest.raises(TypeError, match=f"output is {said}"):
            runner(lambda x, output=output: output)(rows(2))


def test_what_a_padded_size_would_be_wrong_for() -> None:
    """Listed sizes may agree where those of calls do not."""
    functions: list[Callable[[Tensor], Any]] = [
        lambda x: (x.sum(1), len(x) % 2 == 0),
        lambda x: nn.functional.pad(x, (0, 0, 0, -len(x) % 4)),
    ]
    for function in functions:
        with pytest.raises(ValueError, match=r"padded size would be wrong|its padding lies"):
            runner(function, [4, 8])(torch.ones(3, 2))
