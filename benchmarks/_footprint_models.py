"""The models of footprint.py, with random weights, and arguments of three batch sizes each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torchvision import models
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

Made = tuple[nn.Module, list[tuple[Tensor, ...]]]


def resnet50() -> Made:
    return _of_images(models.resnet50(weights=None), [8, 16, 32])


def vit_b_16() -> Made:
    return _of_images(models.vit_b_16(weights=None), [8, 16, 32])


def convnext_tiny() -> Made:
    return _of_images(timm.create_model("convnext_tiny"), [8, 16, 32])


def mobilenetv3() -> Made:
    return _of_images(timm.create_model("mobilenetv3_large_100"), [16, 32, 64])


def bert() -> Made:
    config = BertConfig(
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_hidden_layers=6
    )
    return _of_tokens(BertModel(config, add_pooling_layer=False), config, "last_hidden_state")


def gpt2() -> Made:
    config = GPT2Config(n_layer=6, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, use_cache=False)
    return _of_tokens(GPT2LMHeadModel(config), config, "logits")


def llama() -> Made:
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=6,
        num_attention_heads=16,
        vocab_size=16_384,
        max_position_embeddings=512,
        use_cache=False,
    )
    return _of_tokens(LlamaForCausalLM(config), config, "logits")


def qwen2() -> Made:
    config = Qwen2Config(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=6,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=32_768,
        max_position_embeddings=512,
        use_cache=False,
    )
    return _of_tokens(Qwen2ForCausalLM(config), config, "logits")


class _Output(nn.Module):  # type: ignore[misc]
    """One tensor of what a model of transformers returns."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model
        self._name = name

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.model(input_ids=tokens)[self._name]
        return output


def _of_images(model: nn.Module, batches: Sequence[int]) -> Made:
    def images(batch: int) -> Tensor:
        return torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.bfloat16)

    return model.to("cuda", torch.bfloat16), [(images(batch),) for batch in batches]


def _of_tokens(model: nn.Module, config: Any, output: str) -> Made:
    def tokens(batch: int) -> Tensor:
        return torch.randint(config.vocab_size, (batch, 256), device="cuda")

    model = _Output(model, output).to("cuda", torch.bfloat16)
    return model, [(tokens(batch),) for batch in (4, 8, 16)]
