"""What vllm_engine.py adds to each of vLLM's worker processes, by its ``worker_extension_cls``: the
captures and the estimate are measured, and the random weights are better. vLLM imports this before
it makes a model.
"""

from __future__ import annotations

import functools
import logging
import time
import zlib
from typing import Any

import torch
from _pools import count_captures, measure_pools
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.model_loader import dummy_loader
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

import cudagraph_pool as cgp

_captures = count_captures()
_found: dict[str, float] = {"saved": 0}
_device_after = 0
_weights = 0
_vllm_weight = dummy_loader.initialize_single_dummy_weight


class Figures:
    """vLLM's worker gets this method."""

    def capture_figures(self: Any) -> dict[str, float]:
        """Of ``capture_model``: what the device had less after it, and the pools in the end."""
        execs = cgp.stats()["execs"]
        return {
            **_found,
            "estimate": self.cudagraph_memory_estimate,
            "used_later": _now()["device"] - _device_after,
            "execs": sum(own["execs"] for own in execs),
        }


def _measure_captures(runner: Any) -> None:
    capture_model = runner.capture_model

    @functools.wraps(capture_model)
    def measured(self: Any, **how: Any) -> Any:
        global _device_after
        if how.get("profile_only"):  # for the estimate, before the cache is there
            return capture_model(self, **how)
        before = _now()
        began = time.perf_counter()
        result = capture_model(self, **how)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        after = _now()
        _found.update(after, capture_seconds=seconds)
        _device_after = after["device"]
        for name in ("device", "captures", "captures_of_ours"):
            _found[name] -= before[name]
        return result

    runner.capture_model = measured


def _hear(record: logging.LogRecord) -> bool:
    """How much less was set aside for graphs than vLLM would have, as our plugin says. A filter:
    vLLM takes handlers away when it arranges its log.
    """
    if record.msg.startswith("sets aside") and isinstance(record.args, tuple):
        _found["saved"] = -float(str(record.args[1])) * (1 << 20)
    return True


def _now() -> dict[str, int]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return {"device": total - free, "captures": _captures(), **measure_pools()}


@torch.no_grad()
def _initialize(weight: torch.Tensor, *args: Any, name: str = "", **kwargs: Any) -> None:
    """Weights that pass signals on: vLLM's own are at most 0.001, norms' too, and equal in every
    layer and process, so that tokens would say little.
    """
    global _weights
    if weight.device.type == "meta" or weight.dtype not in (torch.bfloat16, torch.float32):
        _vllm_weight(weight, *args, name=name, **kwargs)
        return
    # What several processes have alike is of one dimension.
    whose = get_tensor_model_parallel_rank() if weight.dim() > 1 else "all"
    chance = torch.Generator(weight.device)
    chance.manual_seed(zlib.crc32(f"{_weights} {name} {whose}".encode()))
    if weight.dim() > 1:
        bound = (3 / weight[0].numel()) ** 0.5
        weight.uniform_(-bound, bound, generator=chance)
    elif "bias" in name:
        weight.uniform_(-0.05, 0.05, generator=chance)
    else:
        weight.uniform_(0.95, 1.05, generator=chance)
    _weights += weight.numel()


for _runner in (RunnerV1, RunnerV2):
    _measure_captures(_runner)
logging.getLogger("vllm.cudagraph_pool").addFilter(_hear)
dummy_loader.initialize_single_dummy_weight = _initialize
