"""A UNet as those of latent diffusion, with random weights, at 20 shapes."""

from __future__ import annotations

import itertools

import torch
from _workloads import Workload
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

_TEXT = 768  # the width of what attention reads besides the image
_TOKENS = 77
_TIME = 1280
_HEAD = 64


class _Residual(nn.Module):  # type: ignore[misc]
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs)
        self.time = nn.Linear(_TIME, outputs)
        self.second = _convolution(outputs, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.first(x) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(h)


class _Attention(nn.Module):  # type: ignore[misc]
    """Attention to the image, then to the text, then a gated feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.queries = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.pairs = nn.ModuleList(nn.Linear(w, 2 * width, bias=False) for w in (width, _TEXT))
        self.outs = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.gated = nn.Linear(width, 8 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        rows = x.flatten(2).transpose(1, 2)
        for number, norm in enumerate(self.norms[:2]):
            h = norm(rows)
            key, value = self.pairs[number](text if number else h).chunk(2, -1)
            heads = (t.unflatten(2, (-1, _HEAD)).transpose(1, 2) for t in (key, value))
            query = self.queries[number](h).unflatten(2, (-1, _HEAD)).transpose(1, 2)
            attended = F.scaled_dot_product_attention(query, *heads)
            rows = rows + self.outs[number](attended.transpose(1, 2).flatten(2))
        h, gate = self.gated(self.norms[2](rows)).chunk(2, -1)
        rows = rows + self.down(h * F.gelu(gate))
        return rows.transpose(1, 2).reshape(x.shape)


class _Level(nn.Module):  # type: ignore[misc]
    """A residual block, and attention at all resolutions but the finest."""

    def __init__(self, inputs: int, outputs: int, attends: bool) -> None:
        super().__init__()
        self.residual = _Residual(inputs, outputs)
        self.attention = _Attention(outputs) if attends else None

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.residual(x, time)
        return x if self.attention is None else self.attention(x, text)


class _Net(nn.Module):  # type: ignore[misc]
    def __init__(self, widths: tuple[int, ...], blocks: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(320, _TIME), nn.SiLU(), nn.Linear(_TIME, _TIME))
        self.enter = nn.Conv2d(4, widths[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        skips, width = [widths[0]], widths[0]
        for level, outputs in enumerate(widths):
            for _ in range(blocks):
                self.down.append(_Level(width, outputs, level > 0))
                width = outputs
                skips.append(width)
            if level + 1 < len(widths):
                self.down.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                skips.append(width)
        self.middle = nn.ModuleList([_Level(width, width, True), _Level(width, width, False)])
        for level, outputs in reversed(list(enumerate(widths))):
            for _ in range(blocks + 1):
                self.up.append(_Level(width + skips.pop(), outputs, level > 0))
                width = outputs
            if level:
                self.up.append(nn.Conv2d(width, width, 3, padding=1))
        self.leave = _convolution(width, 4)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        time = F.silu(self.time(time))
        x = self.enter(x)
        skips = [x]
        for layer in self.down:
            x = layer(x, time, text) if isinstance(layer, _Level) else layer(x)
            skips.append(x)
        for layer in self.middle:
            x = layer(x, time, text)
        for layer in self.up:
            if isinstance(layer, _Level):
                x = layer(torch.cat([x, skips.pop()], 1), time, text)
            else:
                x = layer(F.interpolate(x, scale_factor=2.0))
        return self.leave(x)


class Unet(Workload):
    """One step of denoising, in float16. The key is the number of the shape: a side of the latent
    image, and a batch.
    """

    name = "unet"
    shapes = tuple(itertools.product((64, 80, 96, 112, 128), (1, 2, 4, 8)))
    keys = range(len(shapes))

    def __init__(
        self, device: torch.device, widths: tuple[int, ...] = (320, 640, 1280), blocks: int = 2
    ) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self._net = _Net(widths, blocks).half().eval()
            batch = max(batch for _, batch in self.shapes)
            self._time = torch.zeros(batch, 320, dtype=torch.float16)
            self._text = torch.zeros(batch, _TOKENS, _TEXT, dtype=torch.float16)
            self._given = torch.zeros(max(b * 4 * side**2 for side, b in self.shapes)).half()
            self._result = torch.zeros_like(self._given)

    def fill(self, key: int, seed: int) -> None:
        generator = torch.Generator(self._given.device).manual_seed(seed)
        for given in (self._time, self._text, self._given):
            given.normal_(generator=generator)

    @torch.no_grad()
    def step(self, key: int) -> None:
        batch = self.shapes[key][1]
        given = self._image(self._given, key)
        self.outputs(key)[0].copy_(self._net(given, self._time[:batch], self._text[:batch]))

    def outputs(self, key: int) -> list[Tensor]:
        return [self._image(self._result, key)]

    def _image(self, flat: Tensor, key: int) -> Tensor:
        side, batch = self.shapes[key]
        return flat[: batch * 4 * side**2].view(batch, 4, side, side)


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.GroupNorm(32, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1)
    )
