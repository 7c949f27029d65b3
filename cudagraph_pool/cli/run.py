"""``cudagraph-pool run`` and ``record``: a program that stays as it is.

It runs as with ``python PROGRAM``: arguments, ``sys.path``, ``__main__``, exit code, signals. It
and all that it starts inherit an environment variable, which tells each process what to do.
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Final

from ..integration.environment import AUTOLOAD, RECORD, VARIABLE
from ..integration.request import REPORT, unparse
from .errors import CommandError

_HELP: Final = {
    "share_captures": "let all captures that name no pool share one for each device (default: no)",
    "mempools": "let torch.cuda.MemPool take its memory from the pool too (default: yes)",
    "shared_exec": "let graphs share executables, which take the driver's memory (default: no)",
    "exportable": "let other processes be given the memory of pools (default: no)",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    add, default = parser.add_argument, argparse.SUPPRESS
    for name, what in _HELP.items():
        words = f"--{name.replace('_', '-')}"
        add(words, action=argparse.BooleanOptionalAction, default=default, help=what)
    report = "each process that used CUDA says at its end what it captured and what that took"
    add(f"--{REPORT}", action="store_true", default=default, help=report)
    add_program(parser, "[options]")


def add_program(parser: argparse.ArgumentParser, options: str) -> None:
    parser.usage = f"%(prog)s {options} PROGRAM ...\n       %(prog)s {options} -m MODULE ..."
    parser.add_argument("-m", action="store_true", dest="module", help="the program is a module")
    what = "and its arguments"
    parser.add_argument("program", nargs=argparse.PARSER, metavar="PROGRAM", help=what)


def _command(options: argparse.Namespace) -> list[str]:
    return [sys.executable, *["-m"] * options.module, *options.program]


def run(options: argparse.Namespace) -> int:
    """Runs a Python program with the pool enabled from its first use of CUDA, and all Python
    programs that it starts. CUDAGRAPH_POOL in the environment does the same.
    """
    require("run")
    chosen = {name: on for name, on in vars(options).items() if name in (*_HELP, REPORT)}
    os.environ[VARIABLE] = unparse(chosen)
    sys.stdout.flush()
    os.execv(sys.executable, _command(options))


def record(options: argparse.Namespace) -> int:
    """Runs a Python program on PyTorch's own allocator and writes what its CUDA graph captures
    allocate: a trace of each pool, for report, plot and replay.
    """
    require("record")
    folder = Path(options.output).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        why = error.strerror or error
        raise CommandError(f"{folder}: no trace can be written there: {why}") from None
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    before = _traces(folder)
    # Stays the program's parent, to say so if no process of it wrote a trace.
    with subprocess.Popen(_command(options), env={**environment, RECORD: str(folder)}) as program:
        # A terminal sends its interrupt to the program, too.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: program.terminate())
        code = program.wait()
    if _traces(folder) == before:
        missing = "no CUDA graph was captured in any process that imports torch"
        print(f"cudagraph-pool record: {missing}: nothing was written to {folder}", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _traces(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("*.json.gz")}


def require(command: str) -> None:
    """Raises CommandError if torch would not call this package."""
    if os.environ.get(AUTOLOAD, "1") != "1":
        raise CommandError(f"{command} needs torch's entry points: unset {AUTOLOAD}")
    if not metadata.entry_points(group="torch.backends", name="cudagraph_pool"):
        why = "needs cudagraph_pool to be installed: in a clone of it, pip install ."
        raise CommandError(f"{command} {why}")
    if importlib.util.find_spec("torch") is None:
        raise CommandError(f"{command} needs torch, and {sys.executable} has none")
