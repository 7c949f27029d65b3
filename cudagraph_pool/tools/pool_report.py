"""What pools cost: as a table, as JSON, as a page, and drawn from torch's memory history."""

from __future__ import annotations

import base64
import importlib.util
import io
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .. import __version__
from .._adapter import load_adapter
from .._lazy import torch
from .._table import format_table, mib
from ..pools import stats
from .costs import PoolCost, of_pool
from .memory_map import MemoryMap, Operation, map_of_history, operation_of
from .plot import draw

_LEGEND: Final = (
    "In MiB. minimum: the most that was allocated at once; no allocator can do with less. saved: "
    "what reserved is less than stock. apart: what a pool for each graph would take. stock: what "
    "PyTorch's own allocator took, as recorded, or would take by its rules; expandable: with "
    "expandable segments; primed: where one block comes first, of the best of three sizes."
)
_WORDS: Final = ("pool", "kind", "order")  # the columns of these; the others hold numbers
_SIZES: Final = ("stock", "saved", "apart", "expandable", "primed")


class PoolReport:
    r"""What the graph pools of a program cost; printed, it is a table.

    Attributes:
        pools (list): Of each pool what it and its graphs take.
        process (dict): ``captures`` and ``execs`` of :func:`stats`; empty of recorded captures.
    """

    def __init__(self, pools: Sequence[PoolCost], process: Mapping[str, Any] | None = None) -> None:
        self.pools = list(pools)
        self.process = dict(process or {})

    def __repr__(self) -> str:
        lines = _of_process(self.process)
        if not self.pools:
            return "\n".join([*lines, "there are no graph pools"])
        rows = _rows(self.pools)
        table = format_table(rows, _word_columns(rows))
        lines += ["", table, "", textwrap.fill(_LEGEND, 80), ""]
        for pool in self.pools:
            lines += [pool.headline(), *(f"  {said}" for said in pool.beside())]
        return "\n".join([*lines, *_in_all(self.pools)]).lstrip("\n")

    def as_json(self) -> dict[str, Any]:
        r"""Return what ``cudagraph-pool report --json`` prints, as docs/api.md lists it; of a
        running program also ``captures`` and ``execs``. These and ``kind`` are as in :func:`stats`.
        """
        return {"pools": [pool.as_json() for pool in self.pools], **self.process}

    def save_html(self, path: str | os.PathLike[str]) -> None:
        r"""Write a page that stands alone, with pictures where there are maps and matplotlib.

        Raises:
            ImportError: There is no jinja2, which ``pip install 'cudagraph-pool[report]'`` brings.
        """
        try:
            from jinja2 import Environment, PackageLoader
        except ModuleNotFoundError:
            what = "a page needs jinja2, which is not installed here"
            raise ImportError(f"{what}: pip install 'cudagraph-pool[report]'") from None
        own = PackageLoader(__package__, ".")
        templates = Environment(loader=own, autoescape=True, trim_blocks=True, lstrip_blocks=True)
        rows = _rows(self.pools) if self.pools else []
        page = templates.get_template("report.html").render(
            lines=[*_of_process(self.process), *_in_all(self.pools)],
            rows=rows,
            words=_word_columns(rows),
            legend=_LEGEND,
            pools=[(pool, _picture(pool)) for pool in self.pools],
            has_matplotlib=importlib.util.find_spec("matplotlib") is not None,
            mib=mib,
            version=__version__,
        )
        Path(path).write_text(page, encoding="utf-8")


def report() -> PoolReport:
    r"""Return what the graph pools of this process cost: printed, it is a table.

    Of each pool the graphs, what each added, what the pool holds, the minimum (the most that was
    allocated in it at once) and what a pool for each graph would take. :meth:`PoolReport.as_json`
    has it in bytes, :meth:`PoolReport.save_html` writes a page, with pictures of the pools if
    :func:`torch.cuda.memory._record_memory_history` was called before the captures.
    """
    found = stats()
    history = _histories() if found["pools"] else []
    pools = [of_pool(pool, _map_of_pool(history, pool)) for pool in found["pools"]]
    return PoolReport(pools, {name: found[name] for name in ("captures", "execs")})


def draw_pool(pool: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """See :meth:`GraphPool.plot`; ``pool`` is what :func:`cudagraph_pool.stats` says of it."""
    drawn = _map_of_pool(_histories(), pool)
    if drawn is None:
        raise RuntimeError(
            f"the memory history has nothing of pool {pool['id']}: call "
            "torch.cuda.memory._record_memory_history(context=None) before the captures"
        )
    draw(of_pool(pool, drawn), path)


def _histories() -> list[list[Operation]]:
    """Of each device what was done since the history was switched on; none if it is off."""
    if not torch._C._cuda_isHistoryEnabled():
        return []
    traces = torch.cuda.memory._snapshot()["device_traces"]
    return [list(filter(None, map(operation_of, trace))) for trace in traces]


def _map_of_pool(history: list[list[Operation]], pool: Mapping[str, Any]) -> MemoryMap | None:
    """None if the history has nothing of the pool, or not what tells which graph made what."""
    device = pool["device"]
    if device >= len(history):
        return None
    drawn = map_of_history(history[device], load_adapter().snapshot(device, pool["id"]))
    # Graph trees go back to what lived before; that is more in the history than was allocated.
    return drawn if drawn.placed and drawn.first_allocation >= 0 else None


def _rows(pools: Sequence[PoolCost]) -> list[list[str]]:
    """With a head, and without columns of which nothing is known."""
    columns = {
        "pool": [pool.name for pool in pools],
        "kind": ["-" if pool.kind in ("trace", "snapshot") else pool.kind for pool in pools],
        "order": [pool.order or "-" for pool in pools],
        "graphs": ["-" if pool.apart is None else f"{len(pool.graphs):,}" for pool in pools],
        "minimum": [mib(pool.minimum) for pool in pools],
        "reserved": [mib(pool.reserved) for pool in pools],
        "ratio": [f"{pool.reserved / pool.minimum:.3f}" if pool.minimum else "-" for pool in pools],
        **{size: [mib(getattr(pool, size)) for pool in pools] for size in _SIZES},
        "execs": ["-" if pool.execs is None else str(pool.execs) for pool in pools],
    }
    known = {head: cells for head, cells in columns.items() if set(cells) != {"-"}}
    return [list(known), *map(list, zip(*known.values(), strict=True))]


def _word_columns(rows: list[list[str]]) -> list[int]:
    return [place for row in rows[:1] for place, head in enumerate(row) if head in _WORDS]


def _in_all(pools: Sequence[PoolCost]) -> list[str]:
    """What all of them come to, where there are several and stock's are known."""
    stock = [pool.stock for pool in pools if pool.stock is not None]
    if len(pools) < 2 or len(stock) < len(pools):
        return []
    ours, theirs = sum(pool.reserved for pool in pools), sum(stock)
    instead = f"{mib(ours)} MiB instead of {mib(theirs)} MiB"
    return [f"all {len(pools)} pools: {instead}: {mib(theirs - ours)} MiB saved"]


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


def _picture(pool: PoolCost) -> str:
    """A PNG in base64, if there is what it takes."""
    if pool.map is None or not pool.map.placed or importlib.util.find_spec("matplotlib") is None:
        return ""
    file = io.BytesIO()
    draw(pool, file, "png")
    return base64.b64encode(file.getvalue()).decode()
