"""What pools cost, as a table, as JSON and as a page."""

from __future__ import annotations

import base64
import html
import importlib.util
import io
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .._table import format_table, mib
from .costs import GraphCost, PoolCost, of_pool

_MIB: Final = 1 << 20
_MOST_GRAPHS: Final = 8  # that a table on a terminal has of a pool
_LEGEND: Final = (
    "In MiB. minimum: the most that was allocated at once; no allocator can do\n"
    "with less. apart: what a pool for each graph would take. stock: what\n"
    "PyTorch's own allocator took, as recorded, or would take by its rules;\n"
    "expandable: with expandable segments; primed: where one block comes first, of\n"
    "the best of three sizes. Of a graph: what it needs alone, and what was added\n"
    "to the pool for it."
)


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
        parts += ["", _LEGEND, format_table(_rows(self.pools), (0, 1))]
        for pool in filter(lambda pool: pool.graphs, self.pools):
            parts += ["", textwrap.fill(f"{pool.name}: {_growth(pool)}", 80)]
            rows = [_graph_cells(graph) for graph in _shown(pool)]
            if rows:
                parts.append(format_table([("graph", "needs", "added"), *rows]))
        return "\n".join(parts).lstrip("\n")

    def as_json(self) -> dict[str, Any]:
        r"""Return what ``cudagraph-pool report --json`` prints, as docs/api.md lists it; of a
        running program also ``captures`` and ``execs``, which with a pool's ``kind`` are those of
        :func:`stats`.
        """
        return {"pools": [_as_json(pool) for pool in self.pools], **self.process}

    def save_html(self, path: str | os.PathLike[str]) -> None:
        r"""Write a page that stands alone, with pictures where there are maps and matplotlib."""
        Path(path).write_text(_page(self), encoding="utf-8")


def report() -> PoolReport:
    r"""Return what the graph pools of this process cost: printed, it is a table.

    Of each pool the graphs, what each added, what the pool holds, the minimum (the most that was
    allocated in it at once) and what a pool for each graph would take. :meth:`PoolReport.as_json`
    has it in bytes, :meth:`PoolReport.save_html` writes a page, with pictures of the pools if
    :func:`torch.cuda.memory._record_memory_history` was called before the captures.
    """
    from ..pools import stats
    from .live_map import histories, map_of_pool

    found = stats()
    history = histories() if found["pools"] else []
    pools = [
        of_pool(pool, map_of_pool(history, pool["device"], pool["id"])) for pool in found["pools"]
    ]
    return PoolReport(pools, {name: found[name] for name in ("captures", "execs")})


def _rows(pools: Sequence[PoolCost]) -> list[list[str]]:
    """With a head, and without columns of which nothing is known."""
    columns = {
        "pool": [pool.name for pool in pools],
        "kind": [pool.kind for pool in pools],
        "graphs": [f"{len(pool.graphs):,}" for pool in pools],
        "minimum": [mib(pool.minimum) for pool in pools],
        "reserved": [mib(pool.reserved) for pool in pools],
        "ratio": [f"{pool.reserved / pool.minimum:.3f}" if pool.minimum else "-" for pool in pools],
        "apart": [mib(pool.apart) for pool in pools],
        "stock": [_mib_or_dash(pool.stock) for pool in pools],
        "expandable": [_mib_or_dash(pool.expandable) for pool in pools],
        "primed": [_mib_or_dash(pool.primed) for pool in pools],
        "execs": ["-" if pool.execs is None else str(pool.execs) for pool in pools],
    }
    known = {head: cells for head, cells in columns.items() if set(cells) != {"-"}}
    return [list(known), *map(list, zip(*known.values(), strict=True))]


def _mib_or_dash(size: int | None) -> str:
    return "-" if size is None else mib(size)


def _graph_cells(graph: GraphCost) -> list[str]:
    return [graph.name, f"{graph.needed / _MIB:,.1f}", f"{graph.added / _MIB:,.1f}"]


def _shown(pool: PoolCost) -> list[GraphCost]:
    """The graphs that made the pool grow most, in their order."""
    grew = sorted(
        (n for n, graph in enumerate(pool.graphs) if graph.added),
        key=lambda n: -pool.graphs[n].added,
    )
    return [pool.graphs[n] for n in sorted(grew[:_MOST_GRAPHS])]


def _growth(pool: PoolCost) -> str:
    grew = sum(graph.added > 0 for graph in pool.graphs)
    text = f"{grew:,} of {len(pool.graphs):,} graphs made it grow"
    if grew > _MOST_GRAPHS:
        text += "; those that did most"
    return text + ":" * (grew > 0)


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
    return {
        "name": pool.name,
        "kind": pool.kind,
        "minimum_bytes": pool.minimum,
        "reserved_bytes": pool.reserved,
        "stock_reserved_bytes": pool.stock,
        "expandable_reserved_bytes": pool.expandable,
        "primed_reserved_bytes": pool.primed,
        "apart_bytes": pool.apart,
        "execs": pool.execs,
        "graphs": [
            {"name": graph.name, "needed_bytes": graph.needed, "added_bytes": graph.added}
            for graph in pool.graphs
        ],
    }


# The page.

_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:75em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right}"
    "td:first-child,th:first-child{text-align:left}thead{border-bottom:1px solid}"
    "img{max-width:100%}"
)


def _page(report: PoolReport) -> str:
    lines = [*_of_process(report.process), _LEGEND]
    parts = [f"<p>{html.escape(line)}</p>" for line in lines]
    parts.append(_html_table(_rows(report.pools)))
    for pool in report.pools:
        rows = [("graph", "needs", "added"), *map(_graph_cells, pool.graphs)]
        parts += [
            f"<h2>{html.escape(pool.name)}</h2>",
            _picture(pool),
            f"<details><summary>{len(pool.graphs)} graphs: what each needs alone, and what it "
            f"added, in MiB</summary>{_html_table(rows)}</details>",
        ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>cudagraph_pool</title>'
        f"<style>{_STYLE}</style><h1>Graph pools</h1>{''.join(parts)}</html>\n"
    )


def _picture(pool: PoolCost) -> str:
    if pool.map is None or not pool.map.placed:
        return (
            "<p>No picture: torch.cuda.memory._record_memory_history() was not called before the "
            "captures.</p>"
        )
    if importlib.util.find_spec("matplotlib") is None:
        return "<p>No picture: pip install 'cudagraph-pool[plot]' for one.</p>"
    from .plot import draw

    file = io.BytesIO()
    draw(pool, file, "png")
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="memory map of {html.escape(pool.name)}" src="data:image/png;base64,{data}">'


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        inside = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{inside}</tr>"

    body = "".join(line(row, "td") for row in rows[1:])
    return f"<table><thead>{line(rows[0], 'th')}</thead><tbody>{body}</tbody></table>"
