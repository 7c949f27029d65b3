"""GraphRunner on a GPU: equal to eager bit for bit, in the memory of its largest size."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest

import cudagraph_pool as cgp

from .work import PAGE, adapter, chain, fresh, torch

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.usefixtures("enabled")

SIZES = [1, 2, 4, 8, 16, 32, 64]


def runner(function: Any, sizes: Any = SIZES, **options: Any) -> cgp.GraphRunner:
    return cgp.GraphRunner(function, sizes=sizes, progress=False, **options)


def model(width: int = 512) -> Any:
    torch.manual_seed(0)
    nn = torch.nn
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64)).cuda()


def rows(n: int, **options: Any) -> Tensor:
    return torch.randn(n, 64, device="cuda", **options)


def padded(function: Any, x: Tensor, size: int) -> Tensor:
    """What eager computes for the size that is replayed: another one may use other kernels."""
    full = torch.zeros(size, *x.shape[1:], device=x.device, dtype=x.dtype)
    full[: len(x)] = x
    result: Tensor = function(full)[: len(x)]
    return result


@pytest.mark.parametrize("shared_exec", ["auto", True, False])
@pytest.mark.parametrize("order", ["largest_first", "smallest_first"])
def test_equal_to_eager_at_every_size(shared_exec: Any, order: Any) -> None:
    net = model()
    run = runner(net, shared_exec=shared_exec, order=order)
    with torch.no_grad():
        for n in [64, 1, 33, 7, 8, 63, 2, 5, 64, 17]:
            x = rows(n)
            size = next(s for s in SIZES if s >= n)
            assert torch.equal(run(x), padded(net, x, size))


def test_outputs_cost_what_the_largest_ones_do() -> None:
    """Logits of 16 MiB at the largest size, of 127 MiB at all sizes together."""
    logits = torch.nn.Linear(64, 65536, bias=False, device="cuda")
    sizes = [8 * n for n in range(1, 9)]
    alone, together = cgp.GraphPool(), cgp.GraphPool()
    with torch.no_grad():
        largest = runner(logits, sizes=[64], pool=alone)
        largest.capture(rows(64))
        run = runner(logits, sizes=sizes, pool=together, order="smallest_first")
        run.capture(rows(64))
    assert together.stats()["live_blocks"] == 0
    assert together.stats()["reserved_bytes"] <= alone.stats()["reserved_bytes"] + PAGE


def test_what_is_returned_outlives_the_runner() -> None:
    device = torch.cuda.current_device()
    run = runner(lambda x: x * 2, sizes=[4])
    x = rows(4)
    part = run(x)[1:]
    del run
    gc.collect()
    torch.cuda.empty_cache()
    assert adapter.pool_ids(device), "its memory is not given back"
    assert torch.equal(part, x[1:] * 2)
    del part
    gc.collect()
    torch.cuda.empty_cache()
    assert adapter.pool_ids(device) == []


def test_gradients_are_those_of_eager() -> None:
    net = model()
    run = runner(net, sizes=[8, 32])
    for n in (32, 8, 32, 5):
        x = rows(n, requires_grad=True)
        found = []
        for function in (run, net):
            x.grad = None
            net.zero_grad()
            function(x).square().mean().backward()
            found.append([x.grad.clone(), *(p.grad.clone() for p in net.parameters())])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, **({} if n == 5 else {"rtol": 0, "atol": 0}))


def test_a_runner_stays_below_its_limit() -> None:
    pool, limit = cgp.GraphPool(), 12 << 20
    run = runner(chain, [500, 1000, 3000], lazy=True, max_bytes=limit, pool=pool)
    for rows in (500, 1000, 3000, 1000, 500):
        x = fresh(rows, seed=rows)
        if rows == 3000:
            with pytest.raises(RuntimeError, match="max_bytes"):
                run(x)
        else:
            assert torch.equal(run(x), chain(x))
        assert pool.stats()["reserved_bytes"] <= limit


def test_calls_on_several_streams() -> None:
    run = runner(lambda x: (x @ x.T).softmax(1) @ x, clone_outputs=True)
    streams = [torch.cuda.Stream() for _ in range(3)]
    inputs = [rows(n) for n in (64, 3, 17, 60, 1, 33)] * 20
    torch.cuda.synchronize()
    with torch.no_grad():
        found = []
        for number, x in enumerate(inputs):
            with torch.cuda.stream(streams[number % 3]):
                found.append(run(x))
        torch.cuda.synchronize()
        for x, y in zip(inputs, found, strict=True):
            torch.testing.assert_close(y, (x @ x.T).softmax(1) @ x, rtol=1e-3, atol=1e-3)


def test_a_call_within_a_capture_is_refused() -> None:
    run, x = runner(lambda x: x * 2, sizes=[8]), rows(8)
    run(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        x.clone()
        with pytest.raises(RuntimeError, match="called while a capture is under way"):
            run(x)
        graph.capture_end()
    assert torch.equal(run(x), x * 2)


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiled_module() -> None:
    from torch._dynamo.utils import counters

    torch.compiler.reset()  # of what other tests have compiled only so much more is compiled
    net = model()
    run = runner(torch.compile(net, dynamic=False), sizes=[4, 16])
    before = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        for n in (3, 16, 4):
            x = rows(n)
            torch.testing.assert_close(run(x), net(x), rtol=1e-4, atol=1e-4)
    # For both sizes and the one that shows what follows the size: in warm-ups, not in captures.
    assert counters["stats"]["unique_graphs"] == before + 3


def test_weights_that_move() -> None:
    net = model()
    run = runner(net, sizes=[8])
    x = rows(8)
    with torch.no_grad():
        for move in (
            lambda: None,
            lambda: setattr(net[0].weight, "data", torch.randn_like(net[0].weight)),
            lambda: setattr(net[2], "bias", torch.nn.Parameter(rows(1)[0])),
            lambda: net.cpu() and net.cuda(),
            lambda: net.load_state_dict(model().state_dict(), assign=True),
        ):
            move()
            assert torch.equal(run(x), net(x))
        net[0], net[2] = model()[0], model()[2]
        run.reset()
        assert torch.equal(run(x), net(x))


def test_weights_that_are_sent_away_free_their_memory() -> None:
    net = torch.nn.Linear(4096, 4096, bias=False, device="cuda")
    run = runner(net, sizes=[8])
    with torch.no_grad():
        run(torch.zeros(8, 4096, device="cuda"))
    before = torch.cuda.memory_allocated()
    net.cpu()
    assert before - torch.cuda.memory_allocated() >= 64 << 20
