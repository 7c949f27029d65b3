"""The models of graph_runner.py: functions of their arguments, as users have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import workloads
from _models import Output, vision
from _workloads import rms_norm
from torch import Tensor, nn
from two_stream_models import linears


@dataclass(frozen=True, slots=True)
class Model:
    """What is captured.

    Attributes:
        arguments: Makes those of a call of a size.
        trains: Whether a call is followed by a backward pass.
    """

    function: Callable[..., Any]
    sizes: Sequence[int]
    arguments: Callable[[int], tuple[Tensor, ...]]
    trains: bool = False


def script() -> Model:
    def arguments(rows: int) -> tuple[Tensor, ...]:
        return torch.randn(rows, 1024, device="cuda"), torch.randn(rows, 1024, device="cuda")

    return Model(lambda a, b: a**2 + b * 2, range(1, 129), arguments)


class GatedMlp(nn.Module):  # type: ignore[misc]
    """As the workload of const_memory.py, with the sizes of that."""

    def __init__(self, layers: int = 4, hidden: int = 4096, intermediate: int = 11008) -> None:
        super().__init__()
        self.gate = linears(layers, hidden, intermediate, "cuda")
        self.up = linears(layers, hidden, intermediate, "cuda")
        self.down = linears(layers, intermediate, hidden, "cuda")

    def forward(self, x: Tensor) -> Tensor:
        for gate, up, down in zip(self.gate, self.up, self.down, strict=True):
            x = rms_norm(x + down(nn.functional.silu(gate(x)) * up(x)))
        return x


def mlp() -> Model:
    def arguments(rows: int) -> tuple[Tensor, ...]:
        return (torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16),)

    return Model(GatedMlp(), range(16, 2049, 16), arguments)


def llama() -> Model:
    step = workloads.llama(torch.device("cuda"))

    def arguments(rows: int) -> tuple[Tensor, ...]:
        tokens = torch.randint(workloads.LLAMA.vocabulary, (rows,), device="cuda")
        return tokens, torch.randint(4096, (rows,), device="cuda")

    return Model(step.forward, workloads.VLLM_BATCH_SIZES, arguments)


def resnet50() -> Model:
    model = vision("resnet50").cuda().half().eval()

    def arguments(images: int) -> tuple[Tensor, ...]:
        return (torch.randn(images, 3, 224, 224, device="cuda", dtype=torch.float16),)

    return Model(model, range(1, 65), arguments)


def gpt2() -> Model:
    model = workloads.new_gpt2().cuda().bfloat16()

    def arguments(sequences: int) -> tuple[Tensor, ...]:
        return (torch.randint(model.config.vocab_size, (sequences, 256), device="cuda"),)

    return Model(Output(model, "logits"), range(1, 9), arguments, trains=True)


MODELS = {made.__name__: made for made in (script, mlp, llama, resnet50, gpt2)}
