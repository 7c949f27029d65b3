"""The models of footprint.py, with random weights, and arguments of three batch sizes each.

Each function imports what it alone needs: a process makes one model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, list[tuple[Tensor, ...]]]


def resnet50() -> Made:
    from torchvision.models import resnet50 as new_resnet50

    return _of_images(new_resnet50(weights=None), [8, 16, 32])


def vit_b_16() -> Made:
    from torchvision.models import vit_b_16 as new_vit

    return _of_images(new_vit(weights=None), [8, 16, 32])


def convnext_tiny() -> Made:
    import timm

    return _of_images(timm.create_model("convnext_tiny"), [8, 16, 32])


def mobilenetv3() -> Made:
    import timm

    return _of_images(timm.create_model("mobilenetv3_large_100"), [16, 32, 64])


def bert() -> Made:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_hidden_layers=6
    )
    return _of_tokens(BertModel(config, add_pooling_layer=False), config, "last_hidden_state")


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=6, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, use_cache=False)
    return _of_tokens(GPT2LMHeadModel(config), config, "logits")


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

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
    from transformers import Qwen2Config, Qwen2ForCausalLM

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
