"""The command ``cudagraph-pool``.

Exit codes: 0 done, 1 a replay or a measurement failed, 2 wrong arguments or a file that cannot be
used, 130 stopped from the keyboard.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from .errors import FAILED, CommandError, refuse

_INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        _open_closed()
        for stream in (sys.stdout, sys.stderr):
            # Names from elsewhere, on a terminal that may have ASCII only.
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        # argparse ignores what it cannot write. With a buffer the flush fails, and that is seen.
        sys.stdout.reconfigure(write_through=False)  # type: ignore[union-attr]
    try:
        try:
            return _run(arguments)
        finally:  # also of --help, which exits
            sys.stdout.flush()
    except CommandError as refused:
        return refuse(str(refused), refused.code)
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        _drop_output()
        return FAILED
    except KeyboardInterrupt:
        return refuse("stopped", _INTERRUPTED)
    except ModuleNotFoundError as error:
        if error.name != "tqdm":
            raise
        # In a clone that was installed into another environment, as scripts/dev.py does.
        missing = f"cudagraph_pool is not installed for {sys.executable}, which lacks tqdm"
        return refuse(f"{missing}: pip install ., or activate where it is", FAILED)
    except OSError as error:  # as of a full disk that the output goes to
        _drop_output()
        where = error.filename or "standard output"
        return refuse(f"{where}: {error.strerror or error}", FAILED)


def _run(arguments: list[str]) -> int:
    os.environ.pop("MPLBACKEND", None)  # pictures go to files, and matplotlib may not know it
    whole = parser()
    options, unknown = whole.parse_known_args(arguments)
    if options.command is None:
        whole.print_help()
        return 0
    if unknown:  # argparse itself would show the usage of all commands
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    code: int = options.function(options)
    return code


def parser() -> argparse.ArgumentParser:
    """The whole command. Each subcommand sets ``function``, which returns the exit code."""
    # Imported here, since that takes long enough to be stopped.
    from cudagraph_pool import __version__

    from . import footprint, info, run, traces

    whole = argparse.ArgumentParser(
        prog="cudagraph-pool",
        usage="%(prog)s [-h] [--version] COMMAND ...",
        description="A graph-aware memory pool for PyTorch CUDA graphs.",
        epilog="How much would it save? cudagraph-pool record -o traces train.py, then "
        "cudagraph-pool report traces/*",
    )
    whole.add_argument("--version", action="version", version=__version__)
    # argparse makes the column of names as wide as this, and too narrow for an indented one.
    commands = whole.add_subparsers(dest="command", metavar="COMMAND    ", prog="cudagraph-pool")
    add = commands.add_parser
    _add_demo(add("demo", help="stock PyTorch against the pool"))
    run.add_run(add("run", help="a program with the pool enabled, unedited"))
    run.add_record(add("record", help="a program's captures, written as traces"))
    traces.add_report(add("report", help="what recorded captures cost, and what the pool saves"))
    traces.add_plot(add("plot", help="draw the memory of recorded captures"))
    traces.add_replay(add("replay", help="replay recorded captures through the core"))
    footprint.add(add("footprint", help="what a model takes eager, compiled, with CUDA graphs"))
    info.add(add("info", help="what is installed, and what this machine can do"))
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return whole


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Captures a model for many batch sizes, smallest first, on PyTorch's own allocator and on "
        "the pool. Without a GPU it replays captures that were recorded on one."
    )
    parser.add_argument("--seed", type=int, default=0, help="seed for random inputs (default: 0)")

    def demo(options: argparse.Namespace) -> int:
        from ..tools.demo import run

        try:
            return run(options.seed)
        except (ImportError, RuntimeError) as error:
            raise CommandError(f"demo: {error}", FAILED) from error

    parser.set_defaults(function=demo)


def _open_closed() -> None:
    """Python has None for a standard stream that is closed. To read or write these fails as it does
    elsewhere; errors are dropped.
    """
    for name, mode, flags in (
        ("stdin", "r", os.O_WRONLY),
        ("stdout", "w", os.O_RDONLY),
        ("stderr", "w", os.O_WRONLY),
    ):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode))


def _drop_output() -> None:
    """What is still in Python's buffer cannot go where it should, and would be tried at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
