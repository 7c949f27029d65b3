"""What inference engines do with CUDA graphs, small: a decoder, weak references, pieces of a graph.

SGLang and TensorRT-LLM cannot be installed beside the torch that is tested; the tests follow their
sources.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..work import PAGE, adapter, torch
from .conftest import Side

if TYPE_CHECKING:
    from torch import Tensor

SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512]
VOCABULARY = 4096
_WIDTH = 256
_HIDDEN = 1024
_RANK = 16


class Decoder(torch.nn.Module):  # type: ignore[misc]
    """Embedding, gated layers with or without LoRA, logits."""

    def __init__(self, seed: int, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        linear = torch.nn.Linear
        self.embedding = torch.nn.Embedding(VOCABULARY, _WIDTH)
        self.up = torch.nn.ModuleList(linear(_WIDTH, 2 * _HIDDEN) for _ in range(layers))
        self.down = torch.nn.ModuleList(linear(_HIDDEN, _WIDTH) for _ in range(layers))
        self.lora_a = torch.nn.ModuleList(linear(_WIDTH, _RANK) for _ in range(layers))
        self.lora_b = torch.nn.ModuleList(linear(_RANK, 2 * _HIDDEN) for _ in range(layers))
        self.head = linear(_WIDTH, VOCABULARY)
        self.to("cuda").requires_grad_(False)

    def layer(self, index: int, hidden: Tensor, lora: bool = False) -> Tensor:
        wide = self.up[index](hidden)
        if lora:
            wide = wide + self.lora_b[index](self.lora_a[index](hidden))
        gate, value = wide.chunk(2, dim=-1)
        return hidden + self.down[index](torch.nn.functional.silu(gate) * value)

    def forward(self, tokens: Tensor, lora: bool = False) -> tuple[Tensor, Tensor]:
        """Logits and hidden states."""
        hidden = self.embedding(tokens)
        for index in range(len(self.up)):
            hidden = self.layer(index, hidden, lora)
        return self.head(hidden), hidden


def tokens(count: int, chance: random.Random) -> Tensor:
    return torch.tensor([chance.randrange(VOCABULARY) for _ in range(count)], device="cuda")


def padded(size: int) -> int:
    """The smallest captured size that holds so many."""
    return min(s for s in SIZES if s >= size)


def weak(tensor: Tensor) -> Tensor:
    """The same memory, which it does not keep."""
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.data_ptr(), tensor.device, tensor.numel() * tensor.element_size()
    )
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, 0, tensor.shape, tensor.stride())


class Piece:
    """What runs between two attentions: a graph for each size, captured as it is first used.

    Args:
        around: what is patched while it captures.
        is_last: whether nothing reads its output in the same step.
        replays_at_once: whether the capture is followed by a replay.
    """

    def __init__(
        self,
        work: Callable[[Tensor], Tensor],
        pool: Any,
        warm_ups: int,
        around: Sequence[contextlib.AbstractContextManager[object]],
        is_last: bool = False,
        replays_at_once: bool = False,
    ) -> None:
        self._work, self._pool, self._around = work, pool, around
        self._warm_ups, self._is_last, self._replays = warm_ups, is_last, replays_at_once
        self._calls: dict[int, int] = {}
        self._graphs: dict[int, tuple[Any, Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows in self._graphs:
            graph, output = self._graphs[rows]
            graph.replay()
            return output
        self._calls[rows] = self._calls.get(rows, 0) + 1
        if self._calls[rows] <= self._warm_ups:
            return self._work(x)
        graph = torch.cuda.CUDAGraph()
        with contextlib.ExitStack() as stack:
            for one in self._around:
                stack.enter_context(one)
            with torch.cuda.graph(graph, pool=self._pool):
                output = self._work(x)
                if self._is_last:
                    output = weak(output)
        self._graphs[rows] = graph, weak(output)
        if self._replays:
            graph.replay()
        return output  # strong: what is captured next must not take its memory


@contextlib.contextmanager
def least(side: Side, pools: int = 1) -> Iterator[None]:
    """The pools that the block makes reserve no more than what is live in them at once needs."""
    before = set(adapter.pool_ids(torch.cuda.current_device()))
    yield
    made = set(adapter.pool_ids(torch.cuda.current_device())) - before
    assert len(made) == (pools if side == "ours" else 0)
    for pool in made:
        stats = adapter.stats(torch.cuda.current_device(), pool)
        minimum = -(-stats["peak_allocated_bytes"] // PAGE) * PAGE
        assert stats["peak_reserved_bytes"] <= minimum * 1.01 + PAGE, stats
