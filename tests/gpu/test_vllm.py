"""vLLM itself: its custom all-reduce in captures of two processes, which share a GPU if there is
but one, and an engine that sleeps.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from entry_points import environment

# Two all-reduces in one graph: the second may not overwrite what the first still reads.
PROGRAM = """
import logging, sys, torch
import torch.distributed as dist
from vllm.distributed.device_communicators import custom_all_reduce
from vllm.plugins import load_general_plugins

logging.basicConfig(level=logging.INFO)  # an engine would have arranged vLLM's log
load_general_plugins()
rank = int(sys.argv[1])
device = torch.device("cuda", rank % torch.cuda.device_count())
torch.cuda.set_device(device)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
custom_all_reduce._can_p2p = lambda rank, world_size: True  # vLLM does not ask for one GPU twice
custom = custom_all_reduce.CustomAllreduce(dist.group.WORLD, device)
assert not custom.disabled
x = torch.zeros(1 << 18, device=device, dtype=torch.bfloat16)
graph = torch.cuda.CUDAGraph()
with custom.capture():
    custom.custom_all_reduce(x)
    with torch.cuda.graph(graph):
        first = custom.custom_all_reduce(x + 1)
        second = custom.custom_all_reduce(first * 2 + rank)
for value in range(20):
    x.fill_(value + rank)
    dist.barrier()
    graph.replay()
    for found, wanted in ((first, 2 * value + 3), (second, 8 * value + 13)):
        assert (found == wanted).all(), (value, found.unique(), wanted)
from cudagraph_pool._adapter import load_adapter
from cudagraph_pool.switch import is_enabled
print("captures of ours:", load_adapter().capture_counts()["ours"] if is_enabled() else 0)
"""


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("request_text", ["0", "1"])
def test_custom_all_reduce(tmp_path: Path, request_text: str) -> None:
    variables = {"GLOO_SOCKET_IFNAME": "lo", "VLLM_NO_USAGE_STATS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM, str(rank), str(tmp_path / "store")],
            env=environment(tmp_path, CUDAGRAPH_POOL=request_text, **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()  # one waits on the GPU for the other
    for process, text in zip(processes, said, strict=True):
        assert process.returncode == 0, text
        assert text.count("all-reduce copies into its buffer") == int(request_text), text
        assert f"captures of ours: {request_text}" in text


def has_sleep_backends() -> bool:
    try:
        major, minor = metadata.version("vllm").split(".")[:2]
    except metadata.PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (0, 30)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "vocab_size": 8192,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
# By vLLM's own dummy weights, next to nothing, a wrong layer would change no token.
SLEEPER = """
import sys, torch
from vllm import LLM, SamplingParams
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.model_executor.model_loader import dummy_loader
import cudagraph_pool as cgp

@torch.no_grad()
def initialize(weight, *args, **kwargs):
    weight.normal_(0, weight[0].numel() ** -0.5) if weight.dim() > 1 else weight.fill_(1)

dummy_loader.initialize_single_dummy_weight = initialize
llm = LLM(
    sys.argv[1],
    load_format="dummy",
    skip_tokenizer_init=True,
    max_model_len=1024,
    max_num_seqs=64,
    gpu_memory_utilization=0.3,
    enable_prefix_caching=False,
    enable_sleep_mode=True,
    sleep_mode_backend="cudagraph_pool",
)

def generate():
    prompts = [{"prompt_token_ids": [7 * row + n for n in range(row + 1)]} for row in range(60)]
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]

def used():
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free

def pools():
    return sum(pool["reserved_bytes"] for pool in cgp.stats()["pools"])

generate()
tokens = generate()
assert len({token for row in tokens for token in row}) > 100
assert cgp.stats()["captures"]["base"] == 0 < cgp.stats()["captures"]["ours"]
for wakes in ([None], [["weights"], ["kv_cache"]], [["kv_cache"], ["weights"]]):
    device, reserved = used(), pools()
    theirs = CuMemAllocator.get_instance().get_current_usage()
    llm.sleep(level=1)
    kept = pools()
    assert kept < reserved, (kept, reserved)
    given = device - used()
    assert given >= theirs + reserved - kept, (given, theirs, reserved, kept)
    for tags in wakes:
        assert pools() == kept
        llm.wake_up(tags)
    assert pools() == reserved, (pools(), reserved)
    assert generate() == tokens
print("tokens are equal")
"""


@pytest.mark.whole_gpu
@pytest.mark.skipif(not has_sleep_backends(), reason="needs vLLM 0.30 or newer")
def test_sleep(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    variables = {
        "CUDAGRAPH_POOL": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", SLEEPER, str(tmp_path)],
        env=environment(tmp_path, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert "tokens are equal" in done.stdout
    assert done.stdout.count("graph pools gave back") == 3
