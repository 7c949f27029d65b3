"""What vllm_engine.py adds to each of vLLM's worker processes, by its ``worker_extension_cls``: the
captures are measured, and the random weights are better. vLLM imports this before it makes a model.
"""

from __future__ import annotations

import functools
import time
import zlib
from typing import Any

import torch
from _pools import measure_pools
from vllm.compilation.counter import compilation_counter
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.model_loader import dummy_loader
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

_found: dict[str, float] = {}
_parameters = 0


class Figures:
    """vLLM's worker gets this method."""

    def capture_figures(self: Any) -> dict[str, float]:
        """Of ``capture_model``: what the device had less after it, and the pools in the end."""
        return {**_found, "estimate": self.cudagraph_memory_estimate}


def _measure_captures(runner: Any) -> None:
    capture_model = runner.capture_model

    @functools.wraps(capture_model)
    def measured(self: Any) -> Any:
        before = _now()
        began = time.perf_counter()
        result = capture_model(self)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        after = _now()
        _found.update(after, capture_seconds=seconds)
        for name in ("device", "captures", "captures_of_ours"):
            _found[name] -= before[name]
        return result

    runner.capture_model = measured


def _now() -> dict[str, int]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    captures = compilation_counter.num_cudagraph_captured
    return {"device": total - free, "captures": captures, **measure_pools()}


@torch.no_grad()
def _initialize(module: torch.nn.Module, model_config: Any) -> None:
    """Weights that pass signals on: vLLM's own are at most 0.001, norms' too, and equal in every
    layer and process, so that tokens would say little.
    """
    global _parameters
    for name, parameter in module.named_parameters(recurse=False):
        # What several processes have alike is of one dimension.
        whose = get_tensor_model_parallel_rank() if parameter.dim() > 1 else "all"
        chance = torch.Generator(parameter.device)
        chance.manual_seed(zlib.crc32(f"{_parameters} {name} {whose}".encode()))
        if parameter.dim() > 1:
            bound = (3 / parameter.shape[-1]) ** 0.5
            parameter.uniform_(-bound, bound, generator=chance)
        else:
            parameter.uniform_(0.95, 1.05, generator=chance)
        _parameters += parameter.numel()


for _runner in (RunnerV1, RunnerV2):
    _measure_captures(_runner)
dummy_loader.initialize_dummy_weights = _initialize
