"""One run of vllm_engine.py: an unedited engine in a process that may have the pool enabled.

python _vllm_run.py '{"model": "1b", "parallel": 1, ...}'
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from _apart import answers_alone
from _engine import Row, digest, most
from vllm import LLM, SamplingParams

_BASE = {
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
# Of 1.1 and 8.0 billion parameters, the latter Llama 3's.
SHAPES = {
    "1b": (2048, 8192, 16, 16, 4, 32_000),
    "8b": (4096, 14_336, 32, 32, 8, 128_256),
}


def measure(run: Row) -> Row:
    mode = {} if run["cudagraph_mode"] == "default" else {"cudagraph_mode": run["cudagraph_mode"]}
    llm = LLM(
        model=str(_folder(run["model"])),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=256,
        seed=0,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,  # each call does the same work
        tensor_parallel_size=run["parallel"],
        disable_custom_all_reduce=run["all_reduce"] == "nccl",
        worker_extension_cls="_vllm_worker.Figures",
        compilation_config=mode,
    )
    chance = random.Random(0)
    prompts = [
        {"prompt_token_ids": [chance.randrange(5, 31_000) for _ in range(chance.randint(16, 120))]}
        for _ in range(64)
    ]

    def generate(first: int, last: int, tokens: int) -> list[list[int]]:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        answers = llm.generate(prompts[first:last], sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    # Four prompts together fit a captured size; all of them do only once they are read.
    answers = [tokens for first in range(0, 64, 4) for tokens in generate(first, first + 4, 16)]
    answers += generate(0, 64, run["tokens"])
    rates = []
    for _ in range(run["calls"]):
        began = time.perf_counter()
        generate(0, 64, run["tokens"])
        rates.append(64 * run["tokens"] / (time.perf_counter() - began))
    cache = llm.llm_engine.vllm_config.cache_config
    return {
        **most(llm.collective_rpc("capture_figures")),
        "kv_tokens": cache.num_gpu_blocks * cache.block_size,
        "tokens_per_second": statistics.median(rates),
        "digest": digest(answers),
    }


def _folder(model: str) -> Path:
    """Always the same one for a model: what vLLM keeps of compiled code goes by it."""
    folder = Path(tempfile.gettempdir(), "vllm_engine", model)
    folder.mkdir(parents=True, exist_ok=True)
    shape = dict(zip(_SHAPE, SHAPES[model], strict=True))
    (folder / "config.json").write_text(json.dumps({**_BASE, **shape}))
    return folder


if __name__ == "__main__":
    stdout = answers_alone()
    print(json.dumps(measure(json.loads(sys.argv[1]))), file=stdout, flush=True)
    sys.stderr.flush()
    os._exit(0)  # vLLM's way out takes seconds, and is not measured
