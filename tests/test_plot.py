"""Pictures of pools: drawn for every kind of trace, and with words where that cannot be."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_trace import TRACES, WriteTrace

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from cudagraph_pool.cli.main import main
from cudagraph_pool.tools import plot as _plot
from cudagraph_pool.tools.costs import GraphCost, PoolCost, of_trace
from cudagraph_pool.tools.memory_map import MemoryMap
from cudagraph_pool.tools.trace import PAGE_BYTES, read_trace


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """All that are saved."""
    saved: list[Figure] = []
    save = Figure.savefig

    def savefig(figure: Figure, *args: Any, **kwargs: Any) -> None:
        saved.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


def cost_of(name: str) -> PoolCost:
    path = next(path for path in TRACES if path.name.startswith(name))
    return of_trace(read_trace(path), maps=True)


def test_a_shape_for_each_piece_in_its_graphs_colour(figures: list[Figure], tmp_path: Path) -> None:
    cost = cost_of("gpt2")
    assert cost.map is not None
    _plot.draw(cost, tmp_path / "map.png")
    (figure,) = figures
    plane = figure.axes[1]
    (shapes,) = plane.collections
    pieces = [stretch for placed in cost.map.placed for stretch in placed.stretches]
    assert len(shapes.get_paths()) == len(pieces)
    colours = {tuple(colour) for colour in shapes.get_facecolor()}
    stitched = {
        graph
        for placed, graph in zip(cost.map.placed, _plot._graphs_of(cost), strict=True)
        if len(placed.stretches) > 1
    }
    assert len(colours) == len(cost.graphs) + len(stitched)
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert f"held by the pool: {cost.reserved >> 20:,} MiB at the end" in said
    assert "minimum: 4,138 MiB" in said
    assert any(f"({len(cost.map.placed):,} blocks)" in text for text in said)


def test_the_headline_is_what_was_saved(figures: list[Figure], tmp_path: Path) -> None:
    _plot.draw(cost_of("mlp"), tmp_path / "map.svg")
    headline = figures[0].get_suptitle()
    assert headline == "mlp_asc: 128 graphs in 146 MiB instead of 1,326 MiB: 1,180 MiB saved"
    assert headline in (tmp_path / "map.svg").read_text()
    trace = read_trace(next(path for path in TRACES if path.name.startswith("mlp")))
    _plot.draw(of_trace(trace, "desc", maps=True), tmp_path / "map.png")
    headline = figures[1].get_suptitle()
    assert headline == "mlp_asc: 128 graphs in 146 MiB instead of 244 MiB: 98 MiB saved"


def test_graphs_are_where_they_were_captured() -> None:
    cost = cost_of("mlp")
    assert cost.map is not None
    places = _plot._graphs_of(cost)
    assert places == sorted(n for n in places if n is not None)
    assert set(places) == set(range(128))


def test_what_is_allocated_between_captures_is_no_graphs() -> None:
    drawn = MemoryMap(first_allocation=2)
    for n in range(6):
        drawn.allocate([(n, n + 1)])
    graphs = [
        GraphCost(str(n), 0, 0, numbers) for n, numbers in enumerate([range(1, 4), range(5, 7)])
    ]
    cost = PoolCost("pool", "", graphs, PAGE_BYTES, PAGE_BYTES, 0, map=drawn)
    assert _plot._graphs_of(cost) == [0, 0, None, 1, 1, None]
    legend = [part.get_label() for part in _plot._legend(Figure().subplots(), cost)]
    assert legend[-1] == "of no graph: eager work (2)"


@pytest.mark.parametrize(
    ("count", "headline"),
    [(1, "1 graph in 2 MiB"), (2, "2 graphs in 2 MiB, where a pool for each would take 4 MiB")],
)
def test_without_stock(
    write_trace: WriteTrace, figures: list[Figure], tmp_path: Path, count: int, headline: str
) -> None:
    """Of captures on several streams nobody works it out."""
    graphs = [
        {"key": n, "events": [[1, 2 * n, 512, 0], [1, 2 * n + 1, 512, 1], [-1, 2 * n]]}
        for n in range(count)
    ]
    trace = read_trace(write_trace(graphs=graphs, stock={"reserved": 0}))
    cost = of_trace(trace, maps=True)
    assert cost.stock is None
    _plot.draw(cost, tmp_path / "map.pdf")
    assert figures[0].get_suptitle() == f"small: {headline}"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "shown"), [("W" * 200, "W" * 39 + "…: "), ("字", "字: "), (r"$\x$", r"\$\x\$: ")]
)
def test_names_from_elsewhere(
    write_trace: WriteTrace, figures: list[Figure], tmp_path: Path, name: str, shown: str
) -> None:
    _plot.draw(of_trace(read_trace(write_trace(name=name)), maps=True), tmp_path / "map.png")
    (figure,) = figures
    assert figure.get_suptitle().startswith(shown)
    (title,) = figure.texts
    assert title.get_wrap()


def test_more_graphs_than_16_bits_count(tmp_path: Path) -> None:
    graphs = [GraphCost(str(n), 0, 0, range(n, n + 1)) for n in range(1 << 15)]
    drawn = MemoryMap()
    drawn.allocate([(0, PAGE_BYTES)])
    cost = PoolCost("pool", "", graphs, PAGE_BYTES, PAGE_BYTES, 0, map=drawn)
    _plot.draw(cost, tmp_path / "map.png")


@pytest.mark.parametrize(
    ("ending", "begins"),
    [("png", b"\x89PNG"), ("PNG", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")],
)
def test_command(write_trace: WriteTrace, tmp_path: Path, ending: str, begins: bytes) -> None:
    path = tmp_path / f"map.{ending}"
    assert main(["plot", str(write_trace()), "-o", str(path)]) == 0
    assert path.read_bytes().startswith(begins)


def test_command_refuses(
    write_trace: WriteTrace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(write_trace())
    assert main(["plot", trace, "-o", "map.gif"]) == 2
    assert "must end in one of .png, .svg, .pdf" in capsys.readouterr().err
    assert main(["plot", trace, "-o", str(tmp_path / "none" / "map.png")]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err
    assert main(["plot", str(tmp_path), "-o", str(tmp_path / "map.png")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "map.png").exists()
    link = tmp_path / "link.png"
    link.symlink_to(trace)
    assert main(["plot", trace, "-o", str(link)]) == 2
    assert "it is the trace itself" in capsys.readouterr().err
    read_trace(trace)


def test_command_needs_no_backend(write_trace: WriteTrace, tmp_path: Path) -> None:
    command = ["-m", "cudagraph_pool", "plot", str(write_trace()), "-o", str(tmp_path / "map.png")]
    environment = dict(os.environ, MPLBACKEND="unknown")
    done = subprocess.run(
        [sys.executable, "-P", *command], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_without_matplotlib(
    write_trace: WriteTrace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(write_trace()), "-o", str(tmp_path / "map.png")]) == 2
    assert "pip install 'cudagraph-pool[plot]'" in capsys.readouterr().err
    page = tmp_path / "page.html"
    assert main(["report", str(write_trace()), "--html", str(page)]) == 0
    assert "pip install" in page.read_text()
