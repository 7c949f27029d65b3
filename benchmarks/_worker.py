"""A process that captures under one allocator, for const_memory.py, shared_execs.py and
multi_stream.py: what _team.Worker starts.

Imports at once, and then takes commands as JSON lines and answers likewise: ``prepare`` to make
what is captured and warm it up, and any method of that.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from _apart import answers_alone
from _team import SETTINGS

# Makes what is captured, once there is a device.
Maker = Callable[[Any], Any]


def _graphs(names: Sequence[str], allocator: str) -> Maker:
    from workloads import WORKLOADS

    from cudagraph_pool._measure import Captures

    return lambda device: Captures(WORKLOADS[names[0]], device, ours=allocator == "ours")


def _execs(names: Sequence[str], allocator: str) -> Maker:
    from _exec_captures import ExecCaptures
    from workloads import WORKLOADS

    return lambda device: ExecCaptures(WORKLOADS[names[0]], device, allocator)


def _streams(names: Sequence[str], allocator: str) -> Maker:
    """A program's key is its place among the names, each that of a configuration and a seed."""
    from _stream_captures import StreamCaptures
    from stream_programs import by_name, generate

    drawn = [name.rpartition("@") for name in names]
    programs = [generate(by_name(configuration), int(seed)) for configuration, _, seed in drawn]
    return lambda device: StreamCaptures(programs, device, ours=allocator == "ours")


KINDS = {"graphs": _graphs, "execs": _execs, "streams": _streams}


class Server:
    """Answers commands with what JSON can carry; keys of objects become strings."""

    def __init__(self, kind: str, names: Sequence[str], allocator: str) -> None:
        import torch  # noqa: F401  # slow, and needs no device

        self._make = KINDS[kind](names, allocator)
        self._allocator = allocator
        self._captures: Any = None

    def answer(self, command: str, **arguments: Any) -> Any:
        if command == "prepare":
            return self._prepare()
        return getattr(self._captures, command)(**arguments)

    def _prepare(self) -> list[int]:
        """Makes what is captured and warms it up; returns its sizes."""
        import torch

        captures = self._make(torch.device("cuda", torch.cuda.current_device()))
        captures.warm_up()
        require_settings(self._allocator)
        self._captures = captures
        return list(captures.workload.keys)


def require_settings(allocator: str) -> None:
    """Raises if PyTorch's own allocator is not set as this allocator wants it."""
    import torch

    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    for name, setting in SETTINGS.items():
        found = settings.get(setting, False)  # not every release has all of them
        if found != (allocator == name):
            raise RuntimeError(f"{setting} is {found} under {allocator}")


def serve(answers: TextIO, make: Callable[[], Server]) -> int:
    """Answers until the parent hangs up or something fails, which is then the last answer."""

    def say(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what, default=asdict) + "\n")
        answers.flush()

    try:
        server = make()
        for line in sys.stdin:
            say({"result": server.answer(**json.loads(line))})
    except Exception as error:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("names", nargs="+", help="a workload, or programs as CONFIGURATION@SEED")
    parser.add_argument("--allocator", required=True, help="or what bounds our executables")
    options = parser.parse_args()
    return serve(answers_alone(), lambda: Server(options.kind, options.names, options.allocator))


if __name__ == "__main__":
    sys.exit(main())
