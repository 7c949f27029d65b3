"""The models of footprint.py, with random weights, and arguments of three batch sizes each.

Each function imports what it alone needs: a process makes one model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, list[tuple[Tensor, ...]]]


def _torchvision(name: str) -> Made:
    import torchvision

    return _of_images(getattr(torchvision.models, name)(weights=None))


def _timm(name: str, batches: Sequence[int] = (8, 16, 32)) -> Made:
    import timm

    return _of_images(timm.create_model(name), batches)


def _transformers(name: str, output: str, config: dict[str, Any], **options: Any) -> Made:
    import transformers

    kind = getattr(transformers, name)
    made = kind.config_class(num_hidden_layers=6, **config)

    def tokens(batch: int) -> Tensor:
        return torch.randint(made.vocab_size, (batch, 256), device="cuda")

    model = _Output(kind(made, **options), output).to("cuda", torch.bfloat16)
    return model, [(tokens(batch),) for batch in (4, 8, 16)]


def _of_images(model: nn.Module, batches: Sequence[int] = (8, 16, 32)) -> Made:
    def images(batch: int) -> Tensor:
        return torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.bfloat16)

    return model.to("cuda", torch.bfloat16), [(images(batch),) for batch in batches]


class _Output(nn.Module):  # type: ignore[misc]
    """One tensor of what a model of transformers returns."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model
        self._name = name

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.model(input_ids=tokens)[self._name]
        return output


resnet50 = partial(_torchvision, "resnet50")
vit_b_16 = partial(_torchvision, "vit_b_16")
convnext_tiny = partial(_timm, "convnext_tiny")
mobilenetv3 = partial(_timm, "mobilenetv3_large_100", (16, 32, 64))
bert = partial(
    _transformers,
    "BertModel",
    "last_hidden_state",
    {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    add_pooling_layer=False,
)
gpt2 = partial(
    _transformers,
    "GPT2LMHeadModel",
    "logits",
    {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "use_cache": False},
)
_LLAMA = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
_QWEN2 = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
_BOTH = {"max_position_embeddings": 512, "use_cache": False}
llama = partial(
    _transformers, "LlamaForCausalLM", "logits", {**_LLAMA, **_BOTH, "vocab_size": 16_384}
)
qwen2 = partial(
    _transformers,
    "Qwen2ForCausalLM",
    "logits",
    {**_QWEN2, **_BOTH, "num_key_value_heads": 4, "vocab_size": 32_768},
)
