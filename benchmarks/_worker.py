"""One process of const_memory.py: one workload under one allocator.

Takes commands as JSON lines, answers likewise; multi_stream.py's process does as well.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

from _team import SETTINGS

# What a workload imports late; imported here while the parent still measures something else.
LATE_IMPORTS = {
    "resnet50": "torchvision.models",
    "gpt2": "transformers.models.gpt2.modeling_gpt2",
}


class Server:
    """The commands. Each takes and returns what JSON can carry; keys of objects become strings."""

    def __init__(self, workload: str, allocator: str) -> None:
        import torch  # noqa: F401  # slow, and needs no device
        from workloads import WORKLOADS

        from cudagraph_pool import _measure

        if workload in LATE_IMPORTS:
            importlib.import_module(LATE_IMPORTS[workload])
        self._measure = _measure
        self._workload = WORKLOADS[workload]
        self._allocator = allocator
        self._captures: Any = None

    def prepare(self) -> list[int]:
        """Makes the workload and warms it up; returns its sizes."""
        import torch

        device = torch.device("cuda", torch.cuda.current_device())
        captures = self._measure.Captures(self._workload, device, ours=self._allocator == "ours")
        captures.warm_up()
        require_settings(self._allocator)
        self._captures = captures
        return list(captures.workload.keys)

    def capture(self, order: list[int]) -> dict[str, Any]:
        return asdict(self._captures.capture(order))

    def replay(self, times: int) -> float:
        seconds: float = self._captures.replay(times)
        return seconds

    def compare(self, order: list[int], seed: int, digests: list[int]) -> dict[int, Any]:
        compared = self._captures.compare(order, seed, digests)
        return {key: asdict(comparison) for key, comparison in compared.items()}

    def minimum(self, order: list[int]) -> int:
        least: int = self._captures.minimum_bytes(order)
        return least


def require_settings(allocator: str) -> None:
    """Raises if PyTorch's own allocator is not set as this allocator wants it."""
    import torch

    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    for name, setting in SETTINGS.items():
        found = settings.get(setting, False)  # not every release has all of them
        if found != (allocator == name):
            raise RuntimeError(f"{setting} is {found} under {allocator}")


def serve(answers: TextIO, make: Callable[[], object]) -> int:
    """Answers until the parent hangs up or something fails, which is then the last answer."""

    def answer(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        server = make()
        for line in sys.stdin:
            request = json.loads(line)
            command = request.pop("command")
            answer({"result": getattr(server, command)(**request)})
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def answers_alone() -> TextIO:
    """The standard output. Libraries may print: what they print goes to standard error from now
    on, and does not stand between the answers.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--allocator", required=True)
    options = parser.parse_args()
    return serve(answers_alone(), lambda: Server(options.workload, options.allocator))


if __name__ == "__main__":
    sys.exit(main())
