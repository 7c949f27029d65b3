"""The command ``cudagraph-pool``.

Exit codes: 0 done, 1 a replay failed, 2 wrong arguments or a file that cannot be used, 130 stopped
from the keyboard.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from .errors import FAILED, refuse

_INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        _open_closed()
        for stream in (sys.stdout, sys.stderr):
            # Names from elsewhere, on a terminal that may have ASCII only.
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        # argparse passes over what it cannot write. Buffered, that fails when it is flushed.
        sys.stdout.reconfigure(write_through=False)  # type: ignore[union-attr]
    try:
        try:
            return _dispatch(arguments)
        finally:  # also of --help, which exits
            sys.stdout.flush()
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
        return refuse(str(error), FAILED)


def _dispatch(arguments: list[str]) -> int:
    # Imported here, since that takes long enough to be stopped.
    if arguments[:1] == ["run"]:
        from . import run

        return run.main(arguments[1:])
    if arguments[:1] == ["record"]:
        from ..tools import record

        return record.main(arguments[1:])
    from . import commands

    return commands.run(arguments)


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
