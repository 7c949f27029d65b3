"""The base of what the benchmarks capture, and two of these.

Needs torch; nothing here knows an allocator.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Workload(abc.ABC):
    """Work that is captured once for each of many sizes.

    Its weights, inputs and outputs are static: they are made once, for the largest size, and lie
    outside of the graph pool. What :meth:`step` allocates besides is all that a capture puts into
    the pool.

    Attributes:
        name (str): as in tables and on command lines.
        keys (Sequence[int]): the sizes, smallest first.
    """

    name: str
    keys: Sequence[int]

    @abc.abstractmethod
    def fill(self, key: int, seed: int) -> None:
        """Writes fresh inputs of size ``key``, the same for the same seed in every process."""

    @abc.abstractmethod
    def step(self, key: int) -> None:
        """The work: reads the static inputs, writes the static outputs.

        This is what is captured.
        """

    @abc.abstractmethod
    def outputs(self, key: int) -> list[Tensor]:
        """What :meth:`step` wrote."""

    def forget_captures(self) -> None:
        """Lets go of what the steps that were captured so far have left in the pool."""
        return

    def clear(self, key: int) -> None:
        """Makes the outputs such that a step that does nothing is found out."""
        for output in self.outputs(key):
            output.fill_(-77)


class SeedScript(Workload):
    """The script of the forum question that this project started from: pinned inputs, copied and
    combined on the GPU.
    """

    name = "seed"
    keys = range(1, 129)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        pinned = device.type == "cuda"
        shape = self.keys[-1], 1024
        self._a = torch.empty(shape, pin_memory=pinned)
        self._b = torch.empty(shape, pin_memory=pinned)
        self._result = torch.empty(shape, device=device)

    def fill(self, key: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._a[:key].normal_(generator=generator)
        self._b[:key].normal_(generator=generator)

    def step(self, key: int) -> None:
        a = self._a[:key].to(self._device, non_blocking=True)
        b = self._b[:key].to(self._device, non_blocking=True)
        self._result[:key].copy_(a**2 + b * 2)

    def outputs(self, key: int) -> list[Tensor]:
        return [self._result[:key]]


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The dimensions of a :class:`DecodeStep`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    context: int

    @property
    def head(self) -> int:
        return self.hidden // self.heads


class DecodeStep(Workload):
    """One decode step of a Llama-like transformer, from tokens to logits, in bfloat16.

    Rotary positions, grouped-query attention over a static cache of keys and values, gated
    feed-forward, RMS norms without weights. Every sequence fills its cache: the step writes the
    last slot and reads all of them, so that its result depends on the inputs alone and not on
    which steps ran before.
    """

    def __init__(
        self, name: str, keys: Sequence[int], shape: DecoderShape, device: torch.device
    ) -> None:
        self.name = name
        self.keys = keys
        self._shape = shape
        rows = max(keys)
        like = {"device": device, "dtype": torch.bfloat16}
        qkv = shape.hidden + 2 * shape.kv_heads * shape.head
        with torch.device(device):
            self._embedding = nn.Embedding(shape.vocabulary, shape.hidden, dtype=torch.bfloat16)
            self._qkv = _linears(shape.layers, shape.hidden, qkv)
            self._out = _linears(shape.layers, shape.hidden, shape.hidden)
            self._gate_up = _linears(shape.layers, shape.hidden, 2 * shape.intermediate)
            self._down = _linears(shape.layers, shape.intermediate, shape.hidden)
            self._head = nn.Linear(shape.hidden, shape.vocabulary, bias=False, dtype=torch.bfloat16)
            steps = torch.arange(0, shape.head, 2, dtype=torch.float32)
            self._frequencies = 10_000.0 ** (-steps / shape.head)
        cache = (shape.layers, rows, shape.kv_heads, shape.context, shape.head)
        generator = torch.Generator(device).manual_seed(0)
        self._keys_cache = torch.empty(cache, **like).normal_(generator=generator)
        self._values_cache = torch.empty(cache, **like).normal_(generator=generator)
        for module in (
            self._embedding,
            self._qkv,
            self._out,
            self._gate_up,
            self._down,
            self._head,
        ):
            randomize(module, generator)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._logits = torch.empty(rows, shape.vocabulary, **like)

    def fill(self, key: int, seed: int) -> None:
        generator = torch.Generator(self._tokens.device).manual_seed(seed)
        self._tokens[:key].random_(0, self._shape.vocabulary, generator=generator)
        self._positions[:key].random_(0, 4096, generator=generator)

    @torch.no_grad()
    def step(self, key: int) -> None:
        self._logits[:key].copy_(self.forward(self._tokens[:key], self._positions[:key]))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The logits of as many sequences as there are tokens: the first ones of the cache."""
        shape, key = self._shape, len(tokens)
        x = self._embedding(tokens)
        angles = positions.float()[:, None] * self._frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        sizes = [shape.hidden, shape.kv_heads * shape.head, shape.kv_heads * shape.head]
        for layer in range(shape.layers):
            h = rms_norm(x)
            q, k, v = self._qkv[layer](h).split(sizes, dim=-1)
            q = _rotate(q.view(key, shape.heads, shape.head), cos, sin)
            k = _rotate(k.view(key, shape.kv_heads, shape.head), cos, sin)
            keys, values = self._keys_cache[layer, :key], self._values_cache[layer, :key]
            keys[:, :, -1].copy_(k)
            values[:, :, -1].copy_(v.view(key, shape.kv_heads, shape.head))
            attended = nn.functional.scaled_dot_product_attention(
                q[:, :, None], keys, values, enable_gqa=True
            )
            x = x + self._out[layer](attended.reshape(key, shape.hidden))
            h = rms_norm(x)
            gate, up = self._gate_up[layer](h).chunk(2, dim=-1)
            x = x + self._down[layer](nn.functional.silu(gate) * up)
        logits: Tensor = self._head(rms_norm(x))
        return logits

    def outputs(self, key: int) -> list[Tensor]:
        return [self._logits[:key]]


def randomize(module: nn.Module, generator: torch.Generator) -> None:
    """Fills a module's weights so that the variance of what flows through stays about one."""
    with torch.no_grad():
        for parameter in module.parameters():
            fan_in = parameter.shape[-1]
            parameter.normal_(std=fan_in**-0.5, generator=generator)


def rms_norm(x: Tensor) -> Tensor:
    """The root-mean-square norm without a weight, its statistics in float32."""
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


def _linears(count: int, inputs: int, outputs: int) -> nn.ModuleList:
    return nn.ModuleList(
        nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16) for _ in range(count)
    )
