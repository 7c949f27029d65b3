"""When a GraphRunner captures, and what it refuses to, on graphs that the CPU records."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import cudagraph_pool as cgp

pytest.importorskip("torch")

import torch
from cpu_captures import (
    SIZES,
    CpuCaptures,
    double,
    is_captured,
    model,
    rows,
    runner,
    tree_equal,
)
from torch import Tensor, nn


def test_the_graph_least_used_makes_room() -> None:
    run = runner(double, lazy=True, max_graphs=2)
    for n in (1, 8, 1, 4):  # 8 goes
        assert tree_equal(run(x := rows(n)), x * 2)
    assert run.sizes_captured == [(1,), (4,)]
    assert tree_equal(run(x := rows(8)), x * 2)
    assert run.sizes_captured == [(4,), (8,)]


def test_the_pool_stays_below_max_bytes() -> None:
    run = runner(double, lazy=True, max_bytes=240)  # 24 bytes a row
    for n in (4, 2, 4, 8):  # 2 goes, and then 4
        assert tree_equal(run(x := rows(n)), x * 2)
    assert run.sizes_captured == [(8,)]
    assert run.captures.stats()["reserved_bytes"] == 8 * 24
    small = runner(double, lazy=True, max_bytes=40)
    with pytest.raises(RuntimeError, match=r"holds 48 bytes .* size 2 alone, but max_bytes is 40"):
        small(rows(2))
    assert small.captures.stats()["reserved_bytes"] == 0
    assert tree_equal(small(x := rows(1)), x * 2)


def test_what_was_captured_anew_makes_room_first() -> None:
    layer = nn.Linear(6, 6)
    run = runner(layer, lazy=True, max_bytes=100)  # 24 bytes a row
    with torch.no_grad():
        run(rows(1))
        run(rows(2))
        layer.weight = nn.Parameter(layer.weight * 2)
        assert tree_equal(run(x := rows(2)), layer(x))
    assert run.sizes_captured == [(1,), (2,)]


def test_where_pages_cannot_go_graphs_make_room_all_the_same() -> None:
    def trim() -> None:
        raise RuntimeError("its pages are exportable")

    run = runner(double, lazy=True, max_graphs=1)
    bounded = runner(double, lazy=True, max_bytes=1)
    for each in (run, bounded):
        each.captures.trim = trim  # type: ignore[method-assign]
    run(rows(1))
    run(rows(2))
    assert run.sizes_captured == [(2,)]
    with pytest.raises(RuntimeError, match="exportable"):
        bounded(rows(2))


def test_the_pool_of_a_runner_sleeps() -> None:
    told: list[str] = []
    run = runner(double)
    pool: Any = SimpleNamespace(sleep=told.append, wake=told.clear)
    vars(run.captures)["pool"] = pool
    run.sleep("offload")
    assert told == ["offload"]
    run.wake()
    assert told == []


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


@pytest.mark.parametrize("sizes", [SIZES, [4, 8]])
def test_results_that_cannot_be_cut(sizes: Any) -> None:
    for work, said in (
        (lambda x: x.flatten(), r"output is \(48,\) at size 8 and \(6,\) at size 1: what of it"),
        (lambda x: (x, len(x)), r"output\[1\] is 8 at size 8 and 1 at size 1: what of it"),
        (lambda x: list(x), r"returns 8 value\(s\) at size 8 and 1 at size 1"),
        (lambda x: x[:2], r"output is \(2, 6\) at size 8 and \(1, 6\) at size 1"),
        (lambda x: (x, "few" if len(x) < 3 else "many"), "is 'many' at size 8 and 'few' at size 1"),
        (lambda x: (x, x) if len(x) == 4 else x, "at size 8 and 2 at size 4, or others"),
        (lambda x: x[:, :3] if len(x) == 4 else x, r"output is \(8, 6\) at size 8 and \(4, 3\)"),
        (lambda x: x[: len(x) // 2 * 2], "Return the dynamic dimension apart"),
        (lambda x: object(), "output holds a object; a GraphRunner takes and returns"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            runner(work, sizes, warmup=0)(rows(3))


def test_a_runner_is_not_copied() -> None:
    run = runner(double)
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copying(run)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dim": {"y": 0}}, r"dim names \['y'\], but the arguments are \['x'\]"),
        ({"pad": {"y": 0}}, r"pad names \['y'\]"),
        ({"dim": 2}, r"x has the shape \(3, 6\), but its dimension 2 should be dynamic"),
        ({"dim": (0, 1)}, r"dim is \(0, 1\) for x, but must be an integer"),
        ({"dim": "0"}, "dim is '0' for x, but must be an integer"),
        ({"dim": (0.5,)}, r"dim is \(0.5,\) for x, but must be an integer"),
        ({"pad": "0"}, "pad is '0' for x, but must be a number"),
        ({"pad": 10**400}, "pad is 10{400} for x, but must be a number of 64 bits"),
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


def test_it_needs_to_be_enabled() -> None:
    with pytest.raises(RuntimeError, match="GraphRunner needs cudagraph_pool to be enabled"):
        cgp.GraphRunner(double, sizes=SIZES)
    with pytest.raises(TypeError, match="function is 3, but must be callable"):
        runner(3)
    with pytest.raises(TypeError, match="lazy is 'auto', but must be True or False"):
        runner(double, lazy="auto")


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

    def call(run: Any, n: int) -> None:
        if run is inner:
            under_way.wait()
        with torch.no_grad():
            results.append(run(torch.ones(n, 2)).clone())

    pairs = [(inner, 1), (outer, 8)]
    threads = [threading.Thread(target=call, args=each, daemon=True) for each in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "each waits for the other"
    assert sorted(len(result) for result in results) == [1, 8]


@pytest.mark.parametrize("sizes", [[8], "auto"])
def test_a_function_that_does_not_run_at_the_smallest_size(sizes: Any) -> None:
    net = nn.BatchNorm1d(6)  # in training
    x = rows(8)
    torch.testing.assert_close(runner(net, sizes, padding=0)(x), net(x))


def test_what_the_caller_has_set_is_no_part_of_a_capture() -> None:
    """Nor of its warm-ups: what torch.compile guards on must not change in between."""
    gc.unfreeze()  # what a plugin of pytest may have frozen
    seen: set[Any] = set()

    def state() -> tuple[bool, ...]:
        threads = torch._C._is_multithreading_enabled()
        return gc.get_freeze_count() > 0, torch.is_autocast_cache_enabled(), threads

    def pack(tensor: Tensor) -> Tensor:
        seen.add("packed" if is_captured() else "eager")
        return tensor

    def work(x: Tensor) -> Tensor:
        seen.add(state())
        return x.exp()

    x = rows(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        runner(work)(x).sum().backward()
    assert seen - {"eager"} == {(True, False, False)}
    assert state() == (False, True, True)


def test_the_driver_takes_memory_for_executables_at_their_first_replay() -> None:
    run = runner(model(), sizes=[8])
    run.capture(rows(8))
    (before,) = run.report()
    taken = iter([100, 107, 200, 220])
    run.captures.device_bytes = lambda: next(taken, 0)  # type: ignore[method-assign]
    for _ in range(5):
        run(rows(8)).sum().backward()
    assert run.report()[0].driver_bytes == before.driver_bytes + 7 + 20


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sizes": "all"}, "sizes is 'all', but must be a sequence or 'auto'"),
        ({"sizes": 8}, "sizes is 8, but must be a sequence of integers or of tuples"),
        ({"warmup": 1.5}, "warmup is 1.5, but must be an integer"),
        ({"order": "random"}, "order is 'random', but must be one of"),
        ({"overflow": "ignore"}, "overflow is 'ignore', but must be one of"),
        ({"warmup": -1}, "warmup is -1"),
        ({"max_graphs": 4}, "max_graphs is 4: it needs lazy=True"),
        ({"max_bytes": 1 << 20}, "max_bytes is 1048576: it needs lazy=True"),
        ({"max_graphs": 0, "lazy": True}, "max_graphs is 0, but must be 1 or more"),
        ({"max_graphs": "3", "lazy": True}, "max_graphs is '3', but must be an integer"),
        ({"sizes": "auto", "dim": {"x": None}}, "says so for one tensor at least"),
        ({"sizes": "auto", "dim": ()}, "says how many dynamic dimensions there are"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        runner(double, **options)
