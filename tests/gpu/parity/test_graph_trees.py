"""torch.compile with CUDA graph trees: modes reduce-overhead and max-autotune.

The assertions of the trees themselves are on: the slow ones hold the allocator's live blocks
against the tensors that the tree knows, at every warm-up, recording and restored checkpoint; the
fast ones read a memory snapshot at every run.
"""

from __future__ import annotations

import copy
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
def test_inference_of_one_shape(side: Side, mode: str) -> None:
    model = mlp()
    compiled = graphed(model, mode)
    for step in range(6):
        x = numbers(32, 64, seed=step)
        assert_close(compiled(x), model(x))
    assert len(nodes()) == 1
    assert_whose(side)


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


def test_training_with_accumulated_gradients(side: Side) -> None:
    """Two forwards before their backwards: activations of both live at once in the pool."""
    expected, model = mlp(), mlp()
    compiled = graphed(model)
    for step in range(5):
        gradients = []
        for run, parameters in ((expected, expected.parameters()), (compiled, model.parameters())):
            torch.compiler.cudagraph_mark_step_begin()
            outputs = [run(numbers(16, 64, seed=10 * step + i)) for i in range(2)]
            loss = outputs[0].square().mean() + outputs[1].abs().mean()
            gradients.append(torch.autograd.grad(loss, list(parameters)))
            del outputs, loss
        for own, theirs in zip(gradients[1], gradients[0], strict=True):
            assert_close(own, theirs)
        del gradients, own, theirs
    assert any(node.parent is not None for node in nodes())
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
def test_warm_up_while_outputs_of_a_replay_live(side: Side) -> None:
    """A function seen for the first time warms up in the pool, around what the replay left."""
    first = graphed(lambda x: (x * 2 + 1, x - 1))
    second = graphed(lambda y: (y.exp().sum(1), y * 3))
    x = numbers(256, 512)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        y, dead = first(x)
    del dead  # its memory, which the restored checkpoint holds, is given back one by one
    restored = manager().debug_checkpointing_counter
    total, tripled = second(y)  # warm-up
    assert manager().debug_checkpointing_counter == restored + 1
    assert manager().in_warmup
    assert_close(total, (x * 2 + 1).exp().sum(1))
    assert_close(tripled, (x * 2 + 1) * 3)
    assert_close(y, x * 2 + 1)
    for seed in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        x = numbers(256, 512, seed=seed)
        y, dead = first(x)
        total, tripled = second(y)
        assert_close(total, (x * 2 + 1).exp().sum(1))
        assert_close(tripled, (x * 2 + 1) * 3)
        assert_close(y, x * 2 + 1)
        assert_close(dead, x - 1)
    assert_whose(side)


@torch.no_grad()
def test_a_new_address_of_a_weight_is_recorded_again(side: Side) -> None:
    model = mlp()
    compiled = graphed(model)
    weights = [model[0].weight.data, *(model[0].weight.data * k for k in (2, 3))]
    for _ in range(2):
        for number, weight in enumerate(weights):
            model[0].weight.data = weight
            for seed in range(3):
                x = numbers(32, 64, seed=seed + number)
                assert_close(compiled(x), model(x))
    assert len(nodes()) == len(weights)  # and none anew where an address returns
    assert_whose(side)


@torch.no_grad()
def test_outputs_kept_within_a_step(side: Side) -> None:
    """A function that is called again while its outputs live gets a graph for each depth."""
    compiled = graphed(lambda x: (x.cumsum(0), x.sum()))
    for step in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        inputs = [numbers(128, 64, seed=10 * step + i) for i in range(4)]
        outputs = [compiled(x) for x in inputs]
        for x, (sums, total) in zip(inputs, outputs, strict=True):
            assert_close(sums, x.cumsum(0))
            assert_close(total, x.sum())
    assert len(nodes()) == 4
    assert len(list(manager().get_roots())) == 1
    assert_whose(side)


@torch.no_grad()
def test_a_loop_feeds_outputs_back(side: Side) -> None:
    """As decoding does: each call takes what the last one gave."""
    compiled = graphed(lambda x: x * 0.5 + x.roll(1, 0))
    for step in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        got = expected = numbers(64, 64, seed=step)
        for _ in range(5):
            got = compiled(got)
            expected = expected * 0.5 + expected.roll(1, 0)
        assert_close(got, expected)
    assert_whose(side)


@torch.no_grad()
def test_clones_outlive_their_iterations(side: Side) -> None:
    compiled = graphed(lambda x: x.sin() * 3)
    inputs = [numbers(100, 100, seed=step) for step in range(8)]
    kept = [compiled(x).clone() for x in inputs]
    for x, clone in zip(inputs, kept, strict=True):
        assert_close(clone, x.sin() * 3)
    assert len(nodes()) == 1
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


@torch.no_grad()
def test_inputs_that_are_changed_in_place(side: Side) -> None:
    """A buffer that the model writes to, as a key-value cache is."""

    class Cache(torch.nn.Module):  # type: ignore[misc]
        kept: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(32, 64))

        def forward(self, x: Tensor, row: Tensor) -> Tensor:
            self.kept.index_copy_(0, row, x)
            return self.kept.sum(0)

    model = Cache().cuda()
    expected = copy.deepcopy(model)
    compiled = graphed(model)
    for step in range(8):
        x, row = numbers(1, 64, seed=step), torch.tensor([3 * step % 32], device="cuda")
        assert_close(compiled(x, row), expected(x, row))
    assert_close(model.kept, expected.kept)
    assert len(nodes()) == 1
    assert_whose(side)


@torch.no_grad()
def test_random_numbers(side: Side) -> None:
    """The generator's state is an input of the graph: each replay draws anew."""
    compiled = graphed(lambda x: torch.nn.functional.dropout(x, 0.5))
    x = torch.ones(64, 64, device="cuda")
    drawn = [compiled(x).clone() for _ in range(5)]
    assert len(nodes()) == 1
    for mask in drawn:
        assert set(mask.unique().tolist()) == {0.0, 2.0}
    assert not any(torch.equal(drawn[i], drawn[i - 1]) for i in range(1, 5))
    assert_whose(side)


@torch.no_grad()
def test_big_temporaries_are_shared_along_the_path(side: Side) -> None:
    """Four graphs whose 64 MiB temporaries die in turn need one of them, not four."""
    functions = [
        graphed(lambda x, k=k: torch.sort(x.repeat(4096, 1) + k, dim=0)[0].sum(0)) for k in range(4)
    ]
    for step in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        x = y = numbers(4096, seed=step)
        for k, function in enumerate(functions):
            y = function(y)
            x = torch.sort(x.repeat(4096, 1) + k, dim=0)[0].sum(0)
        assert_close(y, x)
    del x, y
    pool = tuple(manager().cuda_graphs_thread_pool)
    reserved = sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == pool
    )
    # One graph needs a few of these: what it sorts, the sorted, the indices, and scratch memory.
    assert 64 << 20 <= reserved <= 16 * (64 << 20)
    assert_whose(side)


@torch.no_grad()
def test_all_memory_returns_with_the_compiled_model(side: Side) -> None:
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    compiled = graphed(lambda x: x.flip(0).cumsum(0) * 2)
    x = numbers(2048, 2048)
    for _ in range(4):
        compiled(x)
    assert_whose(side)
    assert torch.cuda.memory_reserved() - before >= 32 << 20
    del compiled, x
    reset_compiler()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before <= 4 << 20


@torch.no_grad()
def test_two_trees_after_each_other(side: Side) -> None:
    """The second tree has a pool of its own; ids and addresses of the first may be used again."""
    for number in range(3):
        compiled = graphed(lambda x, n=number: x.cos() + n)
        for seed in range(4):
            x = numbers(64, 64, seed=seed)
            assert_close(compiled(x), x.cos() + number)
        assert_whose(side)
        assert len(adapter.pool_ids(torch.cuda.current_device())) == (side == "ours")
        del compiled
        reset_compiler()
        torch.cuda.empty_cache()
        assert adapter.pool_ids(torch.cuda.current_device()) == []


@torch.no_grad()
def test_the_trees_record_history(side: Side) -> None:
    import torch._inductor.config as config

    with config.patch({"triton.cudagraph_trees_history_recording": True}):
        compiled = graphed(lambda x: x.tan() + 1)
        for seed in range(4):
            x = numbers(64, 64, seed=seed)
            assert_close(compiled(x), x.tan() + 1)
    assert not torch._C._cuda_isHistoryEnabled()
    assert_whose(side)


def test_a_graph_of_the_user_beside_the_tree(side: Side) -> None:
    """A capture of one's own while the tree lives: different pools, neither disturbs the other."""
    with torch.no_grad():
        compiled = graphed(lambda x: x * x + 3)
        static = numbers(128, 128)
        graph = torch.cuda.CUDAGraph()
        for seed in range(5):
            x = numbers(128, 128, seed=seed)
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(x)
            if seed == 2:
                with torch.cuda.graph(graph):
                    result = static.sin() + static
            assert_close(out, x * x + 3)
            if seed >= 2:
                static.copy_(x)
                graph.replay()
                assert_close(result, x.sin() + x)
                assert_close(out, x * x + 3)
    assert_whose(side)
