"""Pictures of a pool's memory, by matplotlib."""

from __future__ import annotations

import importlib.util
import itertools
import os
import warnings
from typing import IO, Any, Final

from .._table import mib
from .costs import PoolCost

FORMATS: Final = (".png", ".svg", ".pdf")
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_NAME: Final = 40  # characters of it that fit
_OUTSIDE: Final = (0.6, 0.6, 0.6)  # of blocks that no graph allocated
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
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "cudagraph_pool",
}
# matplotlib's own font has no East Asian letters.
_MORE_FONTS: Final = ("Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "IPAGothic")


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
    """Draws what a pool costs, how it grew, and where in it everything lay.

    Arguments:
        cost: With its map.
        file: Where to; its ending says in which format, unless ``format`` does: png, svg, pdf.
    """
    require_matplotlib()
    from matplotlib import font_manager, rc_context
    from matplotlib.figure import Figure

    installed = set(font_manager.get_font_names())
    fonts = ["DejaVu Sans", *(font for font in _MORE_FONTS if font in installed)]
    with rc_context({**STYLE, "font.family": fonts}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure = Figure(figsize=(10, 8), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=(2, 5))
        top, bottom = parts
        if len(cost.graphs) > 1:
            bars, curves = top.subplots(1, 2, width_ratios=(3, 2))
            _draw_growth(curves, cost)
        else:
            bars = top.subplots()
        _draw_bars(bars, cost)
        _draw_map(bottom, bottom.subplots(), cost)
        figure.suptitle(_shown(cost), x=0.01, ha="left", fontweight="bold", wrap=True)
        figure.savefig(file, dpi=120, format=format)


def _shown(cost: PoolCost) -> str:
    """The headline, with a name that fits and is no formula."""
    text = cost.headline().removeprefix(cost.name)
    name = cost.name if len(cost.name) <= _NAME else cost.name[: _NAME - 1] + "…"
    return (name + text).replace("$", r"\$")


def _draw_bars(panel: Any, cost: PoolCost) -> None:
    for label, (name, colour) in _BARS.items():
        size = getattr(cost, name)
        if size is not None:
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
    scale, unit = _scale(max(cost.reserved, cost.stock or 0))
    before = cost.reserved - sum(graph.added for graph in cost.graphs)
    ours = list(itertools.accumulate((graph.added for graph in cost.graphs), initial=before))[1:]
    for sizes, colour, label in (
        (cost.stock_growth or [], _STOCK, "PyTorch's own"),
        (ours, _OURS, "cudagraph_pool"),
    ):
        held = [size / scale for size in sizes]
        if held:
            panel.step(range(1, len(held) + 1), held, where="post", color=colour, label=label, lw=2)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("graphs captured")
    panel.set_title(f"held after each graph, {unit}", loc="left", fontsize=11)
    panel.legend(frameon=False, fontsize=10)
    _whole_numbers(panel, x=True, y=unit == "MiB")


def _scale(largest: int) -> tuple[int, str]:
    return (_GIB, "GiB") if largest >= 10 * _GIB else (_MIB, "MiB")


def _whole_numbers(panel: Any, x: bool, y: bool) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    for axis in [panel.xaxis] * x + [panel.yaxis] * y:
        axis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _draw_map(figure: Any, panel: Any, cost: PoolCost) -> None:
    """Time to the right, places upwards; each graph has a colour, and what is stitched is hatched.

    The shapes are a picture within the picture: tens of thousands would make a file of many MiB.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    drawn = cost.map
    assert drawn is not None
    scale, unit = _scale(max(cost.reserved, cost.minimum))
    graphs = _graphs_of(cost)
    colours = _colours(len(cost.graphs))
    whole: list[tuple[Any, Any]] = []  # of shapes, with their colours
    stitched: list[tuple[Any, Any]] = []
    for placed, graph in zip(drawn.placed, graphs, strict=True):
        face = _OUTSIDE if graph is None else colours(graph)[:3]
        left, right = placed.born, drawn.operations if placed.died is None else placed.died
        for low, high in placed.stretches:
            corners = [
                (x, y / scale) for x, y in ((left, low), (right, low), (right, high), (left, high))
            ]
            (stitched if len(placed.stretches) > 1 else whole).append((corners, face))
    for shapes, hatch in ((whole, None), (stitched, "/////")):
        if shapes:
            outlines, faces = zip(*shapes, strict=True)
            look = {"edgecolors": "white", "linewidths": 0} if hatch else {"edgecolors": "none"}
            panel.add_collection(
                PolyCollection(outlines, facecolors=faces, hatch=hatch, rasterized=True, **look)
            )
    low = panel.axhline(cost.minimum / scale, color=_MINIMUM, ls="--", lw=1.2)
    low.set_label(f"minimum: {mib(cost.minimum)} MiB")
    panel.set_xlim(0, max(1, drawn.operations))
    panel.set_ylim(0, 1.08 * max(cost.reserved, cost.minimum) / scale)
    panel.set_xlabel("allocations and frees, in their order")
    panel.set_ylabel(f"place in the pool, {unit}")
    _whole_numbers(panel, x=True, y=unit == "MiB")
    _colour_bar(figure, panel, cost)
    middle, outside = colours(len(cost.graphs) // 2), graphs.count(None)
    pieces = sum(len(placed.stretches) > 1 for placed in drawn.placed)
    hatched = {"facecolor": middle, "hatch": "/////", "edgecolor": "white"}
    legend: tuple[tuple[int, str, dict[str, Any]], ...] = (
        (len(drawn.placed), ", in the colour of their graph", {"color": middle}),
        (pieces, " stitched of pieces in several places", hatched),
        (outside, " of no graph: eager work", {"color": _OUTSIDE}),
    )
    handles = [
        Patch(label=f"{count:,} block{'s' * (count != 1)}{what}", **look)
        for count, what, look in legend
        if count
    ]
    figure.legend(handles=[*handles, low], loc="outside lower left", ncols=2, frameon=False)


def _colour_bar(figure: Any, panel: Any, cost: PoolCost) -> None:
    count = len(cost.graphs)
    if count < 2:
        return
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    scale = ScalarMappable(Normalize(0, count), _colours(count))
    bar = figure.colorbar(scale, ax=panel, pad=0.01, aspect=40)
    marks = sorted({round(part * (count - 1) / 8) for part in range(9)})
    names = [graph.name for graph in cost.graphs]
    are_sizes = names != [str(number) for number in range(1, count + 1)]
    if max(map(len, names)) > 8:  # would push the map aside
        names, are_sizes = [str(number) for number in range(1, count + 1)], False
    bar.set_ticks([mark + 0.5 for mark in marks], labels=[names[mark] for mark in marks])
    bar.ax.tick_params(labelsize=10, length=0)
    bar.minorticks_off()
    first = "size of the graph, the first captured below" if are_sizes else "graph, as captured"
    bar.set_label(first)


def _colours(count: int) -> Any:
    """One for each graph, which colour-blind readers can tell apart too."""
    from matplotlib import colormaps

    return colormaps["viridis"].resampled(max(1, count))


def _graphs_of(cost: PoolCost) -> list[int | None]:
    """Which graph allocated each block of the map."""
    assert cost.map is not None
    of = {number: place for place, graph in enumerate(cost.graphs) for number in graph.numbers}
    return [of.get(cost.map.first_allocation + n) for n in range(len(cost.map.placed))]
