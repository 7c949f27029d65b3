"""What pools cost: as a table, as JSON, as a page, and drawn from torch's memory history."""

from __future__ import annotations

import base64
import datetime
import importlib.util
import io
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from .. import __version__
from .._adapter import load_adapter
from .._table import format_table, mib
from ..pools import stats
from .costs import PoolCost, of_pool
from .memory_map import MemoryMap, Operation, map_of_history, operation_of

_LEGEND: Final = (
    "In MiB. minimum: the most that was allocated at once; no allocator can do with less. saved: "
    "what reserved is less than stock. apart: what a pool for each graph would take. stock: what "
    "PyTorch's own allocator took, as recorded, or would take by its rules; expandable: with "
    "expandable segments; primed: where one block comes first, of the best of three sizes."
)
_WORDS: Final = ("pool", "kind", "order")  # the columns of these; the others hold numbers


class PoolReport:
    r"""What the graph pools of a program cost; printed, it is a table.

    Attributes:
        pools (list): Of each pool what it and its graphs take.
        process (dict): ``captures`` and ``execs``, as :func:`stats` has them; of recorded captures
            nothing.
    """

    def __init__(self, pools: Sequence[PoolCost], process: Mapping[str, Any] | None = None) -> None:
        self.pools = list(pools)
        self.process = dict(process or {})

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        parts = _of_process(self.process)
        if not self.pools:
            return "\n".join([*parts, "there are no graph pools"])
        rows = _rows(self.pools)
        parts += ["", format_table(rows, _word_columns(rows)), "", textwrap.fill(_LEGEND, 80), ""]
        for pool in self.pools:
            parts += [pool.headline(), *(f"  {said}" for said in _beside(pool))]
        return "\n".join([*parts, *_in_all(self.pools)]).lstrip("\n")

    def as_json(self) -> dict[str, Any]:
        r"""Return what ``cudagraph-pool report --json`` prints, as docs/api.md lists it; of a
        running program also ``captures`` and ``execs``, which with a pool's ``kind`` are those of
        :func:`stats`.
        """
        return {"pools": [_as_json(pool) for pool in self.pools], **self.process}

    def save_html(self, path: str | os.PathLike[str]) -> None:
        r"""Write a page that stands alone, with pictures where there are maps and matplotlib.

        Raises:
            ImportError: There is no jinja2, which ``pip install 'cudagraph-pool[report]'`` brings.
        """
        Path(path).write_text(_page(self), encoding="utf-8")


def report() -> PoolReport:
    r"""Return what the graph pools of this process cost: printed, it is a table.

    Of each pool the graphs, what each added, what the pool holds, the minimum (the most that was
    allocated in it at once) and what a pool for each graph would take. :meth:`PoolReport.as_json`
    has it in bytes, :meth:`PoolReport.save_html` writes a page, with pictures of the pools if
    :func:`torch.cuda.memory._record_memory_history` was called before the captures.
    """
    found = stats()
    history = histories() if found["pools"] else []
    pools = [
        of_pool(pool, map_of_pool(history, pool["device"], pool["id"])) for pool in found["pools"]
    ]
    return PoolReport(pools, {name: found[name] for name in ("captures", "execs")})


def histories() -> list[list[Operation]]:
    """Of each device what was done since the history was switched on; none if it is off."""
    import torch

    if not torch._C._cuda_isHistoryEnabled():
        return []
    traces = torch.cuda.memory._snapshot()["device_traces"]
    return [list(filter(None, map(operation_of, trace))) for trace in traces]


def map_of_pool(
    history: list[list[Operation]], device: int, id: tuple[int, int]
) -> MemoryMap | None:
    """None if the history has nothing of the pool, or not what tells which graph made what."""
    if device >= len(history):
        return None
    drawn = map_of_history(history[device], load_adapter().snapshot(device, id))
    # Graph trees go back to what lived before; that is more in the history than was allocated.
    return drawn if drawn.placed and drawn.first_allocation >= 0 else None


def draw_pool(pool: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """See :meth:`GraphPool.plot`; ``pool`` is what :func:`cudagraph_pool.stats` says of it."""
    from .plot import draw, require_matplotlib

    require_matplotlib()
    drawn = map_of_pool(histories(), pool["device"], pool["id"])
    if drawn is None:
        raise RuntimeError(
            f"the memory history has nothing of pool {pool['id']}: call "
            "torch.cuda.memory._record_memory_history(context=None) before the captures"
        )
    draw(of_pool(pool, drawn), path)


def _rows(pools: Sequence[PoolCost]) -> list[list[str]]:
    """With a head, and without columns of which nothing is known."""
    columns = {
        "pool": [pool.name for pool in pools],
        "kind": ["-" if pool.order else pool.kind for pool in pools],
        "order": [pool.order or "-" for pool in pools],
        "graphs": ["-" if pool.apart is None else f"{len(pool.graphs):,}" for pool in pools],
        "minimum": [mib(pool.minimum) for pool in pools],
        "reserved": [mib(pool.reserved) for pool in pools],
        "ratio": [f"{pool.reserved / pool.minimum:.3f}" if pool.minimum else "-" for pool in pools],
        **{
            size: [mib(getattr(pool, size)) for pool in pools]
            for size in ("stock", "saved", "apart", "expandable", "primed")
        },
        "execs": ["-" if pool.execs is None else str(pool.execs) for pool in pools],
    }
    known = {head: cells for head, cells in columns.items() if set(cells) != {"-"}}
    return [list(known), *map(list, zip(*known.values(), strict=True))]


def _word_columns(rows: list[list[str]]) -> list[int]:
    return [place for place, head in enumerate(rows[0]) if head in _WORDS]


def _of_largest(pool: PoolCost) -> str:
    if len(pool.graphs) < 2:
        return ""
    largest = max(pool.graphs, key=lambda graph: graph.needed)
    more = max(0, pool.reserved - largest.needed)
    return (
        f"its largest graph ({largest.name}) needs {mib(largest.needed)} MiB alone; all "
        f"{len(pool.graphs):,} together take {mib(more)} MiB more"
    )


def _beside(pool: PoolCost) -> list[str]:
    lines = [_of_largest(pool)]
    if pool.away:
        lines.append(f"it has given {mib(pool.away)} MiB away until it wakes")
    elif pool.lendable:
        lines.append(f"it could lend {mib(pool.lendable)} MiB now, or give them away in its sleep")
    return list(filter(None, lines))


def _in_all(pools: Sequence[PoolCost]) -> list[str]:
    """What all of them come to, where there are several and stock's are known."""
    stock = [pool.stock for pool in pools if pool.stock is not None]
    if len(pools) < 2 or len(stock) < len(pools):
        return []
    ours, theirs = sum(pool.reserved for pool in pools), sum(stock)
    return [
        f"all {len(pools)} pools: {mib(ours)} MiB instead of {mib(theirs)} MiB: "
        f"{mib(theirs - ours)} MiB saved"
    ]


def _of_process(process: Mapping[str, Any]) -> list[str]:
    if not process:
        return []
    captures = process["captures"]
    ours, base, reasons = captures["ours"], captures["base"], captures["base_reasons"]
    lines = [f"{ours} captures in pools of cudagraph_pool, {base} in PyTorch's own"]
    if base:
        lines += [f"why there: {', '.join(f'{why}: {n}' for why, n in reasons.items() if n)}"]
    for execs in process["execs"]:
        on = f"of cuda:{execs['device']}"
        lines += [f"{execs['execs']} executables run all graphs {on} that share them"]
        lines += [f"{n} graphs {on} do not share: {why}" for why, n in execs["exec_alone"].items()]
    return lines


def _as_json(pool: PoolCost) -> dict[str, Any]:
    held = ("stock", "expandable", "primed")
    sizes = ("minimum", "reserved", "stock_growth", "saved", "apart")
    return {
        **{name: getattr(pool, name) for name in ("name", "kind", "execs")},
        "order": pool.order or None,
        **{f"{name}_reserved_bytes": getattr(pool, name) for name in held},
        **{f"{name}_bytes": getattr(pool, name) for name in sizes},
        "graphs": [
            {"name": graph.name, "needed_bytes": graph.needed, "added_bytes": graph.added}
            for graph in pool.graphs
        ],
    }


def _page(report: PoolReport) -> str:
    try:
        from jinja2 import Environment, PackageLoader
    except ModuleNotFoundError:
        raise ImportError(
            "a page needs jinja2, which is not installed here: pip install 'cudagraph-pool[report]'"
        ) from None
    environment = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    rows = _rows(report.pools) if report.pools else []
    page: str = environment.get_template("report.html").render(
        lines=[*_of_process(report.process), *_in_all(report.pools)],
        rows=rows,
        words=_word_columns(rows) if rows else [],
        legend=_LEGEND,
        pools=[*map(_shown, tqdm(report.pools, unit="pool", delay=1, leave=False, disable=None))],
        version=__version__,
        date=datetime.date.today().isoformat(),
    )
    return page


def _shown(pool: PoolCost) -> dict[str, Any]:
    """What the page shows of a pool."""
    graphs = [(graph.name, mib(graph.needed), mib(graph.added)) for graph in pool.graphs]
    shown = {"pool": pool, "beside": _beside(pool), "picture": _picture(pool)}
    return {**shown, "graphs": [("graph", "needs", "added"), *graphs]}


def _picture(pool: PoolCost) -> tuple[str, str]:
    """The PNG in base64, or why there is none."""
    if pool.map is None or not pool.map.placed:
        called = "torch.cuda.memory._record_memory_history() was not called before the captures"
        return "", f"No picture: {called}."
    if importlib.util.find_spec("matplotlib") is None:
        return "", "No picture: pip install 'cudagraph-pool[plot]' for one."
    from .plot import draw

    file = io.BytesIO()
    draw(pool, file, "png")
    return base64.b64encode(file.getvalue()).decode(), ""
