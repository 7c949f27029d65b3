"""The command ``cudagraph-pool``.

Exit codes: 0 done, 1 a replay failed, 2 wrong arguments or a file that cannot be used, 130 stopped
from the keyboard.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from cudagraph_pool import _core
from cudagraph_pool._replay import ReplayResult, replay
from cudagraph_pool._table import format_table
from cudagraph_pool._trace import ORDERS, STANDARD_INPUT, Trace, TraceError, read_trace

_FAILED = 1
_BAD_INPUT = 2
_INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        for stream in (sys.stdout, sys.stderr):
            # Names from elsewhere, on a terminal that may have ASCII only.
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if arguments[:1] == ["run"]:  # how a program fails is the program's
        from cudagraph_pool import _run

        return _run.main(arguments[1:])
    try:
        code = _command(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        _drop_output()
        return _FAILED
    except KeyboardInterrupt:
        return _refuse("stopped", _INTERRUPTED)
    except OSError as error:  # as of a full disk that the output goes to
        _drop_output()
        return _refuse(str(error), _FAILED)


def _command(arguments: list[str]) -> int:
    if arguments[:1] == ["demo"]:
        from cudagraph_pool import _demo

        return _demo.main(arguments[1:])
    if arguments[:1] == ["footprint"]:
        from cudagraph_pool import _footprint

        return _footprint.main(arguments[1:])
    options = _parser().parse_args(arguments)
    return _replay(options) if options.command == "replay" else _info()


def _drop_output() -> None:
    """What is still in Python's buffer cannot go where it should, and would be tried at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cudagraph-pool", description="A graph-aware memory pool for PyTorch CUDA graphs."
    )
    parser.add_argument("--version", action="version", version=_core.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("demo", help="stock PyTorch against the pool", add_help=False)
    commands.add_parser(
        "footprint", help="what a model takes eager, compiled, with CUDA graphs", add_help=False
    )
    commands.add_parser("run", help="a program with the pool enabled, unedited", add_help=False)
    replay = commands.add_parser(
        "replay",
        help="replay recorded captures through the core",
        description="Replays recorded captures through the real core, on the host: no GPU is used.",
    )
    replay.add_argument(
        "traces", metavar="TRACE", nargs="+", help="JSON, plain or gzip; - reads standard input"
    )
    replay.add_argument(
        "--order", choices=ORDERS, default="recorded", help="of the graphs (default: recorded)"
    )
    replay.add_argument("--seed", type=int, help="of --order shuffled (default: 0)")
    replay.add_argument("--json", action="store_true", help="print one JSON object for each trace")
    replay.add_argument(
        "--placements", metavar="FILE", help="write each block's pages as JSON lines, of one trace"
    )
    commands.add_parser("info", help="what is installed, and what this machine can do")
    return parser


def _replay(options: argparse.Namespace) -> int:
    if options.seed is not None and options.order != "shuffled":
        return _refuse("--seed is for --order shuffled")
    if options.placements == "":
        return _refuse("--placements is empty, but names a file")
    if options.traces.count("-") > 1:
        return _refuse("standard input can be read once, but - stands there several times")
    if options.placements is not None and len(options.traces) > 1:
        return _refuse(
            f"--placements takes one trace, not {len(options.traces)}: "
            "blocks and pages are numbered anew in each"
        )
    try:
        # All are read before anything is replayed or written, so that bad input changes nothing.
        traces = [read_trace(path) for path in options.traces]
    except TraceError as error:
        return _refuse(str(error))

    results: list[ReplayResult] = []
    for trace in traces:
        try:
            with _placements(options.placements, trace) as file:
                results.append(replay(trace, options.order, options.seed or 0, file))
        except OSError as error:
            return _refuse(f"{options.placements}: cannot be written: {error.strerror or error}")
        except (MemoryError, RuntimeError) as error:
            return _refuse(f"{trace.path}: the replay failed: {error}", _FAILED)
        if options.json:
            print(json.dumps(results[-1]), flush=True)
    if not options.json:
        _print_table(results)
    return 0


@contextlib.contextmanager
def _placements(name: str | None, trace: Trace) -> Iterator[TextIO | None]:
    if name is None:
        yield None
        return
    path = Path(name)
    if trace.path != STANDARD_INPUT and path.exists() and path.samefile(trace.path):
        raise OSError("it is the trace itself")
    with path.open("w") as file:
        yield file


def _print_table(results: Sequence[ReplayResult]) -> None:
    """Sizes in MiB. JSON has more."""
    head = "trace graphs order minimum reserved ratio stock seconds"
    rows = [head.split()]
    for result in results:
        stock = result["stock_reserved_bytes"]
        rows.append(
            [
                result["name"],
                str(result["graphs"]),
                result["order"],
                _mib(result["minimum_bytes"]),
                _mib(result["reserved_bytes"]),
                f"{result['ratio']:.3f}",
                "-" if stock is None else _mib(stock),
                f"{result['seconds']:.3f}",
            ]
        )
    print("minimum, reserved and stock (PyTorch's own allocator, as recorded) in MiB")
    print(format_table(rows, left_columns=(0, 2)))


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f}"


def _info() -> int:
    from cudagraph_pool._info import lines

    pairs = lines()
    width = max(len(label) for label, _ in pairs)
    for label, text in pairs:
        print(f"{label:<{width}}  {text}")
    return 0


def _refuse(message: str, code: int = _BAD_INPUT) -> int:
    """One line on stderr, whatever the message holds."""
    print("cudagraph-pool:", " ".join(message.split()), file=sys.stderr)
    return code
