"""Pictures of a pool's memory, by matplotlib."""

from __future__ import annotations

import importlib.util
import os
import warnings
from typing import IO, Any, Final

from .._table import mib
from .costs import PoolCost
from .memory_map import Placed

FORMATS: Final = (".png", ".svg", ".pdf")
_MIB: Final = 1 << 20
_NAME: Final = 40  # characters of it that fit
_OUTSIDE: Final = (0.6, 0.6, 0.6)  # of blocks that no graph allocated
_SHADE: Final = 0.55  # of a graph's colour, for what is stitched
_BARS: Final = {
    "a pool for each graph": ("apart", "#c9c9c9"),
    "PyTorch's own allocator": ("stock", "#e3a857"),
    "cudagraph_pool": ("reserved", "#2a788e"),
    "minimum": ("minimum", "#222222"),
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
    """Draws what a pool costs, and where in it everything lay.

    Arguments:
        cost: With its map.
        file: Where to; its ending says in which format, unless ``format`` does: png, svg, pdf.
    """
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    bars, plane = figure.subplots(2, 1, height_ratios=(1, 4))
    _draw_bars(bars, cost)
    _draw_map(figure, plane, cost)
    figure.legend(
        handles=_legend(plane, cost),
        **{"loc": "outside lower left", "ncols": 2, "fontsize": 8, "frameon": False},
    )
    figure.suptitle(
        _headline(cost),
        **{"x": 0.01, "ha": "left", "fontsize": 12, "fontweight": "bold", "wrap": True},
    )
    with (
        rc_context({"svg.fonttype": "none", "svg.hashsalt": "cudagraph_pool"}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # nobody can help it
        figure.savefig(file, dpi=150, format=format)


def _headline(cost: PoolCost) -> str:
    count = len(cost.graphs)
    name = cost.name if len(cost.name) <= _NAME else cost.name[: _NAME - 1] + "…"
    name = name.replace("$", r"\$")  # not a formula
    text = f"{name}: {count:,} graph{'s' * (count != 1)} in {mib(cost.reserved)} MiB"
    if cost.stock is not None and cost.stock > cost.reserved:
        saved = cost.stock - cost.reserved
        return f"{text} instead of {mib(cost.stock)} MiB: {mib(saved)} MiB saved"
    if cost.apart > cost.reserved:
        return f"{text}, where a pool for each would take {mib(cost.apart)} MiB"
    return text


def _draw_bars(panel: Any, cost: PoolCost) -> None:
    shown = [
        (label, getattr(cost, name), colour)
        for label, (name, colour) in _BARS.items()
        if getattr(cost, name) is not None
    ]
    for place, (label, size, colour) in enumerate(shown):
        panel.barh(place, size / _MIB, color=colour, height=0.7)
        times = "" if label == "minimum" else f"  ({size / cost.minimum:.2f} × minimum)"
        panel.text(size / _MIB, place, f" {mib(size)} MiB{times}", va="center", fontsize=8)
    panel.set_yticks(range(len(shown)), [label for label, _, _ in shown], fontsize=8)
    panel.set_xlim(0, 1.3 * max(size for _, size, _ in shown) / _MIB)
    panel.invert_yaxis()
    panel.spines[["top", "right", "bottom"]].set_visible(False)
    panel.set_xticks([])


def _draw_map(figure: Any, panel: Any, cost: PoolCost) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import Normalize

    drawn = cost.map
    assert drawn is not None
    count = len(cost.graphs)
    colours = _colours(count)
    places = _graphs_of(cost)
    corners, faces = [], []
    for placed, graph in zip(drawn.placed, places, strict=True):
        face = _OUTSIDE if graph is None else colours(graph)[:3]
        if len(placed.stretches) > 1:
            face = _shaded(face)
        end = drawn.operations if placed.died is None else placed.died
        for low, high in placed.stretches:
            x, y = (placed.born, end), (low / _MIB, high / _MIB)
            corners.append([(x[0], y[0]), (x[1], y[0]), (x[1], y[1]), (x[0], y[1])])
            faces.append(face)
    # A picture within the picture: tens of thousands of shapes would make a file of many MiB.
    panel.add_collection(
        PolyCollection(corners, facecolors=faces, edgecolors="none", rasterized=True)
    )
    _draw_lines(panel, cost, drawn.placed, places)
    panel.set_xlim(0, max(1, drawn.operations))
    panel.set_ylim(0, 1.12 * max(cost.reserved, cost.minimum) / _MIB)
    panel.set_xlabel("allocations and frees, in their order", fontsize=9)
    panel.set_ylabel("place in the pool's memory, MiB", fontsize=9)
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    if count > 1:
        bar = figure.colorbar(
            ScalarMappable(Normalize(0, count), colours),
            **{"ax": panel, "pad": 0.01, "aspect": 40},
        )
        marks = sorted({round(part * (count - 1) / 8) for part in range(9)})
        bar.set_ticks([mark + 0.5 for mark in marks], labels=[cost.graphs[m].name for m in marks])
        bar.ax.tick_params(labelsize=7, length=0)
        bar.minorticks_off()
        bar.set_label("graph, in order of capture", fontsize=8)


def _legend(panel: Any, cost: PoolCost) -> list[Any]:
    from matplotlib.patches import Patch

    assert cost.map is not None
    blocks = cost.map.placed
    stitched = sum(len(placed.stretches) > 1 for placed in blocks)
    colour = _colours(len(cost.graphs))(len(cost.graphs) // 2)[:3]
    outside = _graphs_of(cost).count(None)
    return [
        Patch(color=colour, label=f"a block in the colour of its graph ({len(blocks):,} blocks)"),
        Patch(
            color=_shaded(colour),
            label=f"darker: one block, stitched of pieces in several places ({stitched:,})",
        ),
        *panel.get_legend_handles_labels()[0],
        *[Patch(color=_OUTSIDE, label=f"of no graph: eager work ({outside:,})")] * bool(outside),
    ]


def _colours(count: int) -> Any:
    """One for each graph. Without the dark ends, of which nothing darker could be told apart."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    turbo = colormaps["turbo"]
    return ListedColormap(
        [turbo(0.1 + 0.8 * (n + 0.5) / max(1, count)) for n in range(max(1, count))]
    )


def _shaded(colour: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(_SHADE * part for part in colour)


def _draw_lines(panel: Any, cost: PoolCost, blocks: list[Placed], places: list[int | None]) -> None:
    """What the pool held after each capture, and what it needed in the end."""
    held = cost.reserved - sum(graph.added for graph in cost.graphs)
    begins: dict[int, int] = {}
    for placed, graph in zip(blocks, places, strict=True):
        if graph is not None:
            begins.setdefault(graph, placed.born)
    x, y = [0], [held / _MIB]
    for number, graph_cost in enumerate(cost.graphs):
        held += graph_cost.added
        if number in begins:
            x.append(begins[number])
            y.append(held / _MIB)
    panel.step(
        [*x, cost.map.operations if cost.map else 0],
        [*y, y[-1]],
        **{"where": "post", "color": "#2a788e", "lw": 1.5},
        label=f"held by the pool: {mib(cost.reserved)} MiB at the end",
    )
    panel.axhline(
        cost.minimum / _MIB,
        **{"color": "#222222", "ls": "--", "lw": 1},
        label=f"minimum: {mib(cost.minimum)} MiB",
    )


def _graphs_of(cost: PoolCost) -> list[int | None]:
    """Which graph allocated each block of the map."""
    assert cost.map is not None
    graphs: list[int | None] = [None] * len(cost.map.placed)
    for place, graph in enumerate(cost.graphs):
        for number in graph.numbers:
            if 0 <= number - cost.map.first_allocation < len(graphs):
                graphs[number - cost.map.first_allocation] = place
    return graphs
