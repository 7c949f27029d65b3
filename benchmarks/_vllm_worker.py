"""What vllm_engine.py adds to each of vLLM's worker processes, by its ``worker_extension_cls``: the
captures and the estimate are measured, and the random weights are better. vLLM imports this before
it makes a model.
"""

from __future__ import annotations

import functools
import logging
import time
from typing import Any

import torch
from _engine import draw_weight
from _pools import count_captures, device_bytes, measure_pools
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
    return {"device": device_bytes(), "captures": _captures(), **measure_pools()}


@torch.no_grad()
def _initialize(weight: torch.Tensor, *args: Any, name: str = "", **kwargs: Any) -> None:
    """vLLM's own are equal in every process, too."""
    global _weights
    if weight.device.type == "meta" or weight.dtype not in (torch.bfloat16, torch.float32):
        _vllm_weight(weight, *args, name=name, **kwargs)
        return
    # What several processes have alike is of one dimension.
    whose = get_tensor_model_parallel_rank() if weight.dim() > 1 else "all"
    draw_weight(weight, f"{_weights} {name} {whose}", name)
    _weights += weight.numel()


for _runner in (RunnerV1, RunnerV2):
    _measure_captures(_runner)
logging.getLogger("vllm.cudagraph_pool").addFilter(_hear)
dummy_loader.initialize_single_dummy_weight = _initialize
