"""torch.cuda.make_graphed_callables, and one pool for all captures that name none."""

# A capture in which something fails is more than one statement.
# ruff: noqa: PT012

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import cudagraph_pool as cgp

from ..work import PAGE, WIDTH, adapter, capture_chain, chain, fresh, torch
from .captures import Expect
from .conftest import Side

Step = Callable[[torch.Tensor], torch.Tensor]

pytestmark = [
    # Of graph captures beside autograd, and of torch.compile: torch's own, and not of the pools.
    pytest.mark.filterwarnings("default"),
]


def ids() -> list[tuple[int, int]]:
    return adapter.pool_ids(torch.cuda.current_device())


def reserved(id: tuple[int, int]) -> int:
    shown = torch.cuda.memory_snapshot(include_traces=False)
    return sum(s["total_size"] for s in shown if tuple(s["segment_pool_id"]) == tuple(id))


def perceptron(seed: int, hidden: int = 512) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, WIDTH)
    ).cuda()


def trained(step: Step, parameters: Sequence[torch.nn.Parameter], x: torch.Tensor) -> list[Any]:
    """The output of one forward and backward pass, and all gradients, the input's among them."""
    x = x.clone().requires_grad_()
    for parameter in parameters:
        parameter.grad = None
    y = step(x)
    y.float().square().sum().backward()
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    assert len(gradients) == len(parameters)
    assert x.grad is not None
    return [y.detach().clone(), x.grad.clone(), *gradients]


def assert_trains_alike(
    graphed: Step,
    graphed_parameters: Sequence[torch.nn.Parameter],
    eager: Step,
    eager_parameters: Sequence[torch.nn.Parameter],
    rows: int,
    steps: int = 4,
) -> None:
    for seed in range(steps):
        x = fresh(rows, seed=100 + seed)
        expected = trained(eager, eager_parameters, x)
        found = trained(graphed, graphed_parameters, x)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def sample(rows: int) -> tuple[torch.Tensor]:
    return (fresh(rows, seed=7).requires_grad_(),)


def test_a_module(side: Side) -> None:
    model = perceptron(0)
    eager = copy.deepcopy(model)
    with Expect(side, 2):
        graphed = torch.cuda.make_graphed_callables(model, sample(64))
    if side == "ours":
        assert len(ids()) == 1  # forward and backward share one
    assert_trains_alike(graphed, list(model.parameters()), eager, list(eager.parameters()), 64)


def test_a_module_in_evaluation_runs_eagerly(side: Side) -> None:
    model = perceptron(0)
    eager = copy.deepcopy(model)
    with Expect(side, 2):
        graphed = torch.cuda.make_graphed_callables(model, sample(64))
    graphed.eval()
    with torch.no_grad():
        x = fresh(33, seed=1)  # another size than what was captured
        torch.testing.assert_close(graphed(x), eager(x))
    graphed.train()
    assert_trains_alike(graphed, list(model.parameters()), eager, list(eager.parameters()), 64)


def test_a_function_without_gradients(side: Side) -> None:
    with Expect(side, 1):  # no backward pass, no graph of it
        graphed = torch.cuda.make_graphed_callables(chain, (fresh(300, seed=0),))
    for seed in range(4):
        x = fresh(300, seed=seed)
        assert torch.equal(graphed(x), chain(x))


def test_several_at_once(side: Side) -> None:
    """All forward passes are captured, then all backward passes, in one pool."""
    models = [perceptron(seed, hidden) for seed, hidden in enumerate((128, 1024, 512))]
    eagers = copy.deepcopy(models)
    samples = (sample(64), sample(64), sample(64))
    with Expect(side, 6):
        graphed = torch.cuda.make_graphed_callables(tuple(models), samples)
    if side == "ours":
        assert len(ids()) == 1

    def through(parts: Sequence[Step]) -> Step:
        def run(x: torch.Tensor) -> torch.Tensor:
            for part in parts:
                x = part(x).relu()
            return x

        return run

    parameters, eager_parameters = (
        [p for model in each for p in model.parameters()] for each in (models, eagers)
    )
    assert_trains_alike(through(graphed), parameters, through(eagers), eager_parameters, 64)


def test_many_sizes_in_one_shared_pool(side: Side) -> None:
    """One model for several batch sizes, smallest first, one after the other at run time."""
    sizes = [8, 100, 512, 2048]
    eager = perceptron(0)
    models = {rows: copy.deepcopy(eager) for rows in sizes}
    handle = tuple(torch.cuda.graph_pool_handle())
    with Expect(side, 2 * len(sizes)):
        graphed = {
            rows: torch.cuda.make_graphed_callables(model, sample(rows), pool=handle)
            for rows, model in models.items()
        }
    if side == "ours":
        assert ids() == [handle]
        stats = adapter.stats(torch.cuda.current_device(), handle)
        assert stats["reserved_bytes"] <= stats["peak_allocated_bytes"] * 1.03 + 2 * PAGE
        assert reserved(handle) == stats["reserved_bytes"]
    for rows in (512, 8, 2048, 100, 8):
        assert_trains_alike(
            graphed[rows],
            list(models[rows].parameters()),
            eager,
            list(eager.parameters()),
            rows,
            steps=2,
        )


def test_beside_plain_captures_in_one_pool(side: Side) -> None:
    model = perceptron(0)
    eager = copy.deepcopy(model)
    handle = tuple(torch.cuda.graph_pool_handle())
    with Expect(side, 4):
        before = capture_chain(700, handle)
        graphed = torch.cuda.make_graphed_callables(model, sample(64), pool=handle)
        after = capture_chain(900, handle)
    if side == "ours":
        assert ids() == [handle]
    for seed in range(3):
        for captured, rows in ((after, 900), (before, 700)):
            x = fresh(rows, seed=seed)
            assert torch.equal(captured.replay(x), chain(x))
        assert_trains_alike(
            graphed, list(model.parameters()), eager, list(eager.parameters()), 64, steps=1
        )


def test_in_a_graph_pool(side: Side) -> None:
    model = perceptron(0)
    eager = copy.deepcopy(model)
    pool: Any = torch.cuda.MemPool() if side == "native" else cgp.GraphPool()
    with Expect(side, 2):
        graphed = torch.cuda.make_graphed_callables(model, sample(64), pool=pool.id)
    assert reserved(pool.id) > 0
    assert_trains_alike(graphed, list(model.parameters()), eager, list(eager.parameters()), 64)


def test_unused_and_frozen_inputs(side: Side) -> None:
    class Picky(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.used = torch.nn.Linear(WIDTH, WIDTH)
            self.unused = torch.nn.Linear(WIDTH, WIDTH)
            self.frozen = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.frozen(self.used(x).relu())

    torch.manual_seed(0)
    model = Picky().cuda()
    eager = copy.deepcopy(model)
    with Expect(side, 2):
        graphed = torch.cuda.make_graphed_callables(model, sample(64), allow_unused_input=True)
    assert_trains_alike(
        graphed, list(model.used.parameters()), eager, list(eager.used.parameters()), 64
    )
    assert all(p.grad is None for p in model.unused.parameters())
    assert all(p.grad is None for p in model.frozen.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision(side: Side, dtype: torch.dtype) -> None:
    model = perceptron(0)
    eager = copy.deepcopy(model)
    x = sample(64)
    with torch.autocast("cuda", dtype=dtype, cache_enabled=False):
        with Expect(side, 2):
            graphed = torch.cuda.make_graphed_callables(model, x)
        for seed in range(4):
            inputs = fresh(64, seed=seed)
            expected = trained(eager, list(eager.parameters()), inputs)
            found = trained(graphed, list(model.parameters()), inputs)
            assert found[0].dtype == dtype
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-2)


def test_mixed_precision_with_the_cache_is_refused(side: Side) -> None:
    model = perceptron(0)
    before = ids()
    with (
        torch.autocast("cuda", dtype=torch.bfloat16),
        pytest.raises(RuntimeError, match="cache_enabled=False"),
    ):
        torch.cuda.make_graphed_callables(model, sample(64))
    assert ids() == before
    captured = capture_chain(300, None)
    x = fresh(300, seed=1)
    assert torch.equal(captured.replay(x), chain(x))


def test_activation_checkpointing(side: Side) -> None:
    """The backward pass runs the forward pass again, in autograd's thread, inside the capture."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList([perceptron(seed, 1024) for seed in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                # No random numbers here; their state cannot be read during a capture.
                x = checkpoint(part, x, use_reentrant=False, preserve_rng_state=False)
            return x

    model = Checkpointed()
    eager = copy.deepcopy(model)
    with Expect(side, 2):
        graphed = torch.cuda.make_graphed_callables(model, sample(128))
    assert_trains_alike(graphed, list(model.parameters()), eager, list(eager.parameters()), 128)


@pytest.fixture
def compiling() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    gc.collect()


@pytest.mark.usefixtures("compiling")
def test_a_compiled_module(side: Side) -> None:
    """In the default mode, where inductor makes no graphs of its own."""

    class Outer(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = perceptron(0)
            self.compiled = torch.compile(self.inner)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.compiled(x)
            return y

    model = Outer()
    eager = copy.deepcopy(model.inner)
    with Expect(side, 2):
        graphed = torch.cuda.make_graphed_callables(model, sample(64))
    parameters = list(model.inner.parameters())
    assert_trains_alike(graphed, parameters, eager, list(eager.parameters()), 64)


@pytest.mark.usefixtures("compiling")
def test_a_compiled_function(side: Side) -> None:
    compiled = torch.compile(chain)
    with Expect(side, 1):
        graphed = torch.cuda.make_graphed_callables(compiled, (fresh(300, seed=0),))
    for seed in range(4):
        x = fresh(300, seed=seed)
        torch.testing.assert_close(graphed(x), chain(x))


def test_training_until_it_has_learned(side: Side) -> None:
    """Parameters are updated in place between replays, as an optimizer does."""
    model = perceptron(3)
    eager = copy.deepcopy(model)
    with Expect(side, 2):
        graphed = torch.cuda.make_graphed_callables(model, sample(64))
    losses: dict[int, list[float]] = {}
    for index, (step, module) in enumerate(((graphed, model), (eager, eager))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        losses[index] = []
        for seed in range(20):
            x = fresh(64, seed=seed).requires_grad_()
            optimizer.zero_grad()
            loss = (step(x) - x.detach()).square().mean()
            loss.backward()
            optimizer.step()
            losses[index].append(loss.item())
    assert losses[0][-1] < losses[0][0] / 2
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-2, atol=1e-4)


@pytest.mark.whole_gpu
def test_graphed_callables_leave_nothing(side: Side) -> None:
    device = torch.cuda.current_device()

    def once() -> None:
        model = perceptron(0)
        with Expect(side, 2):
            graphed = torch.cuda.make_graphed_callables(model, sample(64))
        trained(graphed, list(model.parameters()), fresh(64, seed=1))

    def clean() -> tuple[int, int, list[tuple[int, int]]]:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), ids()

    once()
    before = clean()
    free = torch.cuda.mem_get_info(device)[0]
    for _ in range(20):
        once()
    assert clean() == before
    assert before[2] == []
    assert free - torch.cuda.mem_get_info(device)[0] < 64 << 20


# cgp.enable(share_captures=True): what names no pool shares one.


@pytest.fixture
def shared(side: Side) -> Iterator[None]:
    if side == "ours":
        cgp.disable()
        cgp.enable(share_captures=True)
    yield
    cgp.disable()  # which lets go of the shared pool


@pytest.mark.usefixtures("shared")
def test_captures_that_name_no_pool_share_one(side: Side) -> None:
    """On native each has its own, and each costs what it needs."""
    sizes = [64, 700, 2048, 4096]
    chain(fresh(8, seed=0))
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    with Expect(side, len(sizes)):
        captured = {rows: capture_chain(rows, None) for rows in sizes}
    if side == "ours":
        assert len(ids()) == 1
        stats = adapter.stats(torch.cuda.current_device(), ids()[0])
        assert stats["live_blocks"] == 0
        assert stats["reserved_bytes"] <= stats["peak_allocated_bytes"] * 1.03 + 2 * PAGE
    else:
        assert ids() == []
        assert torch.cuda.memory_reserved() > before
    for seed, rows in enumerate((4096, 64, 2048, 700, 64, 4096)):
        x = fresh(rows, seed=seed)
        assert torch.equal(captured[rows].replay(x), chain(x))
    # The pool stays as long as one of them does.
    survivor = captured[700]
    captured.clear()
    gc.collect()
    torch.cuda.empty_cache()
    x = fresh(700, seed=50)
    assert torch.equal(survivor.replay(x), chain(x))
    again = capture_chain(1000, None)
    if side == "ours":
        assert len(ids()) == 1
    x = fresh(1000, seed=51)
    assert torch.equal(again.replay(x), chain(x))


@pytest.mark.usefixtures("shared")
def test_outputs_in_the_shared_pool_are_kept(side: Side) -> None:
    """What a capture leaves alive no later one may take."""
    x = fresh(512, seed=0)
    chain(x)
    graphs, outputs = [], []
    for factor in range(1, 6):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outputs.append(chain(x * factor))
    if side == "ours":
        assert len(ids()) == 1
    for seed in range(3):
        x.copy_(fresh(512, seed=seed))
        for graph in graphs:
            graph.replay()
        for factor, output in enumerate(outputs, 1):
            assert torch.equal(output, chain(x * factor))


@pytest.mark.usefixtures("shared")
def test_a_named_pool_is_not_shared(side: Side) -> None:
    handle = torch.cuda.graph_pool_handle()
    named = capture_chain(512, handle)
    unnamed = [capture_chain(rows, None) for rows in (700, 300)]
    if side == "ours":
        assert len(ids()) == 2
        assert tuple(handle) in ids()
        pool = cgp.GraphPool()
        in_pool = capture_chain(400, pool.id)
        assert len(ids()) == 3
        x = fresh(400, seed=1)
        assert torch.equal(in_pool.replay(x), chain(x))
    for captured, rows in ((named, 512), (unnamed[0], 700), (unnamed[1], 300)):
        x = fresh(rows, seed=rows)
        assert torch.equal(captured.replay(x), chain(x))


@pytest.mark.usefixtures("shared")
def test_a_graph_lends_the_shared_pool(side: Side) -> None:
    first = capture_chain(700, None)
    second = capture_chain(512, first.graph.pool())
    if side == "ours":
        assert len(ids()) == 1
    for captured, rows in ((first, 700), (second, 512)):
        x = fresh(rows, seed=rows)
        assert torch.equal(captured.replay(x), chain(x))


@pytest.mark.usefixtures("shared")
def test_a_failed_capture_in_the_shared_pool(side: Side) -> None:
    first = capture_chain(512, None)
    stream = torch.cuda.current_stream()
    with pytest.raises(KeyError, match="mine"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        chain(first.x)
        raise KeyError("mine")
    torch.cuda.set_stream(stream)
    second = capture_chain(700, None)
    if side == "ours":
        assert len(ids()) == 1
    for captured, rows in ((first, 512), (second, 700)):
        x = fresh(rows, seed=rows)
        assert torch.equal(captured.replay(x), chain(x))


def test_sharing_ends_with_disable(side: Side) -> None:
    if side == "native":
        assert not cgp.is_enabled()
        return
    cgp.disable()
    cgp.enable(share_captures=True)
    shared = [capture_chain(rows, None) for rows in (300, 512)]
    assert len(ids()) == 1
    cgp.disable()
    cgp.enable()
    own = [capture_chain(rows, None) for rows in (300, 512)]
    assert len(ids()) == 3
    for captured, rows in zip(shared + own, (300, 512) * 2, strict=True):
        x = fresh(rows, seed=rows)
        assert torch.equal(captured.replay(x), chain(x))


@pytest.mark.usefixtures("shared")
def test_graphed_callables_beside_shared_captures(side: Side) -> None:
    """make_graphed_callables names a pool, a new one, where its caller names none."""
    model = perceptron(0)
    eager = copy.deepcopy(model)
    plain = capture_chain(700, None)
    with Expect(side, 2):
        graphed = torch.cuda.make_graphed_callables(model, sample(64))
    for seed in range(2):
        assert_trains_alike(
            graphed, list(model.parameters()), eager, list(eager.parameters()), 64, steps=1
        )
        x = fresh(700, seed=seed)
        assert torch.equal(plain.replay(x), chain(x))
