"""The captures of SGLang, in the order in which its sources make them.

Read were python/sglang/srt/model_executor/ of sgl-project/sglang at 0021673 (cuda_graph_runner.py),
and, after it was split, runner/decode_cuda_graph_runner.py at aba9610, runner_backend/ at d8e428b
and bc2dc87, runner_utils/pool.py at 04218e4.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from ..work import torch
from .captures import Expect, memory_snapshot_of
from .conftest import Side
from .engines import SIZES, Decoder, Piece, least, padded, tokens

if TYPE_CHECKING:
    from torch import Tensor

Output = tuple["Tensor", ...]
Forward = Callable[["Tensor", str | None], Output]


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()


class Shared:
    """What SGLang keeps for all runners of a process: the pool, and a stream to capture on."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.stream = torch.cuda.Stream()


class Runner:
    """A graph for each size and variant, largest first, after two warm-ups each."""

    def __init__(
        self,
        forward: Forward,
        shared: Shared,
        width: int = 1,
        variants: Sequence[str | None] = (None,),
    ) -> None:
        self._forward, self._shared, self._width, self._variants = forward, shared, width, variants
        self._tokens = torch.zeros(SIZES[-1] * width, dtype=torch.int64, device="cuda")
        self._graphs: dict[Any, Any] = {}
        self._outputs: dict[Any, Output] = {}
        self.capture()

    def capture(self) -> None:
        stream = self._shared.stream
        stream.wait_stream(torch.cuda.current_stream())
        with frozen(), torch.cuda.stream(stream):
            for size in reversed(SIZES):
                for variant in self._variants:
                    run = partial(self._forward, self._tokens[: size * self._width], variant)
                    for _ in range(2):
                        torch.cuda.synchronize()
                        run()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=self._shared.pool, stream=stream):
                        output = run()
                    self._shared.pool = graph.pool()
                    self._graphs[size, variant] = graph
                    self._outputs[size, variant] = output
        torch.cuda.current_stream().wait_stream(stream)

    def replay(self, tokens: Tensor, variant: str | None = None) -> Output:
        """The first rows of what the graph returns."""
        size = padded(len(tokens) // self._width)
        self._tokens[: len(tokens)].copy_(tokens)
        self._graphs[size, variant].replay()
        return tuple(out[: len(tokens)] for out in self._outputs[size, variant])

    def eager(self, tokens: Tensor, variant: str | None = None) -> Output:
        """The same without a graph, padded alike."""
        self._tokens[: len(tokens)].copy_(tokens)
        torch.cuda.synchronize()
        with torch.cuda.stream(self._shared.stream):
            size = padded(len(tokens) // self._width)
            outputs = self._forward(self._tokens[: size * self._width], variant)
        torch.cuda.synchronize()
        return tuple(out[: len(tokens)].clone() for out in outputs)

    def check(self, chance: random.Random) -> None:
        for _ in range(12):
            given = tokens(chance.randint(1, chance.choice(SIZES)) * self._width, chance)
            variant = chance.choice(self._variants)
            expected = self.eager(given, variant)
            for found, right in zip(self.replay(given, variant), expected, strict=True):
                assert torch.equal(found, right)


def target(model: Decoder) -> Forward:
    return lambda tokens, variant: model(tokens, lora=variant == "lora")


def drafting(model: Decoder, steps: int = 3) -> Forward:
    """Drafts a few tokens one after the other: EAGLE's draft_forward."""

    def forward(tokens: Tensor, variant: str | None) -> Output:
        scores, drafted = [], []
        for _ in range(steps):
            logits, _ = model(tokens)
            score, tokens = logits.softmax(dim=-1).max(dim=-1)
            scores.append(score)
            drafted.append(tokens)
        return torch.stack(scores, dim=1), torch.stack(drafted, dim=1)

    return forward


def test_runners_share_a_pool_and_a_stream(side: Side) -> None:
    """cuda_graph_runner.py, EAGLE with LoRA: the target verifies four tokens of each request, with
    adapters or without, and the draft has graphs of its own, in
    speculative/eagle_draft_cuda_graph_runner.py at 00023be. Each capture goes into the pool of the
    one before it. That a size has graphs with and without LoRA is decode_cuda_graph_runner.py's.
    """
    shared, chance = Shared(), random.Random(0)
    with Expect(side, 3 * len(SIZES)), least(side):
        verify = Runner(target(Decoder(0)), shared, width=4, variants=("lora", "nolora"))
        draft = Runner(drafting(Decoder(1, layers=1)), shared)
    for _ in range(3):
        draft.check(chance)
        verify.check(chance)


def test_captured_anew_with_other_outputs(side: Side) -> None:
    """cuda_graph_runner.py, recapture_if_needed: once hidden states are asked for, all sizes are
    captured once more into the same pool. The graphs and outputs of before go one by one, as new
    ones take their places.
    """
    model, with_hidden = Decoder(0), False

    def forward(tokens: Tensor, variant: str | None) -> Output:
        logits, hidden = model(tokens)
        return (logits, hidden) if with_hidden else (logits,)

    with Expect(side, 2 * len(SIZES)):
        runner = Runner(forward, Shared())
        runner.check(random.Random(0))
        with_hidden = True
        runner.capture()
    runner.check(random.Random(1))


def test_all_sizes_return_into_one_buffer(side: Side) -> None:
    """breakable_cuda_graph_backend.py: a forward is several captures with eager work between them;
    the output of the largest size is the buffer that all others copy theirs into.
    """
    model, pool = Decoder(0), torch.cuda.graph_pool_handle()
    stream, chance = torch.cuda.Stream(), random.Random(0)
    static = torch.zeros(SIZES[-1], dtype=torch.int64, device="cuda")
    steps: dict[int, list[Callable[[], object]]] = {}
    buffer: Tensor | None = None
    torch.cuda.synchronize()
    with Expect(side, 2 * len(SIZES)), least(side), torch.cuda.stream(stream):
        for size in reversed(SIZES):
            for _ in range(2):
                torch.cuda.synchronize()
                model(static[:size])
            graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
            with torch.cuda.graph(graphs[0], pool=pool, stream=stream):
                hidden = model.layer(0, model.embedding(static[:size]))
            attention = partial(hidden.cumsum_, dim=0)
            attention()
            with torch.cuda.graph(graphs[1], pool=pool, stream=stream):
                output = model.head(model.layer(1, hidden))
                if buffer is not None:
                    buffer[:size].copy_(output)
            buffer = output if buffer is None else buffer
            steps[size] = [graphs[0].replay, attention, graphs[1].replay]
        del output
    assert buffer is not None
    for _ in range(30):
        size = chance.choice(SIZES)
        static[:size].copy_(tokens(size, chance))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            hidden = model.layer(0, model.embedding(static[:size])).cumsum(dim=0)
            expected = model.head(model.layer(1, hidden))
            for step in steps[size]:
                step()
        torch.cuda.synchronize()
        assert torch.equal(buffer[:size], expected)


def test_pieces_between_attentions(side: Side) -> None:
    """compilation/cuda_piecewise_backend.py at 046ed66: one warm-up, then each piece is captured
    while the whole model runs. Only the first piece lets torch.cuda.graph empty the cache; outputs
    are weak references, that of the last piece within its capture already.
    """
    model, pool = Decoder(0), torch.cuda.graph_pool_handle()
    quick = [patch("gc.collect", lambda: None), patch("torch.cuda.empty_cache", lambda: None)]
    works = [
        lambda x: model.layer(0, model.embedding(x)),
        lambda x: model.layer(1, x),
        lambda x: model.head(model.layer(2, x)),
    ]
    pieces = [
        Piece(work, pool, 1, quick if index else [], is_last=index == 2)
        for index, work in enumerate(works)
    ]
    static = torch.zeros(SIZES[-1], dtype=torch.int64, device="cuda")

    def run(parts: Sequence[Callable[[Tensor], Tensor]], size: int) -> Tensor:
        x = parts[0](static[:size])
        x = parts[1](x.cumsum_(dim=0))
        return parts[2](x.cumsum_(dim=0))

    with Expect(side, 3 * len(SIZES)), least(side):
        for size in reversed(SIZES):
            for _ in range(2):
                run(pieces, size)
    chance = random.Random(0)
    for _ in range(30):
        size = chance.choice(SIZES)
        static[:size].copy_(tokens(size, chance))
        expected = run(works, size)
        assert torch.equal(run(pieces, size), expected)


def test_free_runs_of_the_pool_are_lent(side: Side) -> None:
    """SGLANG_ENABLE_GRAPH_POOL_BORROW, runner_utils/pool.py: between replays eager work gets the
    addresses that memory_snapshot calls inactive. Behind none of them lies a byte of what is alive,
    nor one that another run has.
    """
    shared, chance = Shared(), random.Random(0)
    with Expect(side, len(SIZES)):
        runner = Runner(target(Decoder(0)), shared)
    for size in reversed(SIZES):  # as captured: what lives may lie where others have scratch
        runner.replay(tokens(size, chance))
    kept = [out.clone() for outs in runner._outputs.values() for out in outs]
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
    alive = [out for outs in runner._outputs.values() for out in outs]
    for found, right in zip(alive, kept, strict=True):
        assert torch.equal(found, right)
    runner.check(chance)
