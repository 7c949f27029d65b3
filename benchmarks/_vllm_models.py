"""The models of vllm_engine.py: a configuration each, for random weights, and what is asked."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

Prompt = dict[str, Any]

PROMPTS = 64
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
_SHAPE = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "vocab_size"
).split()
# Of 1.1 and 8.0 billion parameters, the latter Llama 3's; and one layer that drafts for the first.
_SHAPES = {
    "1b": (2048, 8192, 16, 16, 4, 32_000),
    "8b": (4096, 14_336, 32, 32, 8, 128_256),
    "eagle": (2048, 8192, 1, 16, 4, 32_000),
    "vl": (1024, 4096, 8, 8, 4, 32_000),
}
# The first ids, of what a processor of Qwen2.5-VL asks its tokenizer for.
_SPECIAL = (
    "<unk> <|endoftext|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
).split()
_VISION_START, _VISION_END, _IMAGE, _VIDEO = range(3, 7)
_PIXELS = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
_PIXELS |= {"min_pixels": 4 * 28 * 28, "max_pixels": 64 * 28 * 28}
_VISION = {
    "depth": 4,
    "hidden_size": 512,
    "num_heads": 8,
    "intermediate_size": 1024,
    "out_hidden_size": 1024,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [1, 3],
    "in_channels": 3,
    "hidden_act": "silu",
}


def arguments(model: str) -> dict[str, Any]:
    """Those of an engine that only this model has."""
    name, _, drafter = model.partition("-")
    folder = _vl() if name == "vl" else _folder(name, LLAMA)
    chosen: dict[str, Any] = {"model": str(folder)}
    if drafter:
        drafts = str(_folder(drafter, LLAMA))
        chosen["speculative_config"] = {
            "method": drafter,
            "model": drafts,
            "num_speculative_tokens": 3,
        }
    if name == "vl":
        chosen["compilation_config"] = {"cudagraph_mm_encoder": True}
        chosen["limit_mm_per_prompt"] = {"image": 1, "video": 0}
        chosen["mm_hasher_algorithm"] = "sha256"  # blake3 is not everywhere
    else:
        chosen["skip_tokenizer_init"] = True
    return chosen


def prompts(model: str) -> list[Prompt]:
    chance = random.Random(0)

    def text(least: int, most: int) -> list[int]:
        return [chance.randrange(7, 31_000) for _ in range(chance.randint(least, most))]

    if model != "vl":
        return [{"prompt_token_ids": text(16, 120)} for _ in range(PROMPTS)]
    from PIL import Image

    asked = []
    for _ in range(PROMPTS):
        size = (28 * chance.randint(2, 8), 28 * chance.randint(2, 8))
        image = Image.frombytes("RGB", size, chance.randbytes(3 * size[0] * size[1]))
        ids = [*text(8, 60), _VISION_START, _IMAGE, _VISION_END, *text(8, 60)]
        asked.append({"prompt_token_ids": ids, "multi_modal_data": {"image": image}})
    return asked


def _folder(name: str, base: dict[str, Any], **files: Any) -> Path:
    """Always the same one for a model: what vLLM keeps of compiled code goes by it."""
    folder = Path(tempfile.gettempdir(), "vllm_engine", name)
    folder.mkdir(parents=True, exist_ok=True)
    shape = dict(zip(_SHAPE, _SHAPES[name], strict=True))
    for file, content in {"config": {**base, **shape}, **files}.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    return folder


def _vl() -> Path:
    """Of Qwen2.5-VL; its tokenizer knows nothing but what stands for images."""
    base = {
        **LLAMA,
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": _VISION,
        "vision_start_token_id": _VISION_START,
        "vision_end_token_id": _VISION_END,
        "image_token_id": _IMAGE,
        "video_token_id": _VIDEO,
        "eos_token_id": 2,
    }
    ids = {token: number for number, token in enumerate(_SPECIAL)}
    words = {f"w{number}": number for number in range(len(ids), _SHAPES["vl"][-1])}
    added = [
        {"id": number, "content": token, "special": True, "single_word": False, "lstrip": False}
        | {"rstrip": False, "normalized": False}
        for token, number in ids.items()
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {**ids, **words}, "unk_token": "<unk>"},
    }
    processor = "Qwen2_5_VLProcessor"
    return _folder(
        "vl",
        base,
        tokenizer=tokenizer,
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": processor,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": "<unk>",
        },
        preprocessor_config={
            **_PIXELS,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": processor,
        },
        video_preprocessor_config={
            **_PIXELS,
            "video_processor_type": "Qwen2VLVideoProcessor",
            "processor_class": processor,
        },
    )
