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
from importlib import metadata

from ._autoload import VARIABLE
from ._request import REPORT, options, unparse


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
                help=f"{name} of cudagraph_pool.enable()",
            )
    parser.add_argument(
        f"--{REPORT}",
        action="store_true",
        default=argparse.SUPPRESS,
        help="each process that used CUDA says at its end what it captured and what that took",
    )
    parser.add_argument("-m", action="store_true", dest="module", help="the program is a module")
    parser.add_argument(
        "program", nargs=argparse.PARSER, metavar="PROGRAM", help="and its arguments"
    )
    chosen = vars(parser.parse_args(argv))
    program = ["-m"] * chosen.pop("module") + chosen.pop("program")
    problem = _problem()
    if problem is not None:
        print(f"cudagraph-pool: {problem}", file=sys.stderr)
        return 2
    os.environ[VARIABLE] = unparse(chosen)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *program])


def _problem() -> str | None:
    """Why torch would not call this package."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return "run needs torch's entry points: unset TORCH_DEVICE_BACKEND_AUTOLOAD"
    if not metadata.entry_points(group="torch.backends", name="cudagraph_pool"):
        return "run needs cudagraph_pool to be installed: in a clone of it, pip install ."
    return None
