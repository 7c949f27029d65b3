"""Errors of the command: an exit code and one line."""

from __future__ import annotations

import sys

FAILED = 1
BAD_INPUT = 2


def refuse(message: str, code: int = BAD_INPUT) -> int:
    """One line on stderr, whatever the message holds."""
    print("cudagraph-pool:", " ".join(message.split()), file=sys.stderr)
    return code
