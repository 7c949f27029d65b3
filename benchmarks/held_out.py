"""Models of libraries, with random weights, that nothing here was tuned on: for const_memory.py.

A name that ends with ``-kept`` keeps each size's output in the pool, as a program does that reads
it later; else it is given back when it was copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from _models import BERT, images, segmentation, text, timm, tokens, vision
from torch import Tensor

from cudagraph_pool._workloads import Workload

KEPT = "-kept"


@dataclass(frozen=True, slots=True)
class Made:
    """A model.

    Attributes:
        input: Its argument, of the largest size.
        dim: The dimension of that which is as large as the size.
        vocabulary: Of tokens; 0: the input is of images.
        trains: Whether ``run`` needs gradients.
    """

    run: Callable[[Tensor], Tensor]
    input: Tensor
    dim: int = 0
    vocabulary: int = 0
    trains: bool = False


def _bert(sizes: Sequence[int]) -> Made:
    model = text("BertModel", {"add_pooling_layer": False}, **BERT).half().eval()
    return Made(
        lambda given: model(input_ids=given).last_hidden_state,
        tokens(16)(max(sizes)),
        dim=1,
        vocabulary=model.config.vocab_size,
    )


def _t5(sizes: Sequence[int]) -> Made:
    model = text("T5Model", dropout_rate=0.0, num_decoder_layers=6, use_cache=False)
    model = model.bfloat16().eval()
    return Made(
        lambda given: model(input_ids=given, decoder_input_ids=given).last_hidden_state,
        tokens(8)(max(sizes)),
        dim=1,
        vocabulary=model.config.vocab_size,
    )


def _fcn_resnet50(sizes: Sequence[int]) -> Made:
    model = segmentation("fcn_resnet50").half().eval()
    return Made(lambda given: model(given)["out"], images(520, torch.half)(max(sizes)))


def _swin_t(sizes: Sequence[int]) -> Made:
    return Made(vision("swin_t").half().eval(), images(224, torch.half)(max(sizes)))


def _efficientnet(sizes: Sequence[int]) -> Made:
    return Made(timm("efficientnet_b0").half().eval(), images(224, torch.half)(max(sizes)))


def _vit_training(sizes: Sequence[int]) -> Made:
    model = vision("vit_b_16").bfloat16().train()
    parameters = list(model.parameters())

    def run(given: Tensor) -> Tensor:
        loss = model(given).float().square().mean()
        norms = torch._foreach_norm(torch.autograd.grad(loss, parameters))
        return torch.stack([loss.detach(), *norms])

    return Made(run, images(224)(max(sizes)), trains=True)


MODELS: dict[str, tuple[Callable[[Sequence[int]], Made], Sequence[int]]] = {
    "bert": (_bert, (16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512)),
    "fcn_resnet50": (_fcn_resnet50, range(1, 9)),
    "swin_t": (_swin_t, range(2, 33, 2)),
    "t5": (_t5, range(32, 513, 32)),
    "efficientnet_b0": (_efficientnet, range(2, 65, 2)),
    "vit_b_16_training": (_vit_training, range(4, 33, 4)),
}


class HeldOut(Workload):
    """One of them."""

    def __init__(self, device: torch.device, name: str) -> None:
        self.name = name
        make, self.keys = MODELS[name.removesuffix(KEPT)]
        torch.manual_seed(0)
        with torch.device(device):
            self._made = make(self.keys)
        self._keeps = name.endswith(KEPT)
        self._kept: dict[int, Tensor] = {}
        self._results: dict[int, Tensor] = {}

    def fill(self, key: int, seed: int) -> None:
        given = self._input(key)
        generator = torch.Generator(given.device).manual_seed(seed)
        if self._made.vocabulary:
            given.random_(0, self._made.vocabulary, generator=generator)
        else:
            given.normal_(generator=generator)

    def step(self, key: int) -> None:
        with torch.set_grad_enabled(self._made.trains):
            output = self._made.run(self._input(key))
        if key not in self._results:  # in the warm-up
            self._results[key] = torch.empty_like(output)
        self._results[key].copy_(output)
        if self._keeps and output.is_cuda and torch.cuda.is_current_stream_capturing():
            self._kept[key] = output

    def forget_captures(self) -> None:
        self._kept.clear()

    def outputs(self, key: int) -> list[Tensor]:
        return [self._results[key]]

    def _input(self, key: int) -> Tensor:
        return self._made.input.narrow(self._made.dim, 0, key)
