"""torch.compile with CUDA graph trees: modes reduce-overhead and max-autotune.

The assertions of the trees themselves are on: the slow ones hold the allocator's live blocks
against the tensors that the tree knows, at every warm-up, recording and restored checkpoint; the
fast ones read a memory snapshot at every run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from ..work import adapter, torch
from .conftest import Side

if TYPE_CHECKING:
    from torch import Tensor

# What inductor and triton warn of is their own affair.
pytestmark = pytest.mark.filterwarnings("ignore")

MODES = ["reduce-overhead", "max-autotune"]


@pytest.fixture(autouse=True)
def compiler(side: Side) -> Iterator[None]:
    """The trees' assertions are on, compiling is quick, and nothing compiled is left behind."""
    import torch._inductor.config as config

    reset_compiler()
    with config.patch(
        {
            "compile_threads": 1,  # a pool of compiling processes takes longer to start than this
            "triton.slow_path_cudagraph_asserts": True,
            "triton.fast_path_cudagraph_asserts": True,
            "max_autotune_gemm_backends": "ATEN,TRITON",
            "test_configs.max_mm_configs": 1,
        }
    ):
        yield
    reset_compiler()


def reset_compiler() -> None:
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    torch._dynamo.reset()
    reset_cudagraph_trees()
    gc.collect()


def manager() -> Any:
    from torch._inductor.cudagraph_trees import get_manager

    found = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    assert found is not None, "nothing was run as a graph"
    return found


def nodes() -> list[Any]:
    """Every recorded graph."""
    found: list[Any] = []
    left = list(manager().get_roots())
    while left:
        node = left.pop()
        found.append(node)
        left.extend(child for children in node.children.values() for child in children)
    return found


def assert_whose(side: Side) -> None:
    """The tree's pool is ours exactly if the package is enabled."""
    pool = tuple(manager().cuda_graphs_thread_pool)
    ours = [tuple(own) for own in adapter.pool_ids(torch.cuda.current_device())]
    assert (pool in ours) == (side == "ours")


def assert_close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator).cuda()


def mlp() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 128),
        torch.nn.GELU(),
        torch.nn.LayerNorm(128),
        torch.nn.Linear(128, 64),
    ).cuda()


def graphed(
    function: Callable[..., Any], mode: str = "reduce-overhead", dynamic: bool = False
) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, mode=mode, dynamic=dynamic)
    return compiled


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_inference_of_dynamic_shapes(side: Side, mode: str) -> None:
    """One compilation, one graph for each size, all in one pool."""
    model = mlp()
    compiled = graphed(model, mode, dynamic=True)
    sizes = [24, 7, 96, 40]
    for turn in range(4):
        for rows in sizes:
            x = numbers(rows, 64, seed=turn)
            assert_close(compiled(x), model(x))
    assert len(nodes()) == len(sizes)
    assert_whose(side)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [(48,), (48, 16, 80)], ids=["static", "dynamic"])
def test_training(side: Side, mode: str, rows: Sequence[int]) -> None:
    """Losses, gradients and weights go the way that eager training takes."""
    expected, model = mlp(), mlp()
    compiled = graphed(model, mode, dynamic=len(rows) > 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (expected, model)]
    for step in range(4 * len(rows)):
        x = numbers(rows[step % len(rows)], 64, seed=step)
        losses = []
        for run, optimizer in zip((expected, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            loss = run(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-3)
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert_close(ours.grad, theirs.grad)
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(ours, theirs)
    # A forward graph and, as its child, a backward graph for each size.
    forwards = list(manager().get_roots())
    assert len(forwards) >= len(rows)
    assert len(nodes()) >= 2 * len(rows)
    assert_whose(side)


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_branches(side: Side, mode: str) -> None:
    """One graph, after it sometimes this one and sometimes that one: the checkpoint at its end is
    restored to record, and first to warm up, the second.
    """

    def body(x: Tensor, left: bool) -> tuple[Tensor, Tensor]:
        first = x.sin() + 1
        torch._dynamo.graph_break()
        second = (first * 2 + first.cos()) if left else (first - 3).exp().softmax(0)
        torch._dynamo.graph_break()
        return first * 4, second

    compiled = graphed(body, mode)
    for step in range(12):
        x = numbers(300, 200, seed=step)
        for got, expected in zip(compiled(x, step % 2 == 0), body(x, step % 2 == 0), strict=True):
            assert_close(got, expected)
    assert any(len([c for c in node.children.values() if c]) > 1 for node in nodes())
    assert manager().debug_checkpointing_counter > 0
    assert_whose(side)


@torch.no_grad()
def test_an_output_that_is_overwritten_says_so(side: Side) -> None:
    """The tree takes the block away from a living tensor: raw_deleter must be what torch knows."""
    compiled = graphed(lambda x: x + 1)
    x = numbers(16, 16)
    torch.compiler.cudagraph_mark_step_begin()
    old = compiled(x)
    for _ in range(2):  # the output of the warm-up, then that of the recording
        view = old[2:]
        torch.compiler.cudagraph_mark_step_begin()
        new = compiled(x)
        for tensor in (old, view):
            with pytest.raises(RuntimeError, match="overwritten by a subsequent run"):
                tensor + 1
        assert_close(new, x + 1)
        old = new
    assert_whose(side)


@torch.no_grad()
def test_dead_outputs_give_their_memory_and_living_ones_keep_it(side: Side) -> None:
    """The second graph may use what a dead output of the first left, but needs another recording
    where that output lives.
    """
    split = graphed(lambda x: (x * 2, x + 5))
    follow = graphed(lambda a: a.flip(0) - 1)
    for step in range(12):
        keep = step % 4 == 3
        torch.compiler.cudagraph_mark_step_begin()
        x = numbers(512, 256, seed=step)
        a, b = split(x)
        if not keep:
            del b
        c = follow(a)
        assert_close(c, (x * 2).flip(0) - 1)
        assert_close(a, x * 2)
        if keep:
            assert_close(b, x + 5)
            del b
        del a, c
    (root,) = manager().get_roots()
    assert sum(len(children) for children in root.children.values()) == 2
    assert manager().debug_checkpointing_counter > 0
    assert_whose(side)
