"""One run of vllm_engine.py: an unedited engine in a process that may have the pool enabled.

python _vllm_run.py '{"model": "1b", "parallel": 1, ...}'
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

from _apart import answers_alone
from _engine import Row, digest, most
from _vllm_models import PROMPTS, arguments, prompts
from vllm import LLM, SamplingParams


def engine(run: Row) -> dict[str, object]:
    """The arguments of the engine."""
    chosen = arguments(run["model"])
    if run["cudagraph_mode"] != "default":
        chosen.setdefault("compilation_config", {})["cudagraph_mode"] = run["cudagraph_mode"]
    return {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "seed": 0,
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False,  # each call does the same work
        "tensor_parallel_size": run["parallel"],
        "disable_custom_all_reduce": run["all_reduce"] == "nccl",
        "worker_extension_cls": "_vllm_worker.Figures",
        **chosen,
    }


def measure(run: Row) -> Row:
    began = time.perf_counter()
    llm = LLM(**engine(run))
    start_seconds = time.perf_counter() - began
    asked = prompts(run["model"])

    def generate(first: int, last: int, tokens: int) -> list[list[int]]:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        answers = llm.generate(asked[first:last], sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    # Four prompts together fit a captured size; all of them do only once they are read.
    answers = [
        tokens for first in range(0, PROMPTS, 4) for tokens in generate(first, first + 4, 16)
    ]
    answers += generate(0, PROMPTS, run["tokens"])
    rates = []
    for _ in range(run["calls"]):
        began = time.perf_counter()
        generate(0, PROMPTS, run["tokens"])
        rates.append(PROMPTS * run["tokens"] / (time.perf_counter() - began))
    cache = llm.llm_engine.vllm_config.cache_config
    return {
        **most(llm.collective_rpc("capture_figures")),
        "start_seconds": start_seconds,
        "kv_tokens": cache.num_gpu_blocks * cache.block_size,
        "tokens_per_second": statistics.median(rates),
        "digest": digest(answers),
    }


if __name__ == "__main__":
    stdout = answers_alone()
    print(json.dumps(measure(json.loads(sys.argv[1]))), file=stdout, flush=True)
    sys.stderr.flush()
    os._exit(0)  # vLLM's way out takes seconds, and is not measured
