"""Models of libraries with random weights, and what they are called with: what library_models.py,
footprint.py, model_traces.py and others choose from. Each library is imported when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

# Without what is random.
BERT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2: dict[str, Any] = {
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "use_cache": False,
}
# Without what is random, or depends on the time.
WAV2VEC2: dict[str, Any] = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
}


def vision(name: str, **options: Any) -> nn.Module:
    """One of torchvision."""
    return import_module("torchvision").models.get_model(name, weights=None, **options)


def video(name: str) -> nn.Module:
    """One of torchvision, whose inputs are clips."""
    return getattr(import_module("torchvision").models.video, name)(weights=None)


def segmentation(name: str) -> nn.Module:
    """One of torchvision that stands on another."""
    return vision(name, weights_backbone=None)


def timm(name: str) -> nn.Module:
    """One of timm."""
    return import_module("timm").create_model(name)


def text(name: str, options: Mapping[str, Any] | None = None, **config: Any) -> nn.Module:
    """One of transformers.

    Args:
        name: of its class.
        options: of that, besides the configuration.
        config: where it is not the default.
    """
    kind = getattr(import_module("transformers"), name)
    return kind(kind.config_class(**config), **(options or {}))


class Output(nn.Module):  # type: ignore[misc]
    """One tensor of what a model of transformers returns."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model
        self._name = name

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.model(input_ids=tokens)[self._name]
        return output


def images(side: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[int], Tensor]:
    """Makes so many square images."""
    return lambda size: torch.zeros(size, 3, side, side, dtype=dtype)


def tokens(batch: int) -> Callable[[int], Tensor]:
    """Makes texts of so many tokens."""
    return lambda size: torch.zeros(batch, size, dtype=torch.long)
