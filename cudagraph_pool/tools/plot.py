"""Pictures of a pool's memory, by matplotlib."""

import importlib.util
import itertools
import os
import warnings
from typing import IO, Any, Final

from .._table import mib
from .costs import PoolCost

FORMATS: Final = (".png", ".svg", ".pdf")
_MIB: Final = 1 << 20
_NAME: Final = 40  # characters of it that fit
_OUTSIDE: Final = (0.6, 0.6, 0.6)  # of blocks that no graph allocated
_HATCH: Final = "///"  # of stitched blocks; denser lines flicker where a page shows it smaller
_OURS, _STOCK, _MINIMUM = "#2a788e", "#c8641e", "#222222"
_BARS: Final = {
    "a pool for each graph": ("apart", "#c9c9c9"),
    "PyTorch's own allocator": ("stock", _STOCK),
    "cudagraph_pool": ("reserved", _OURS),
    "minimum": ("minimum", _MINIMUM),
}
# A page shows 1,200 pixels on 750: text of 11 points has 11 pixels there.
STYLE: Final = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "cudagraph_pool",
}


def require_matplotlib() -> None:
    """Raises ImportError, with what to do, if there is none."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            "a picture needs matplotlib, which is not installed here: "
            "pip install 'cudagraph-pool[plot]'"
        )


def draw(
    cost: PoolCost, file: str | os.PathLike[str] | IO[bytes], format: str | None = None
) -> None:
    """Draws a pool's cost, growth and map. The file's ending, or ``format``, is png, svg or pdf."""
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    name = cost.name if len(cost.name) <= _NAME else cost.name[: _NAME - 1] + "…"
    title = name + cost.headline().removeprefix(cost.name)
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure: Any = Figure(figsize=(10, 8), layout="constrained")
        top, bottom = figure.subfigures(2, 1, height_ratios=(2, 5))
        bars, curves = top.subplots(1, 2, width_ratios=(3, 2))
        _draw_bars(bars, cost)
        _draw_growth(curves, cost)
        _draw_map(bottom, bottom.subplots(), cost)
        title = title.replace("$", r"\$")  # no formula
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", wrap=True)
        figure.savefig(file, dpi=120, format=format)


def _draw_bars(panel: Any, cost: PoolCost) -> None:
    for label, (name, colour) in _BARS.items():
        if (size := getattr(cost, name)) is not None:
            bar = panel.barh([label], [size / _MIB], color=colour)
            text = f"{mib(size)} MiB ({size / cost.minimum:.2f} ×)"
            panel.bar_label(bar, [text], padding=3)
    panel.margins(x=0.6)
    panel.invert_yaxis()
    panel.spines["bottom"].set_visible(False)
    panel.set_xticks([])
    panel.set_title("held at the end (times the minimum)", loc="left", fontsize=11)


def _draw_growth(panel: Any, cost: PoolCost) -> None:
    """What each allocator held after each graph: what makes one grow costs memory."""
    before = cost.reserved - sum(graph.added for graph in cost.graphs)
    ours = list(itertools.accumulate((graph.added for graph in cost.graphs), initial=before))[1:]
    for sizes, colour, label in (
        (cost.stock_growth or [], _STOCK, "PyTorch's own"),
        (ours, _OURS, "cudagraph_pool"),
    ):
        if held := [size / _MIB for size in sizes]:
            panel.step(range(1, len(held) + 1), held, where="post", color=colour, label=label, lw=2)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("graphs captured")
    panel.set_ylabel("held, MiB")
    panel.legend(frameon=False, fontsize=10)
    _whole_numbers(panel)


def _draw_map(figure: Any, panel: Any, cost: PoolCost) -> None:
    """Time to the right, places upwards; each graph has a colour, and what is stitched is hatched.
    The shapes are a picture within it: tens of thousands would make a file of many MiB.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import Normalize
    from matplotlib.patches import Patch

    assert cost.map is not None
    # Which colour-blind readers can tell apart too.
    colours: Any = ScalarMappable(Normalize(0, max(1, len(cost.graphs) - 1)), colormaps["viridis"])
    placed, graphs = cost.map.placed, _graphs_of(cost)
    for hatch in (None, _HATCH):
        shapes, faces = [], []
        for block, graph in zip(placed, graphs, strict=True):
            if (len(block.stretches) > 1) == bool(hatch):
                begin, end = block.born, cost.map.operations if block.died is None else block.died
                for stretch in block.stretches:
                    low, high = (place / _MIB for place in stretch)
                    shapes.append([(begin, low), (end, low), (end, high), (begin, high)])
                    faces.append(_OUTSIDE if graph is None else colours.to_rgba(graph))
        look = {"edgecolors": "white", "linewidths": 0} if hatch else {"edgecolors": "none"}
        panel.add_collection(
            PolyCollection(shapes, facecolors=faces, hatch=hatch, rasterized=True, **look)
        )
    low = panel.axhline(cost.minimum / _MIB, color=_MINIMUM, ls="--", lw=1.2)
    low.set_label(f"minimum: {mib(cost.minimum)} MiB")
    panel.set_xlim(0, max(1, cost.map.operations))
    panel.set_ylim(0, 1.08 * max(cost.reserved, cost.minimum) / _MIB)
    panel.set_xlabel("allocations and frees, in their order")
    panel.set_ylabel("place in the pool, MiB")
    _whole_numbers(panel)
    if len(cost.graphs) > 1:
        bar = figure.colorbar(colours, ax=panel, pad=0.01, aspect=40)
        bar.set_ticks([0, len(cost.graphs) - 1], labels=["first graph", "last"])
    middle = colours.to_rgba(len(cost.graphs) // 2)
    stitched = sum(len(block.stretches) > 1 for block in placed)
    legend = [
        Patch(color=middle, label=f"{len(placed):,} blocks, in the colour of their graph"),
        Patch(facecolor=middle, hatch=_HATCH, edgecolor="white", label=f"{stitched:,} stitched"),
        Patch(color=_OUTSIDE, label=f"{graphs.count(None):,} of no graph: eager work"),
    ]
    shown = [part for part in legend if not str(part.get_label()).startswith("0 ")]
    figure.legend(handles=[*shown, low], loc="outside lower left", ncols=2, frameon=False)


def _whole_numbers(panel: Any) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _graphs_of(cost: PoolCost) -> list[int | None]:
    """Which graph allocated each block of the map."""
    assert cost.map is not None
    of = {number: place for place, graph in enumerate(cost.graphs) for number in graph.numbers}
    return [of.get(cost.map.first_allocation + n) for n in range(len(cost.map.placed))]
