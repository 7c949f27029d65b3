"""Models of libraries, with random weights, as const_memory.py and capture_parts.py capture them.

A name that ends with ``-kept`` keeps each size's output in the pool, as a program does that reads
it later; else it is given back when it was copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from _models import BERT, WAV2VEC2, images, segmentation, text, timm, tokens, video, vision
from _workloads import Workload
from torch import Tensor, nn

KEPT = "-kept"


@dataclass(frozen=True, slots=True)
class Model:
    """What is captured.

    Attributes:
        input: Makes its argument of a size: images, or texts, which are of integers.
        run: Calls it.
    """

    make: Callable[[], nn.Module]
    input: Callable[[int], Tensor]
    sizes: Sequence[int]
    dtype: torch.dtype = torch.float16
    run: Callable[[nn.Module, Tensor], Tensor] = lambda model, given: model(given)


def _last_hidden(model: nn.Module, given: Tensor) -> Tensor:
    output: Tensor = model(given.flatten(1)).last_hidden_state
    return output


MODELS = {
    "resnet50": Model(partial(vision, "resnet50"), images(224, torch.float16), range(1, 65)),
    "bert": Model(
        partial(text, "BertModel", {"add_pooling_layer": False}, **BERT),
        tokens(16),
        (16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512),
        run=lambda model, given: model(input_ids=given).last_hidden_state,
    ),
    "fcn_resnet50": Model(
        partial(segmentation, "fcn_resnet50"),
        images(520, torch.float16),
        range(1, 9),
        run=lambda model, given: model(given)["out"],
    ),
    "swin_t": Model(partial(vision, "swin_t"), images(224, torch.float16), range(2, 33, 2)),
    "convnextv2_tiny": Model(
        partial(timm, "convnextv2_tiny"), images(224, torch.float16), range(2, 41, 2)
    ),
    "wav2vec2": Model(
        partial(text, "Wav2Vec2Model", **WAV2VEC2),
        lambda size: torch.zeros(size, 32_000, dtype=torch.float16),
        range(1, 11),
        run=_last_hidden,
    ),
    "r3d_18": Model(
        partial(video, "r3d_18"),
        lambda size: torch.zeros(size, 3, 16, 112, 112, dtype=torch.float16),
        range(1, 13),
    ),
    # No other benchmark or test has the models from here on.
    **{
        name: Model(partial(make, name), images(224), range(4, 33, 4), torch.bfloat16)
        for name, make in (
            ("squeezenet1_1", vision),
            ("maxvit_t", vision),
            ("shufflenet_v2_x1_0", vision),
            ("hrnet_w18", timm),
            ("pvt_v2_b2", timm),
        )
    },
    "s3d": Model(
        partial(video, "s3d"),
        lambda size: torch.zeros(size, 3, 16, 224, 224, dtype=torch.bfloat16),
        range(1, 9),
        torch.bfloat16,
    ),
    "segformer": Model(
        partial(text, "SegformerForSemanticSegmentation"),
        images(512),
        range(1, 9),
        torch.bfloat16,
        run=lambda model, given: model(given).logits,
    ),
    "distilbert": Model(
        partial(text, "DistilBertModel"),
        tokens(16),
        range(64, 513, 64),
        torch.bfloat16,
        run=lambda model, given: model(given).last_hidden_state,
    ),
    "gpt_neox": Model(
        partial(text, "GPTNeoXForCausalLM", num_hidden_layers=8, hidden_size=1024, use_cache=False),
        tokens(4),
        range(64, 513, 64),
        torch.bfloat16,
        run=lambda model, given: model(given).logits[:, -1],
    ),
}


class LibraryModel(Workload):
    """One of them."""

    def __init__(self, device: torch.device, name: str) -> None:
        self.name = name
        self._made = made = MODELS[name.removesuffix(KEPT)]
        self.keys = made.sizes
        torch.manual_seed(0)
        with torch.device(device):
            self._model = made.make().to(made.dtype).eval()
            self._given = made.input(max(made.sizes))
        self._keeps = name.endswith(KEPT)
        self._kept: dict[int, Tensor] = {}
        self._results: dict[int, Tensor] = {}

    def fill(self, key: int, seed: int) -> None:
        given = self._input(key)
        generator = torch.Generator(given.device).manual_seed(seed)
        if given.is_floating_point():
            given.normal_(generator=generator)
        else:
            given.random_(0, self._model.config.vocab_size, generator=generator)

    @torch.no_grad()
    def step(self, key: int) -> None:
        output = self._made.run(self._model, self._input(key))
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
        """As many images as the size, or texts as long."""
        return self._given.narrow(0 if self._given.is_floating_point() else 1, 0, key)
