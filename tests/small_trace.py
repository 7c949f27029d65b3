"""The recorded traces, and a small one to take apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from cudagraph_pool import _core
from cudagraph_pool.tools.trace import Event, Graph

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
        "stock": {"reserved": 4 << 20, "used": 4 << 20, "capture_s": 0.5, "conf": ""},
        "graphs": [
            {"key": 2, "events": [[1, 0, 8, 0], [1, 1, 3 << 20, 0], [-1, 1]]},
            {"key": 3, "events": [[-1, 0], [1, 2, 1000, 7]]},
            {"key": 1, "events": [[1, 3, 512, 0], [-1, 3], [-1, 2]]},
        ],
        **changes,
    }


def graphs_of(document: dict[str, Any]) -> list[Graph]:
    """Those of a trace that was not written."""

    def event(words: list[int]) -> Event:
        return Event(words[1], words[2], words[3]) if words[0] == 1 else Event(words[1], 0, 0)

    return [Graph(graph["key"], list(map(event, graph["events"]))) for graph in document["graphs"]]


def fields(values: object) -> dict[str, int]:
    """What the core says, as the adapter says it."""
    return {name: getattr(values, name) for name in dir(values) if not name.startswith("_")}


def as_adapter(snapshot: _core.PoolSnapshot) -> dict[str, Any]:
    ranges = [{"address": r.address, "pages": r.pages} for r in snapshot.ranges]
    return {"stats": fields(snapshot.stats), "ranges": ranges}


def _entry(action: str, addr: int, size: int, stream: int = 7) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": stream}


# As torch.cuda.memory._dump_snapshot() pickles it: a graph pool, and eager memory.
SNAPSHOT: dict[str, Any] = {
    "segments": [
        {
            "device": 0,
            "address": 1 << 30,
            "total_size": 20 << 20,
            "stream": 7,
            "segment_pool_id": (0, 3),
            "blocks": [
                {"address": (1 << 30) + 512, "size": 1024, "state": "active_allocated"},
                {"address": (1 << 30) + (4 << 20), "size": 3 << 20, "state": "active_allocated"},
                {"address": (1 << 30) + (8 << 20), "size": 12 << 20, "state": "inactive"},
            ],
        },
        {
            "device": 0,
            "address": 1 << 20,
            "total_size": 2 << 20,
            "stream": 0,
            "segment_pool_id": (0, 0),
            "blocks": [],
        },
    ],
    "device_traces": [
        [
            _entry("alloc", 1 << 20, 4096),
            _entry("alloc", 1 << 30, 512),
            _entry("free_requested", 1 << 30, 512),
            _entry("free_completed", 1 << 30, 512),
            _entry("alloc", (1 << 30) + (4 << 20), 3 << 20, 8),
            _entry("segment_alloc", 1 << 30, 20 << 20),
        ]
    ],
}
