"""The captures of TensorRT-LLM, in the order in which its sources make them.

Read were, of NVIDIA/TensorRT-LLM, under tensorrt_llm/_torch/: pyexecutor/cuda_graph_runner.py at
7b437aa, pyexecutor/engine/runners/decoder/runner.py at fcc4432 (model_engine.py before it was
split), compilation/piecewise_optimizer.py at 05fff03.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from ..work import torch
from .captures import Expect
from .conftest import Side
from .engines import SIZES, Decoder, Piece, least, padded, tokens, weak
from .memory import ids

if TYPE_CHECKING:
    from torch import Tensor

Key = tuple[int, int, bool]  # requests, drafted tokens of each, whether with LoRA
DRAFTED = 3


class Runner:
    """A graph for each key, whose output is a weak reference, in the pool of the first of them."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._tokens = torch.ones(SIZES[-1] * (DRAFTED + 1), dtype=torch.int64, device="cuda")
        self._pool: Any = None
        self._graphs: dict[Key, Any] = {}
        self._outputs: dict[Key, Tensor] = {}

    def warm_up(self) -> None:
        """All variants with LoRA, then all without; largest first, and longest draft first."""
        for lora in (True, False):
            for size, drafted in sorted(
                ((s, d) for s in SIZES for d in (0, DRAFTED)), reverse=True
            ):
                self._capture((size, drafted, lora))
                torch.cuda.synchronize()

    def _capture(self, key: Key) -> None:
        forward = partial(self._forward, key)
        for _ in range(2):
            forward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = forward()
        self._graphs[key] = graph
        self._outputs[key] = weak(output)
        self._pool = graph.pool()

    def _forward(self, key: Key) -> Tensor:
        size, drafted, lora = key
        logits, _ = self._model(self._tokens[: size * (drafted + 1)], lora)
        return logits

    def check(self, chance: random.Random) -> None:
        drafted, lora = chance.choice((0, DRAFTED)), chance.random() < 0.5
        requests = chance.randint(1, chance.choice(SIZES))
        given = tokens(requests * (drafted + 1), chance)
        self._tokens[: len(given)].copy_(given)
        key = padded(requests), drafted, lora
        expected = self._forward(key)
        self._graphs[key].replay()
        assert torch.equal(self._outputs[key], expected)

    def clear(self) -> None:
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._outputs.clear()
        self._pool = None
        torch.cuda.empty_cache()


def test_generation_graphs(side: Side) -> None:
    """The engine warms up twice: to estimate what is left for the KV cache, and once that is there.
    What the first time took is free when it is cleared. (cuda_graph_runner.py, runner.py)
    """
    runner, chance = Runner(Decoder(0)), random.Random(0)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        with Expect(side, 4 * len(SIZES)), least(side):
            runner.warm_up()
        for _ in range(40):
            runner.check(chance)
        runner.clear()
        torch._C._cuda_clearCublasWorkspaces()  # those of the capture stream lie in the pool
        torch.cuda.empty_cache()
        assert ids() == []
        assert torch.cuda.memory_reserved() <= before


def test_pieces_between_attentions(side: Side) -> None:
    """piecewise_optimizer.py: each piece is captured at its fourth run and replayed at once, before
    the next is captured; gc.collect is patched out meanwhile, and called with empty_cache after
    each size.
    """
    model, pool = Decoder(0), torch.cuda.graph_pool_handle()
    works: list[Callable[[Tensor], Tensor]] = [
        lambda x: model.layer(0, model.embedding(x)),
        lambda x: model.layer(1, x),
        lambda x: model.head(model.layer(2, x)),
    ]
    quick = [patch("gc.collect", lambda: None)]
    pieces = [Piece(work, pool, 3, quick, replays_at_once=True) for work in works]

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
