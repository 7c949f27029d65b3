"""What sglang_engine.py adds to SGLang's scheduler, as its plugin: captures are measured, and the
random weights are better.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_SCHEDULER = "sglang.srt.managers.scheduler"


def measure_captures() -> None:
    """SGLang calls it in its other processes, too."""
    if _SCHEDULER not in sys.modules:
        return
    import torch
    from _pools import count_captures, device_bytes, measure_pools
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_loader import loader
    from sglang_engine import FIGURES

    captures, native = count_captures(), ModelRunner.init_cuda_graphs

    @functools.wraps(native)
    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, began = device_bytes(), time.perf_counter()
        result = native(self, *args, **kwargs)
        torch.cuda.synchronize()
        found = {
            "capture_seconds": time.perf_counter() - began,
            "device": device_bytes() - before,
            "captures": captures(),
            "kv_tokens": self.max_total_num_tokens,
            **measure_pools(),
        }
        Path(os.environ[FIGURES]).write_text(json.dumps(found))
        return result

    ModelRunner.init_cuda_graphs = measured
    loader.initialize_dummy_weights = _initialize


def _initialize(model: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's own are all of one seed."""
    import torch
    from _engine import draw_weight

    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if not torch.is_floating_point(weight) or "cos_sin" in name or "inv_freq" in name:
                continue
            draw_weight(weight, name, name)
