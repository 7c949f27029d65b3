"""Models whose one step runs on two streams, as people write them: with record_stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from _workloads import Workload, randomize, rms_norm
from torch import Tensor, nn

_DTYPE = torch.bfloat16


class Rows(Workload):
    """A model on some rows of random numbers, whose result is as large. The key is their number
    divided by ``per_key``.
    """

    per_key = 64
    keys: Sequence[int] = range(4, 33, 4)

    def __init__(self, device: torch.device, width: int) -> None:
        self._device = device
        rows = self.per_key * self.keys[-1]
        self._input = torch.empty(rows, width, dtype=_DTYPE, device=device)
        self._result = torch.empty_like(self._input)

    def fill(self, key: int, seed: int) -> None:
        generator = torch.Generator(self._input.device).manual_seed(seed)
        self.given(key).normal_(generator=generator)

    def given(self, key: int) -> Tensor:
        return self._input[: self.per_key * key]

    def outputs(self, key: int) -> list[Tensor]:
        return [self._result[: self.per_key * key]]


def linears(
    count: int,
    inputs: int,
    outputs: int,
    device: torch.device | str,
    generator: torch.Generator | None = None,
) -> nn.ModuleList:
    """Layers without biases; their weights are torch's own unless there is a generator."""
    made = nn.ModuleList(
        nn.Linear(inputs, outputs, bias=False, dtype=_DTYPE, device=device) for _ in range(count)
    )
    if generator is not None:
        randomize(made, generator)
    return made


class WeightStreaming(Rows):
    """A feed-forward stack whose weights lie in pinned host memory. While one layer computes, the
    next one's weights are copied on a side stream, which first waits for all that computes so far:
    so no more than two layers' weights are ever needed at once.
    """

    name = "streaming"

    def __init__(
        self, device: torch.device, layers: int = 8, hidden: int = 1024, intermediate: int = 4096
    ) -> None:
        super().__init__(device, hidden)
        self._copy = torch.cuda.Stream(device)
        generator = torch.Generator().manual_seed(0)

        def pinned(outputs: int, inputs: int) -> Tensor:
            made = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
            return made.to(_DTYPE).pin_memory()

        self._weights = [
            (pinned(intermediate, hidden), pinned(hidden, intermediate)) for _ in range(layers)
        ]

    @torch.no_grad()
    def step(self, key: int) -> None:
        main = torch.cuda.current_stream(self._device)
        x = self.given(key)
        weights = self._fetch(0, main)
        for number in range(len(self._weights)):
            main.wait_stream(self._copy)
            up, down = weights
            if number + 1 < len(self._weights):
                weights = self._fetch(number + 1, main)
            h = nn.functional.gelu(nn.functional.linear(x, up))
            x = rms_norm(x + nn.functional.linear(h, down))
            del h
            for used in (up, down):
                used.record_stream(main)
            del up, down, used
        self.outputs(key)[0].copy_(x)

    def _fetch(self, layer: int, main: torch.cuda.Stream) -> list[Tensor]:
        self._copy.wait_stream(main)
        with torch.cuda.stream(self._copy):
            return [weight.to(self._device, non_blocking=True) for weight in self._weights[layer]]


class Branches(Rows):
    """Blocks of two branches, one on a side stream. What crosses from one stream to the other is
    recorded; a block's input is read by both.
    """

    name = "branches"

    def __init__(self, device: torch.device, layers: int = 8, width: int = 1024) -> None:
        super().__init__(device, width)
        self._side = torch.cuda.Stream(device)
        generator = torch.Generator(device).manual_seed(0)
        wide, narrow = 4 * width, 3 * width // 2
        shapes = (width, wide), (wide, width), (width, narrow), (narrow, width)
        self._layers = [linears(layers, *shape, device, generator) for shape in shapes]

    @torch.no_grad()
    def step(self, key: int) -> None:
        main = torch.cuda.current_stream(self._device)
        x = self.given(key)
        for wide_in, wide_out, narrow_in, narrow_out in zip(*self._layers, strict=True):
            self._side.wait_stream(main)
            with torch.cuda.stream(self._side):
                beside = narrow_out(nn.functional.silu(narrow_in(x)).square())
                x.record_stream(self._side)
            straight = wide_out(nn.functional.gelu(wide_in(x)))
            main.wait_stream(self._side)
            x = rms_norm(x + straight + beside)
            beside.record_stream(main)
            del straight, beside
        self.outputs(key)[0].copy_(x)
