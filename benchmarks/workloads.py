"""What is captured by const_memory.py and by shared_execs.py. Each workload that const_memory.py
measures by default repeats what one of the recorded traces captured.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
from _models import GPT2, text
from _workloads import (
    DecoderShape,
    DecodeStep,
    SeedScript,
    Workload,
    randomize,
    rms_norm,
)
from library_models import KEPT, MODELS, LibraryModel
from torch import Tensor, nn
from two_stream_models import Branches, Rows, WeightStreaming, linears
from workspace_models import SHAPES, WORKSPACE_BYTES, Products

# The batch sizes that vLLM captures by default.
VLLM_BATCH_SIZES = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]


class GatedMlp(Rows):
    """A gated feed-forward stack with norms, at 16 to 2048 rows."""

    name = "mlp"
    per_key = 16
    keys = range(1, 129)

    def __init__(
        self, device: torch.device, layers: int = 4, hidden: int = 4096, intermediate: int = 11008
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self._gate = linears(layers, hidden, intermediate, device, generator)
        self._up = linears(layers, hidden, intermediate, device, generator)
        self._down = linears(layers, intermediate, hidden, device, generator)
        super().__init__(device, hidden)

    @torch.no_grad()
    def step(self, key: int) -> None:
        x = self.given(key)
        for gate_of, up_of, down_of in zip(self._gate, self._up, self._down, strict=True):
            gate = nn.functional.silu(gate_of(x), inplace=True)
            h = up_of(x).mul_(gate)
            del gate
            x = x + down_of(h)
            x = rms_norm(x)
        self.outputs(key)[0].copy_(x)


def new_gpt2() -> nn.Module:
    """One of six layers that is trained."""
    return text("GPT2LMHeadModel", **GPT2, n_layer=6, attn_implementation="sdpa").train()


class Gpt2Training(Workload):
    """Forward and backward of a six-layer GPT-2 from transformers, batch 8, bfloat16 autocast.

    The key is the length.
    The gradients are static: a step adds to them.
    """

    name = "gpt2"
    keys = range(64, 513, 64)

    _batch = 8

    def __init__(self, device: torch.device) -> None:
        # Attention's default backward adds up in whatever order its blocks finish. What is to be
        # compared bit for bit must not. Filling fresh memory, which this mode does besides, would
        # hide what graphs leave to each other.
        # cuDNN's attention heeds the mode only where it is strict, and then cuBLAS wants this.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.manual_seed(0)
        with torch.device(device):
            self._model = new_gpt2()
        self._parameters = list(self._model.parameters())
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._tokens = torch.zeros(self._batch * self.keys[-1], dtype=torch.int64, device=device)
        self._loss = torch.zeros((), device=device)

    def fill(self, key: int, seed: int) -> None:
        generator = torch.Generator(self._tokens.device).manual_seed(seed)
        tokens = self._tokens[: self._batch * key]
        tokens.random_(0, self._model.config.vocab_size, generator=generator)

    def step(self, key: int) -> None:
        tokens = self._tokens[: self._batch * key].view(self._batch, key)
        # transformers leaves the mask out in eager mode and makes one under capture. Made here, so
        # that both run the same kernels.
        mask = torch.ones(key, key, dtype=torch.bool, device=tokens.device).tril()
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            loss = self._model(
                input_ids=tokens,
                attention_mask=mask.expand(self._batch, 1, key, key),
                labels=tokens,
            ).loss
        loss.backward()
        self._loss.copy_(loss.detach())

    def outputs(self, key: int) -> list[Tensor]:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return [self._loss, *gradients]

    def clear(self, key: int) -> None:
        self._loss.fill_(-77)
        torch._foreach_zero_(self.outputs(key)[1:])


LLAMA = DecoderShape(
    layers=8, hidden=2048, heads=16, kv_heads=8, intermediate=8192, vocabulary=32_000, context=128
)


def llama(device: torch.device) -> DecodeStep:
    return DecodeStep("llama", VLLM_BATCH_SIZES, LLAMA, device)


class DeepDecoder(Workload):
    """A forward pass of a transformer of 32 layers and small dimensions, from transformers, with
    random weights and without compilation: well above 2,000 kernels, hardly any of which takes
    longer than its launch. The key is the batch size; of each sequence of a few tokens the last
    one's logits are kept.
    """

    name = "deep"
    keys = VLLM_BATCH_SIZES[:16]

    def __init__(self, device: torch.device, layers: int = 32, length: int = 4) -> None:
        # Gemma 2: four norms a layer and attention made of plain kernels.
        from transformers import Gemma2Config, Gemma2ForCausalLM

        config = Gemma2Config(
            num_hidden_layers=layers,
            hidden_size=256,
            intermediate_size=512,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            vocab_size=1024,
            max_position_embeddings=128,
            use_cache=False,
            attn_implementation="eager",
        )
        with torch.device(device):
            self._model = Gemma2ForCausalLM(config).to(torch.bfloat16).eval()
            randomize(self._model, torch.Generator(device).manual_seed(0))
            # Made here: transformers would look at the tokens to make the masks.
            infinity = torch.full((length, length), float("-inf"), dtype=torch.bfloat16)
            self._mask = infinity.triu(1)
            self._positions = torch.arange(length)[None]
            rows = self.keys[-1]
            self._tokens = torch.zeros(rows, length, dtype=torch.int64)
            self._logits = torch.zeros(rows, config.vocab_size, dtype=torch.bfloat16)

    def fill(self, key: int, seed: int) -> None:
        generator = torch.Generator(self._tokens.device).manual_seed(seed)
        self._tokens[:key].random_(0, self._model.config.vocab_size, generator=generator)

    @torch.no_grad()
    def step(self, key: int) -> None:
        mask = self._mask.expand(key, 1, *self._mask.shape)
        logits = self._model(
            input_ids=self._tokens[:key],
            attention_mask={"full_attention": mask, "sliding_attention": mask},
            position_ids=self._positions,
            use_cache=False,
            logits_to_keep=1,
        ).logits
        self._logits[:key].copy_(logits[:, 0])

    def outputs(self, key: int) -> list[Tensor]:
        return [self._logits[:key]]


WORKLOADS: dict[str, Callable[[torch.device], Workload]] = {
    "seed": SeedScript,
    "mlp": GatedMlp,
    "llama": llama,
    "gpt2": Gpt2Training,
    "streaming": WeightStreaming,
    "branches": Branches,
    "deep": DeepDecoder,
    **{
        name + end: functools.partial(
            Products, name=name + end, keys=keys, layers=layers, workspace_bytes=size
        )
        for name, (keys, layers) in SHAPES.items()
        for end, size in (("", 0), ("-workspace", WORKSPACE_BYTES))
    },
    **{
        name: functools.partial(LibraryModel, name=name)
        for model in MODELS
        for name in (model, model + KEPT)
    },
}
