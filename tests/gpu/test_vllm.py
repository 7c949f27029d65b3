"""vLLM's own custom all-reduce in captures of two processes, which share a GPU if there is but one.
It needs vLLM.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
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
