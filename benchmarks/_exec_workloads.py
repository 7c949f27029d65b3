"""What shared_execs.py captures beyond workloads.py: a deep model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from workloads import VLLM_BATCH_SIZES, WORKLOADS

from cudagraph_pool._workloads import Workload, randomize


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
        self._vocabulary = config.vocab_size

    def fill(self, key: int, seed: int) -> None:
        generator = torch.Generator(self._tokens.device).manual_seed(seed)
        self._tokens[:key].random_(0, self._vocabulary, generator=generator)

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


EXEC_WORKLOADS: dict[str, Callable[[torch.device], Workload]] = {
    **WORKLOADS,
    "deep": DeepDecoder,
}
