"""What a GraphRunner takes, and which calls are alike, on graphs that the CPU records."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from cpu_captures import double, rows, runner, tree_equal
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def test_arguments_that_are_not_as_captured() -> None:
    run = runner(lambda x, y: x + y)
    with pytest.raises(TypeError, match=r"y holds a Tensor of layout torch\.strided on meta"):
        run(rows(3), rows(3, device="meta"))
    run(rows(3), rows(3))
    for x, y, said in (
        (rows(3, dtype=torch.float64), rows(3), "x is torch.float64 of .* as torch.float32"),
        (rows(3, 7), rows(3, 7), r"of shape \(3, 7\) .* captured as .* of shape \(any, 6\)"),
        (rows(3)[None], rows(3), r"x is torch.float32 of shape \(1, 3, 6\)"),
        (rows(3, device="meta"), rows(3), "on meta, but was captured as .* on cpu: pass it so"),
        (rows(3), rows(2), "is {'x along dimension 0': 3, 'y along dimension 0': 2}: dim says"),
        (rows(0), rows(0), "must be one number above 0, but is {'x along dimension 0': 0"),
    ):
        with pytest.raises(ValueError, match=said):
            run(x, y)
    assert run(rows(2), rows(2)).shape == (2, 6)


def test_arguments_that_are_no_constants_are_named() -> None:
    class Batch:
        scale = torch.ones(1)

    run = runner(lambda x, *more: x)
    with pytest.raises(TypeError, match=r"more\[0\] holds a Batch; a GraphRunner takes"):
        run(rows(2), Batch())
    with pytest.raises(TypeError, match=r"more\[1\]\['b'\] holds a bytearray; a Gra"):
        run(rows(2), 1, {"b": bytearray(b"1")})
    run = runner(lambda x, s: x / s, sizes=[2])
    x = rows(2)
    for s in (0.0, -0.0, float("nan"), float("nan")):
        assert torch.equal(run(x, s).nan_to_num(), (x / s).nan_to_num())
    assert len(run.report()) == 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_are_not_plain_are_named() -> None:
    class Tagged(torch.Tensor):  # type: ignore[misc]
        pass

    parts = [rows(2), rows(3)]
    run = runner(lambda x, y: x * 2)
    run(rows(2), rows(2))
    for y, said in (
        (rows(2).to_sparse(), "Tensor of layout torch.sparse_coo"),
        (torch.nested.nested_tensor(parts, layout=torch.jagged), "nested NestedTensor"),
        (torch.nested.nested_tensor(parts), "nested Tensor"),
        (rows(2).as_subclass(Tagged), "Tagged"),
    ):
        with pytest.raises(TypeError, match=f"y holds a {said} .*; a GraphRunner takes and ret"):
            run(rows(2), y)
    assert tree_equal(run(x := nn.Parameter(rows(2)), x), x * 2)


def test_the_order_of_keywords_that_a_function_sees() -> None:
    run = runner(lambda **tensors: torch.cat(list(tensors.values()), 1))
    a, b = rows(3, 1), rows(3, 1)
    assert tree_equal(run(b=b, a=a), torch.cat([b, a], 1))
    assert tree_equal(run(a=a, b=b), torch.cat([a, b], 1))


def test_a_call_without_tensors() -> None:
    with pytest.raises(ValueError, match="is that of no argument: dim says"):
        runner(double)(5)


def test_padding_that_an_argument_cannot_hold() -> None:
    for pad, dtype in (
        (0.5, torch.int64),
        (-1, torch.uint8),
        (2, torch.bool),
        (math.inf, torch.int8),
    ):
        with pytest.raises(ValueError, match=f"pad is {pad} for y, which torch.* cannot hold"):
            runner(lambda x, y: x, pad=pad)(rows(3), torch.ones(3, dtype=dtype))
    runner(lambda x, y: x * y, pad=0.5, dim={"x": 0})(rows(3), torch.tensor(2))  # has no padding


def test_names_of_what_a_function_takes_more_of() -> None:
    def add(x: Tensor, *more: Tensor, **named: Tensor) -> Tensor:
        return more[0].sum() + 0 * x

    x = torch.ones(3)
    assert runner(add, pad={"more": 7})(x, x)[0] == 3 + 7
    assert runner(add, pad={"more": 5, "more[0]": 7})(x, x)[0] == 3 + 7, "the finer name counts"
    run = runner(add, dim={"x": 0, "more": 0})
    for n in (3, 2):
        assert run(torch.ones(n), torch.ones(n))[0] == n
    with pytest.raises(ValueError, match=r"pad names \[1, 'named'\]"):
        runner(add, pad={"named": 7, 1: 7})(x, x)
    linear = nn.Linear(6, 2)
    for net in (functools.partial(linear), torch.no_grad()(linear)):
        assert runner(net, dim={"input": 0})(rows(3)).shape == (3, 2)


class Scaled:
    def __init__(self, x: Tensor, scale: Any) -> None:
        self.x, self.scale = x, scale


pytree.register_pytree_node(
    Scaled, lambda node: ([node.x], node.scale), lambda held, scale: Scaled(next(iter(held)), scale)
)


def test_what_nodes_know_beside_their_tensors() -> None:
    """Of nodes that do not name what they hold, too."""
    run = runner(lambda node: node.x * (100 if node.scale is True else node.scale))
    for scale, result in ((1, 1), (True, 100), (1.0, 1), (2, 2)):
        assert run(Scaled(torch.ones(3, 2), scale))[0, 0] == result
    with pytest.raises(TypeError, match="an argument holds a Linear; a GraphRunner takes"):
        run(Scaled(torch.ones(3, 2), [nn.Linear(1, 1)]))
