"""What torch 2.15 asks of an allocator in captures: cuBLAS's workspace at each product, 32 MiB on
Hopper, given back right after. Older releases allocate it once, so it is emulated here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from _workloads import rms_norm
from torch import Tensor, nn
from two_stream_models import Rows

WORKSPACE_BYTES = 32 << 20


class Product(nn.Linear):  # type: ignore[misc]  # torch does not annotate it
    """A linear layer that takes a workspace of so many bytes."""

    def __init__(self, inputs: int, outputs: int, workspace_bytes: int) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=torch.bfloat16)
        self._workspace_bytes = workspace_bytes

    def forward(self, given: Tensor) -> Tensor:
        if self._workspace_bytes:
            torch.empty(self._workspace_bytes, dtype=torch.uint8, device=given.device)
        return nn.functional.linear(given, self.weight)


class Products(Rows):
    """Transformer-like blocks without attention, on some rows."""

    per_key = 1

    def __init__(
        self,
        device: torch.device,
        name: str,
        keys: Sequence[int],
        layers: int,
        workspace_bytes: int,
        width: int = 1024,
    ) -> None:
        self.name = name
        self.keys = keys
        super().__init__(device, width)
        wide = 4 * width
        shapes = [(width, 3 * width), (width, width), (width, wide), (width, wide), (wide, width)]
        torch.manual_seed(0)
        with torch.device(device):
            self._layers = [
                [Product(*shape, workspace_bytes) for shape in shapes] for _ in range(layers)
            ]

    @torch.no_grad()
    def step(self, key: int) -> None:
        x = self.given(key)
        for qkv, out, gate, up, down in self._layers:
            q, k, v = qkv(rms_norm(x)).chunk(3, -1)
            x = x + out(torch.sigmoid(q) * k + v)
            h = rms_norm(x)
            x = x + down(nn.functional.silu(gate(h)) * up(h))
        self.outputs(key)[0].copy_(x)


DECODE = range(8, 513, 8)
PREFILL = (128, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192)
SHAPES: dict[str, tuple[Sequence[int], int]] = {"decode": (DECODE, 16), "prefill": (PREFILL, 8)}
