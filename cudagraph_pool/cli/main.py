"""The command ``cudagraph-pool``.

Exit codes: 0 done, 1 a replay or a measurement failed, 2 wrong arguments or a file that cannot be
used, 130 stopped from the keyboard.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence

from .errors import FAILED, CommandError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    if argv is None:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            # Names from elsewhere, on a terminal that may have ASCII only.
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:  # also of --help, which exits
            print(end="", flush=True)
    except CommandError as refused:
        return _refuse(str(refused), refused.code)
    except KeyboardInterrupt:
        return _refuse("stopped", 128 + signal.SIGINT)
    except ModuleNotFoundError as error:
        # In a clone that was installed into another environment, as scripts/dev.py does.
        missing = f"cudagraph_pool is not installed for {sys.executable}, which lacks {error.name}"
        return _refuse(f"{missing}: pip install ., or activate where it is", FAILED)
    except OSError as error:  # as of a full disk that the output goes to
        # What is still in Python's buffer would be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader has gone, as `| head` does
            return FAILED
        return _refuse(f"{error.filename or 'standard output'}: {error.strerror}", FAILED)


def _refuse(message: str, code: int) -> int:
    """One line on stderr, whatever the message holds."""
    print("cudagraph-pool:", " ".join(message.split()), file=sys.stderr)
    return code


def _run(arguments: Sequence[str]) -> int:
    os.environ.pop("MPLBACKEND", None)  # pictures go to files, and matplotlib may not know it
    whole = parser()
    options, unknown = whole.parse_known_args(arguments)
    if options.command is None:
        whole.print_help()
        return 0
    if unknown:  # argparse itself would show the usage of all commands
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return int(options.function(options))


def parser() -> argparse.ArgumentParser:
    """The whole command. What a subcommand's function says of itself is its description."""
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

    def add(function: Callable[..., int], what: str, example: str) -> argparse.ArgumentParser:
        command = commands.add_parser(example.split()[0], help=what)
        command.description = " ".join((function.__doc__ or "").split())
        command.epilog = f"For instance: cudagraph-pool {example}"
        command.set_defaults(function=function, parser=command)
        return command

    add(_demo, "stock PyTorch against the pool", "demo")
    what = "a program with the pool enabled, unedited"
    run.add_options(add(run.run, what, "run --report serve.py --port 8000"))
    what = "a program's captures, written as traces"
    record = add(run.record, what, "record -o traces train.py")
    folder = "folder to write traces to (default: the current one)"
    record.add_argument("-o", "--output", metavar="FOLDER", default=".", help=folder)
    run.add_program(record, "[-o FOLDER]")
    what = "what recorded captures cost, and what the pool saves"
    report = add(traces.report, what, "report --html report.html traces/*")
    report.add_argument("--json", action="store_true", help="print one JSON object instead")
    html = "write a page that stands alone, with pictures where there is matplotlib"
    traces.add_options(report, "--html", html)
    plot = add(traces.plot, "draw the memory of recorded captures", "plot traces/serve-1-1.json.gz")
    output = "png, svg or pdf, by its ending (default: the trace's name with .png, here)"
    traces.add_options(plot, "-o", "--output", output, nargs=1)
    what = "replay recorded captures through the core"
    replay = add(traces.replay, what, "replay --order desc traces/*.json.gz")
    replay.add_argument("--json", action="store_true", help="print one JSON object for each trace")
    placements = "write each block's pages as JSON lines, of one trace"
    traces.add_options(replay, "--placements", placements)
    what = "what a model takes eager, compiled, with CUDA graphs"
    example = "footprint models:resnet --json resnet.json"
    footprint.add_options(add(footprint.footprint, what, example))
    add(info.info, "what is installed, and what this machine can do", "info")
    return whole


def _demo(options: argparse.Namespace) -> int:
    """Captures a model for many batch sizes, smallest first, on PyTorch's own allocator and on the
    pool. Without a GPU it replays captures that were recorded on one.
    """
    from ..tools.demo import run

    try:
        return run()
    except (ImportError, RuntimeError) as error:
        raise CommandError(f"demo: {error}", FAILED) from error
