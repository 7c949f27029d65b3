"""Writes recorded captures as the plain text that the C++ programs read.

    python benchmarks/trace_to_text.py --output build/traces tests/traces/*.json.gz
    build/csrc/testing/cgp_quality --orders 100 build/traces/*.txt

One line for each event: ``graph KEY``, ``alloc ID BYTES STREAM`` or ``free ID``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from _command import new_parser

from cudagraph_pool.tools.trace import Trace, TraceError, read_trace


def lines_of(trace: Trace) -> Iterator[str]:
    for graph in trace.graphs:
        yield f"graph {graph.key}\n"
        for event in graph.events:
            if event.bytes:
                yield f"alloc {event.block} {event.bytes} {event.stream}\n"
            else:
                yield f"free {event.block}\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser(__doc__)
    parser.add_argument(
        "traces", nargs="+", type=Path, metavar="FILE", help="or a folder of *.json and *.json.gz"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args(argv)
    paths = [
        path
        for given in options.traces
        for path in (sorted(given.glob("*.json*")) if given.is_dir() else [given])
    ]
    try:
        traces = {path: read_trace(path) for path in paths}
    except TraceError as error:
        print(f"trace_to_text.py: {error}", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    for path, trace in traces.items():
        name = path.name.removesuffix(".gz").removesuffix(".json")
        (options.output / f"{name}.txt").write_text("".join(lines_of(trace)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
