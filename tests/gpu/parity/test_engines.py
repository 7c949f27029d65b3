"""The captures of inference engines, small, in the order in which their sources make them.

They cannot be installed beside the torch that is tested. Read were, of sgl-project/sglang, under
python/sglang/srt/: model_executor/cuda_graph_runner.py at 0021673, runner_utils/pool.py at 04218e4;
and of NVIDIA/TensorRT-LLM tensorrt_llm/_torch/compilation/piecewise_optimizer.py at 05fff03, whose
pieces are as vLLM's.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from ..work import PAGE, adapter, torch
from .captures import Expect, memory_snapshot_of
from .conftest import Side

if TYPE_CHECKING:
    from torch import Tensor

SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512]
VOCABULARY = 4096


class Decoder(torch.nn.Module):  # type: ignore[misc]
    """Embedding, gated layers, logits."""

    def __init__(self, seed: int, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        linear = torch.nn.Linear
        self.embedding = torch.nn.Embedding(VOCABULARY, 256)
        self.up = torch.nn.ModuleList(linear(256, 2048) for _ in range(layers))
        self.down = torch.nn.ModuleList(linear(1024, 256) for _ in range(layers))
        self.head = linear(256, VOCABULARY)
        self.to("cuda").requires_grad_(False)

    def layer(self, index: int, hidden: Tensor) -> Tensor:
        gate, value = self.up[index](hidden).chunk(2, dim=-1)
        return hidden + self.down[index](torch.nn.functional.silu(gate) * value)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for index in range(len(self.up)):
            hidden = self.layer(index, hidden)
        return self.head(hidden)


def tokens(count: int, chance: random.Random) -> Tensor:
    return torch.tensor([chance.randrange(VOCABULARY) for _ in range(count)], device="cuda")


def weak(tensor: Tensor) -> Tensor:
    """The same memory, which it does not keep."""
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.data_ptr(), tensor.device, tensor.numel() * tensor.element_size()
    )
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, 0, tensor.shape, tensor.stride())


@contextlib.contextmanager
def least(side: Side) -> Iterator[None]:
    """The pool that the block makes reserves no more than what is live in it at once needs."""
    before = set(adapter.pool_ids(torch.cuda.current_device()))
    yield
    made = set(adapter.pool_ids(torch.cuda.current_device())) - before
    assert len(made) == (side == "ours")
    for pool in made:
        stats = adapter.stats(torch.cuda.current_device(), pool)
        minimum = -(-stats["peak_allocated_bytes"] // PAGE) * PAGE
        assert stats["peak_reserved_bytes"] <= minimum * 1.01 + PAGE, stats


class Shared:
    """What SGLang keeps for all runners of a process: the pool, and a stream to capture on."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.stream = torch.cuda.Stream()


class Runner:
    """SGLang's: a graph for each size, largest first, after two warm-ups each."""

    def __init__(self, model: Decoder, shared: Shared) -> None:
        self._model, self._shared = model, shared
        self._tokens = torch.zeros(SIZES[-1], dtype=torch.int64, device="cuda")
        self.captured: dict[int, tuple[Any, Tensor]] = {}
        stream = shared.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for size in reversed(SIZES):
                for _ in range(2):
                    torch.cuda.synchronize()
                    model(self._tokens[:size])
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=shared.pool, stream=stream):
                    output = model(self._tokens[:size])
                shared.pool = graph.pool()
                self.captured[size] = graph, output
        torch.cuda.current_stream().wait_stream(stream)

    def check(self, chance: random.Random) -> None:
        """Of some calls the first rows are those of eager work that is padded alike."""
        for _ in range(12):
            requests = chance.randint(1, chance.choice(SIZES))
            size = min(s for s in SIZES if s >= requests)
            self._tokens[:requests].copy_(tokens(requests, chance))
            torch.cuda.synchronize()
            with torch.cuda.stream(self._shared.stream):
                expected = self._model(self._tokens[:size])
            torch.cuda.synchronize()
            graph, output = self.captured[size]
            graph.replay()
            assert torch.equal(output[:requests], expected[:requests])


def test_sglangs_runners_share_a_pool_whose_free_runs_are_lent(side: Side) -> None:
    """Target and draft have graphs of their own. Each capture goes into the pool of the one before.

    SGLANG_ENABLE_GRAPH_POOL_BORROW: between replays eager work gets the addresses that
    memory_snapshot calls inactive. Behind none of them lies a byte of what is alive, nor one that
    another run has.
    """
    shared, chance = Shared(), random.Random(0)
    models = Decoder(0), Decoder(1, layers=1)
    with Expect(side, 2 * len(SIZES)), least(side):
        runners = [Runner(model, shared) for model in models]
    for runner in runners[::-1] * 3:
        runner.check(chance)

    captured = [one for runner in runners for one in runner.captured.values()]
    for graph, _ in captured:  # as captured: what lives may lie where others have scratch
        graph.replay()
    alive = [output for _, output in captured]
    kept = [tensor.clone() for tensor in alive]
    runs: list[Tensor] = []
    for segment in memory_snapshot_of(shared.pool, include_traces=False):
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                storage = torch._C._construct_storage_from_data_pointer(
                    address, torch.device("cuda", 0), block["size"]
                )
                run = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
                runs.append(run.fill_(len(runs) % 251))
            address += block["size"]
    assert runs
    for number, run in enumerate(runs):
        assert int(run.min()) == int(run.max()) == number % 251
    for found, right in zip(alive, kept, strict=True):
        assert torch.equal(found, right)
    runners[0].check(chance)


class Piece:
    """What runs between two attentions: a graph for each size, captured at the fourth run with it
    and replayed at once; its output is a weak reference.
    """

    def __init__(self, work: Callable[[Tensor], Tensor], pool: Any) -> None:
        self._work, self._pool = work, pool
        self._calls: dict[int, int] = {}
        self._graphs: dict[int, tuple[Any, Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows in self._graphs:
            graph, output = self._graphs[rows]
            graph.replay()
            return output
        self._calls[rows] = self._calls.get(rows, 0) + 1
        if self._calls[rows] <= 3:
            return self._work(x)
        graph = torch.cuda.CUDAGraph()
        with patch("gc.collect", lambda: None), torch.cuda.graph(graph, pool=self._pool):
            output = self._work(x)
        self._graphs[rows] = graph, weak(output)
        graph.replay()
        return output  # strong: what is captured next must not take its memory


def test_pieces_between_attentions(side: Side) -> None:
    """TensorRT-LLM's: gc.collect is patched out in the captures, and called after each size."""
    model, pool = Decoder(0), torch.cuda.graph_pool_handle()
    works: list[Callable[[Tensor], Tensor]] = [
        lambda x: model.layer(0, model.embedding(x)),
        lambda x: model.layer(1, x),
        lambda x: model.head(model.layer(2, x)),
    ]
    pieces = [Piece(work, pool) for work in works]

    def run(parts: Sequence[Callable[[Tensor], Tensor]], given: Tensor) -> Tensor:
        static[: len(given)].copy_(given)
        x = parts[0](static[: len(given)])
        x = parts[1](x.cumsum_(dim=0))
        return parts[2](x.cumsum_(dim=0))

    static = torch.zeros(SIZES[-1], dtype=torch.int64, device="cuda")
    chance = random.Random(0)
    with Expect(side, 3 * len(SIZES)), least(side):
        for size in reversed(SIZES):
            for _ in range(4):
                given = tokens(size, chance)
                assert torch.equal(run(pieces, given), run(works, given))
            gc.collect()
            torch.cuda.empty_cache()
    for _ in range(30):
        given = tokens(chance.choice(SIZES), chance)
        expected = run(works, given)
        assert torch.equal(run(pieces, given), expected)
