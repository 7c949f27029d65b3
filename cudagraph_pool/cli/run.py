"""``cudagraph-pool run``: a program with the package enabled, unedited.

The interpreter is replaced by one that runs the program, which inherits ``CUDAGRAPH_POOL`` as do
all that it starts. So nothing differs from ``python PROGRAM`` (arguments, ``sys.path``,
``__main__``, exit code, signals), and one mechanism serves every process.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final, NoReturn

from ..integration.environment import PROGRAM, VARIABLE
from ..integration.request import REPORT, options, unparse
from .errors import refuse

_HELP: Final = {
    "share_captures": "let all captures that name no pool share one for each device (default: no)",
    "mempools": "let torch.cuda.MemPool take its memory from the pool too (default: yes)",
    "shared_exec": "let graphs share executables, which take the driver's memory (default: no)",
    "exportable": "let other processes be given the memory of pools (default: no)",
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="cudagraph-pool run",
        usage="%(prog)s [options] PROGRAM ...\n       %(prog)s [options] -m MODULE ...",
        description="Runs a Python program with the pool enabled from its first use of CUDA, and "
        f"all Python programs that it starts. {VARIABLE} in the environment does the same.",
    )
    for name in options():
        if name != REPORT:
            parser.add_argument(
                f"--{name.replace('_', '-')}",
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=_HELP[name],
            )
    parser.add_argument(
        f"--{REPORT}",
        action="store_true",
        default=argparse.SUPPRESS,
        help="each process that used CUDA says at its end what it captured and what that took",
    )
    program = parse_program(parser, argv)
    refusal = problem("run")
    if refusal is not None:
        return refuse(refusal)
    if REPORT in program.options:
        os.environ[PROGRAM] = str(os.getpid())
    return program.run(VARIABLE, unparse(program.options))


@dataclass(frozen=True, slots=True)
class Program:
    """What is to run, and the options before it."""

    words: list[str]
    options: dict[str, Any]

    def run(self, variable: str, value: str) -> NoReturn:
        """Becomes the program, with ``variable`` set."""
        os.environ[variable] = value
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *self.words])


def parse_program(parser: argparse.ArgumentParser, argv: Sequence[str]) -> Program:
    """The parser has the options that come before a program."""
    parser.add_argument("-m", action="store_true", dest="module", help="the program is a module")
    parser.add_argument(
        "program", nargs=argparse.PARSER, metavar="PROGRAM", help="and its arguments"
    )
    options = vars(parser.parse_args(argv))
    return Program(["-m"] * options.pop("module") + options.pop("program"), options)


def problem(command: str) -> str | None:
    """Why torch would not call this package."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return f"{command} needs torch's entry points: unset TORCH_DEVICE_BACKEND_AUTOLOAD"
    if not metadata.entry_points(group="torch.backends", name="cudagraph_pool"):
        return f"{command} needs cudagraph_pool to be installed: in a clone of it, pip install ."
    return None
