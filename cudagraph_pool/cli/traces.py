"""``cudagraph-pool replay``, ``report`` and ``plot``: what recorded captures cost."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from .._table import format_table, mib
from ..tools import replay as core
from ..tools.costs import of_trace
from ..tools.plot import FORMATS, draw
from ..tools.pool_report import PoolReport
from ..tools.snapshot import read_traces
from ..tools.trace import ORDERS, TraceError, read_trace
from .errors import FAILED, CommandError


def add_options(command: argparse.ArgumentParser, *file: str, nargs: int | str = "+") -> None:
    """Of all three. ``file`` is the option that names what is written, and the help for it."""
    add = command.add_argument
    add("traces", metavar="TRACE", nargs=nargs, help="JSON, plain or gzip")
    order = "order of the graphs (default: recorded)"
    add("--order", choices=ORDERS, default="recorded", help=order)
    add("--seed", type=int, default=0, help="seed for --order shuffled (default: 0)")
    add(*file[:-1], metavar="FILE", help=file[-1])


def _check(options: argparse.Namespace, file: str | None) -> None:
    """Refuses to overwrite what is read."""
    traces = map(Path, options.traces)
    if file and Path(file).exists() and any(p.exists() and p.samefile(file) for p in traces):
        raise CommandError(f"{file}: cannot be written: it is the trace itself")


@contextlib.contextmanager
def _failing(output: str | None, path: str = "") -> Iterator[None]:
    """Says what failed: the replay of ``path``, or writing ``output``."""
    try:
        yield
    except (TraceError, ImportError) as error:
        raise CommandError(str(error)) from None
    except (MemoryError, RuntimeError) as error:
        what = f"{path}: the replay failed" if path else "the replay failed"
        raise CommandError(f"{what}: {error}", FAILED) from None
    except OSError as error:
        raise CommandError(f"{output}: cannot be written: {error.strerror or error}") from None


def replay(options: argparse.Namespace) -> int:
    """Replays what cudagraph-pool record writes through the core, on the host, without a GPU."""
    output = options.placements
    _check(options, output)
    if output is not None and len(options.traces) > 1:
        raise CommandError(
            f"--placements takes one trace, not {len(options.traces)}: "
            "blocks and pages are numbered anew in each"
        )
    with _failing(None):
        # All are read before anything is replayed or written, so that bad input changes nothing.
        traces = [read_trace(path) for path in options.traces]
    results = []
    for trace in traces:
        with _failing(output, trace.path), contextlib.ExitStack() as files:
            file = None if output is None else files.enter_context(open(output, "w"))
            results.append(core.replay(trace, options.order, options.seed, file))
        if options.json:
            print(json.dumps(results[-1]), flush=True)
    if not options.json:
        rows = [[shown(result[name]) for name, shown in _COLUMNS.values()] for result in results]
        print(format_table([list(_COLUMNS), *rows], left_columns=(0, 2)))
        print("minimum, reserved and stock (PyTorch's own allocator, as recorded) in MiB")
    return 0


# What the table has of each trace, and how it is written. Sizes are in MiB. JSON has more.
_COLUMNS: Final[Mapping[str, tuple[str, Callable[[Any], str]]]] = {
    "trace": ("name", str),
    "graphs": ("graphs", str),
    "order": ("order", str),
    "minimum": ("minimum_bytes", mib),
    "reserved": ("reserved_bytes", mib),
    "ratio": ("ratio", "{:.3f}".format),
    "stock": ("stock_reserved_bytes", mib),
    "seconds": ("seconds", "{:.3f}".format),
}


def report(options: argparse.Namespace) -> int:
    """Replays recorded captures and says what they cost and what the pool saves: as a table, JSON,
    a page. Takes what cudagraph-pool record writes, and what torch.cuda.memory._dump_snapshot() has
    written of a program that called _record_memory_history() before its captures.
    """
    _check(options, options.html)
    maps = options.html is not None
    with _failing(options.html):
        traces = [trace for path in options.traces for trace in read_traces(path)]
        costs = PoolReport([of_trace(t, options.order, options.seed, maps) for t in traces])
        if maps:
            costs.save_html(options.html)
            print(f"wrote {options.html}", file=sys.stderr)
    print(json.dumps(costs.as_json()) if options.json else costs)
    return 0


def plot(options: argparse.Namespace) -> int:
    """Replays recorded captures and draws which graph had which bytes, and when, and what the pool
    and PyTorch's own allocator held after each graph.
    """
    (path,) = options.traces
    output = options.output
    if output is None:
        output = Path(path).name.removesuffix(".gz").removesuffix(".json") + ".png"
    _check(options, output)
    if Path(output).suffix.lower() not in FORMATS:
        raise CommandError(f"-o {output!r} must end in one of {', '.join(FORMATS)}")
    with _failing(output, path):
        draw(of_trace(read_trace(path), options.order, options.seed, maps=True), output)
    print(f"wrote {output}", file=sys.stderr)
    return 0
