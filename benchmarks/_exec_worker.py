"""One process of shared_execs.py: one workload, with stock's executables or with ours.

Takes commands as JSON lines, answers likewise.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING, Any

from _worker import LATE_IMPORTS, answers_alone, require_settings, serve

if TYPE_CHECKING:
    from _exec_captures import ExecCaptures

_LATE_IMPORTS = {**LATE_IMPORTS, "deep": "transformers.models.gemma2.modeling_gemma2"}


class ExecServer:
    """The commands. Each takes and returns what JSON can carry; keys of objects become strings."""

    def __init__(self, workload: str, config: str) -> None:
        import torch  # noqa: F401  # slow, and needs no device
        from _exec_workloads import EXEC_WORKLOADS

        if workload in _LATE_IMPORTS:
            importlib.import_module(_LATE_IMPORTS[workload])
        self._workload = EXEC_WORKLOADS[workload]
        self._config = config
        self._captures: ExecCaptures

    def imported(self) -> None:
        """Answers once all imports are done."""

    def prepare(self) -> list[int]:
        """Makes the workload and warms it up; returns its sizes."""
        import torch
        from _exec_captures import ExecCaptures

        device = torch.device("cuda", torch.cuda.current_device())
        captures = ExecCaptures(self._workload, device, self._config)
        captures.warm_up()
        require_settings(self._config)
        self._captures = captures
        return list(captures.workload.keys)

    def memory(self, seed: int) -> dict[str, Any]:
        return self._captures.memory(seed)

    def ready(self) -> dict[str, float]:
        return self._captures.ready()

    def replay_same(self, key: int, times: int) -> dict[str, float]:
        return self._captures.replay_same(key, times)

    def decode(self, before: list[int], timed: list[int], read_back: bool) -> float:
        return self._captures.decode(before, timed, read_back)

    def switch(self, times: int) -> dict[str, list[int]]:
        return self._captures.switch(times)

    def updates_of_switches(self, times: int) -> dict[str, int]:
        return self._captures.updates_of_switches(times)

    def compare_results(self, replays: int, seed: int) -> int:
        return self._captures.compare_results(replays, seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--allocator", required=True, help="stock, or what bounds our executables")
    options = parser.parse_args()
    return serve(answers_alone(), lambda: ExecServer(options.workload, options.allocator))


if __name__ == "__main__":
    sys.exit(main())
