"""The models of footprint.py, and arguments of three batch sizes each: a process makes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from _models import BERT, GPT2, Output, text, timm, vision
from torch import Tensor, nn

Made = tuple[nn.Module, list[tuple[Tensor, ...]]]


def _of_images(
    make: Callable[[str], nn.Module], name: str, batches: Sequence[int] = (8, 16, 32)
) -> Made:
    model = make(name).to("cuda", torch.bfloat16)

    def images(batch: int) -> Tensor:
        return torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.bfloat16)

    return model, [(images(batch),) for batch in batches]


def _of_tokens(name: str, output: str, config: dict[str, Any], **options: Any) -> Made:
    model = text(name, options, num_hidden_layers=6, **config).to("cuda", torch.bfloat16)

    def tokens(batch: int) -> Tensor:
        return torch.randint(model.config.vocab_size, (batch, 256), device="cuda")

    return Output(model, output), [(tokens(batch),) for batch in (4, 8, 16)]


_LLAMA = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
_QWEN2 = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
_BOTH = {"max_position_embeddings": 512, "use_cache": False}

resnet50 = partial(_of_images, vision, "resnet50")
vit_b_16 = partial(_of_images, vision, "vit_b_16")
convnext_tiny = partial(_of_images, timm, "convnext_tiny")
mobilenetv3 = partial(_of_images, timm, "mobilenetv3_large_100", (16, 32, 64))
bert = partial(_of_tokens, "BertModel", "last_hidden_state", BERT, add_pooling_layer=False)
gpt2 = partial(_of_tokens, "GPT2LMHeadModel", "logits", GPT2)
llama = partial(_of_tokens, "LlamaForCausalLM", "logits", {**_LLAMA, **_BOTH, "vocab_size": 16_384})
qwen2 = partial(
    _of_tokens,
    "Qwen2ForCausalLM",
    "logits",
    {**_QWEN2, **_BOTH, "num_key_value_heads": 4, "vocab_size": 32_768},
)
