"""What ``cudagraph-pool`` does with recorded captures, and its other commands' names."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from .. import _core
from .._table import format_table, mib
from ..tools.replay import ReplayResult, replay
from ..tools.trace import ORDERS, STANDARD_INPUT, Trace, TraceError, read_trace
from .errors import FAILED, refuse


def run(arguments: list[str]) -> int:
    """Runs one command and returns its exit code."""
    os.environ.pop("MPLBACKEND", None)  # pictures go to files, and matplotlib may not know it
    if arguments[:1] == ["demo"]:
        from ..tools import demo

        return demo.main(arguments[1:])
    if arguments[:1] == ["footprint"]:
        from ..tools import footprint

        return footprint.main(arguments[1:])
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:  # argparse itself would show the usage of all commands
        options.error(f"unrecognized arguments: {' '.join(unknown)}")
    commands = {"replay": _replay, "report": _report, "plot": _plot, "info": _info}
    try:
        return commands[options.command](options)
    except TraceError as error:
        return refuse(str(error))
    except (MemoryError, RuntimeError) as error:
        return refuse(f"the replay failed: {error}", FAILED)


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
    commands.add_parser("record", help="a program's captures, written as traces", add_help=False)
    replay = commands.add_parser(
        "replay",
        help="replay recorded captures through the core",
        description="Replays recorded captures through the real core, on the host: no GPU is used.",
    )
    _add_traces(replay, nargs="+")
    replay.add_argument("--json", action="store_true", help="print one JSON object for each trace")
    replay.add_argument(
        "--placements", metavar="FILE", help="write each block's pages as JSON lines, of one trace"
    )
    report = commands.add_parser(
        "report",
        help="what recorded captures cost, and what each graph added",
        description="Replays recorded captures and says what they cost: as a table, JSON, a page.",
    )
    _add_traces(report, nargs="+")
    report.add_argument("--json", action="store_true", help="print one JSON object instead")
    report.add_argument(
        "--html",
        metavar="FILE",
        help="write a page that stands alone, with pictures where there is matplotlib",
    )
    plot = commands.add_parser(
        "plot",
        help="draw the memory of recorded captures",
        description="Replays recorded captures and draws which graph had which bytes, and when.",
    )
    _add_traces(plot, nargs=1)
    plot.add_argument(
        "-o", "--output", metavar="FILE", required=True, help="png, svg or pdf, by its ending"
    )
    commands.add_parser("info", help="what is installed, and what this machine can do")
    for command in commands.choices.values():
        command.set_defaults(error=command.error)
    return parser


def _add_traces(parser: argparse.ArgumentParser, nargs: int | str) -> None:
    parser.add_argument(
        "traces", metavar="TRACE", nargs=nargs, help="JSON, plain or gzip; - reads standard input"
    )
    parser.add_argument(
        "--order",
        choices=ORDERS,
        default="recorded",
        help="order of the graphs (default: recorded)",
    )
    parser.add_argument("--seed", type=int, help="seed for --order shuffled (default: 0)")


def _problem(options: argparse.Namespace) -> str | None:
    """What is wrong with what :func:`_add_traces` added."""
    if options.seed is not None and options.order != "shuffled":
        return "--seed is for --order shuffled"
    if options.traces.count(STANDARD_INPUT) > 1:
        return "standard input can be read once, but - stands there several times"
    return None


def _problem_of_file(option: str, name: str | None) -> str | None:
    if name == "":
        return f"{option} is empty, but names a file"
    if name == "-":
        return f"{option} names a file, and - is none: /dev/stdout is standard output"
    return None


def _replay(options: argparse.Namespace) -> int:
    problem = _problem(options) or _problem_of_file("--placements", options.placements)
    if problem is not None:
        return refuse(problem)
    if options.placements is not None and len(options.traces) > 1:
        return refuse(
            f"--placements takes one trace, not {len(options.traces)}: "
            "blocks and pages are numbered anew in each"
        )
    # All are read before anything is replayed or written, so that bad input changes nothing.
    traces = [read_trace(path) for path in options.traces]
    results: list[ReplayResult] = []
    for trace in traces:
        try:
            with _placements(options.placements, trace) as file:
                results.append(replay(trace, options.order, options.seed or 0, file))
        except OSError as error:
            return refuse(f"{options.placements}: cannot be written: {error.strerror or error}")
        except (MemoryError, RuntimeError) as error:
            return refuse(f"{trace.path}: the replay failed: {error}", FAILED)
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
    _spare_traces(name, [trace])
    with open(name, "w") as file:
        yield file


def _spare_traces(name: str, traces: Sequence[Trace]) -> None:
    """Raises OSError if one of them would be overwritten."""
    path = Path(name)
    files = [trace.path for trace in traces if trace.path != STANDARD_INPUT]
    if path.exists() and any(path.samefile(file) for file in files):
        raise OSError("it is the trace itself")


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
                mib(result["minimum_bytes"]),
                mib(result["reserved_bytes"]),
                f"{result['ratio']:.3f}",
                "-" if stock is None else mib(stock),
                f"{result['seconds']:.3f}",
            ]
        )
    print("minimum, reserved and stock (PyTorch's own allocator, as recorded) in MiB")
    print(format_table(rows, left_columns=(0, 2)))


def _report(options: argparse.Namespace) -> int:
    problem = _problem(options) or _problem_of_file("--html", options.html)
    if problem is not None:
        return refuse(problem)
    from ..tools.costs import of_trace
    from ..tools.pool_report import PoolReport

    traces = [read_trace(path) for path in options.traces]
    maps = options.html is not None
    report = PoolReport([of_trace(t, options.order, options.seed or 0, maps) for t in traces])
    if options.html is not None:
        try:
            _spare_traces(options.html, traces)
            report.save_html(options.html)
        except OSError as error:
            return refuse(f"{options.html}: cannot be written: {error.strerror or error}")
    print(json.dumps(report.as_json()) if options.json else report)
    return 0


def _plot(options: argparse.Namespace) -> int:
    from ..tools.plot import FORMATS, draw, require_matplotlib

    problem = _problem(options)
    if problem is None and Path(options.output).suffix.lower() not in FORMATS:
        problem = f"-o {options.output!r} must end in one of {', '.join(FORMATS)}"
    if problem is not None:
        return refuse(problem)
    try:
        require_matplotlib()
    except ImportError as error:
        return refuse(str(error))
    from ..tools.costs import of_trace

    (path,) = options.traces
    trace = read_trace(path)
    cost = of_trace(trace, options.order, options.seed or 0, maps=True)
    try:
        _spare_traces(options.output, [trace])
        draw(cost, options.output)
    except OSError as error:
        return refuse(f"{options.output}: cannot be written: {error.strerror or error}")
    return 0


def _info(options: argparse.Namespace) -> int:
    from .info import lines

    pairs = lines()
    width = max(len(label) for label, _ in pairs) + 2
    wrapper = textwrap.TextWrapper(80, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = " " * width
    for label, text in pairs:
        wrapper.initial_indent = f"{label:<{width}}"
        print(wrapper.fill(text))
    return 0
