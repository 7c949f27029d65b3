"""The recorded traces, and a small one to take apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json.gz"))


class WriteTrace(Protocol):
    """What the fixture ``write_trace`` gives: writes a small trace with changes."""

    def __call__(self, **changes: Any) -> Path: ...


def small_trace(**changes: Any) -> dict[str, Any]:
    """A valid trace of three graphs; `changes` replace members of the document."""
    return {
        "name": "small",
        "torch": "2.11.0",
        "gpu": "none",
        "stock": {
            "reserved": 4 << 20,
            "used": 4 << 20,
            "peak_live": 1,
            "capture_s": 0.5,
            "conf": "",
        },
        "graphs": [
            {"key": 2, "events": [[1, 0, 8, 0], [1, 1, 3 << 20, 0], [-1, 1]]},
            {"key": 3, "events": [[-1, 0], [1, 2, 1000, 7]]},
            {"key": 1, "events": [[1, 3, 512, 0], [-1, 3], [-1, 2]]},
        ],
        **changes,
    }
