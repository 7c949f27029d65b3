"""A process that captures under one allocator, for const_memory.py, shared_execs.py, leases.py and
multi_stream.py: what _team.Worker starts.

Its arguments are the allocator, or what bounds our executables, one of KINDS, and names: a
workload, or programs as CONFIGURATION@SEED. Imports at once, and then takes commands as JSON lines
and answers likewise: ``prepare`` to make what is captured, warm it up and say its sizes, and any
method of that.
"""

from __future__ import annotations

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
    from _measure import Captures
    from workloads import WORKLOADS

    return lambda device: Captures(WORKLOADS[names[0]], device, ours=allocator == "ours")


def _execs(names: Sequence[str], allocator: str) -> Maker:
    from _exec_captures import ExecCaptures
    from workloads import WORKLOADS

    return lambda device: ExecCaptures(WORKLOADS[names[0]], device, allocator)


def _streams(names: Sequence[str], allocator: str) -> Maker:
    """A program's key is its place among the names, each that of a configuration and a seed."""
    from _stream_work import StreamCaptures
    from stream_programs import BY_NAME, generate

    drawn = [name.rpartition("@") for name in names]
    programs = [generate(BY_NAME[configuration], int(seed)) for configuration, _, seed in drawn]
    return lambda device: StreamCaptures(programs, device, ours=allocator == "ours")


def _replays(names: Sequence[str], allocator: str) -> Maker:
    """The allocator is one of :data:`_replay_cost.WAYS`, and the number of the process."""
    from _replay_cost import ReplayCost
    from workloads import WORKLOADS

    way = allocator.partition(" ")[0]
    return lambda device: ReplayCost(WORKLOADS[names[0]], device, way)


KINDS = {"graphs": _graphs, "execs": _execs, "streams": _streams, "replays": _replays}


def serve(answers: TextIO, make: Callable[[], Any]) -> int:
    """Answers with what JSON can carry, keys of objects becoming strings, until the parent hangs up
    or something fails, which is then the last answer.
    """

    def say(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what, default=asdict) + "\n")
        answers.flush()

    captures = None
    try:
        for line in sys.stdin:
            request = json.loads(line)
            command = request.pop("command")
            if command == "prepare":
                captures = make()
                say({"result": list(captures.workload.keys)})
            else:
                say({"result": getattr(captures, command)(**request)})
    except Exception as error:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def main() -> int:
    answers = answers_alone()
    allocator, kind, *names = sys.argv[1:]
    make = KINDS[kind](names, allocator)
    import torch

    def prepare() -> Any:
        captures = make(torch.device("cuda", torch.cuda.current_device()))
        captures.warm_up()
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        for name, setting in SETTINGS.items():
            found = settings.get(setting, False)  # not every release has all of them
            if found != (allocator == name):
                raise RuntimeError(f"{setting} is {found} under {allocator}")
        return captures

    return serve(answers, prepare)


if __name__ == "__main__":
    sys.exit(main())
