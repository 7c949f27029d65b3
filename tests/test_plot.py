"""Pictures, by what matplotlib is given to draw."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from small_trace import TRACES, WriteTrace

from cudagraph_pool.cli.main import main
from cudagraph_pool.tools import plot
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


def test_picture(figures: list[Figure], tmp_path: Path) -> None:
    cost = cost_of("gpt2")
    assert cost.map is not None
    plot.draw(cost, tmp_path / "map.svg")
    (figure,) = figures
    bars, growth, plane = figure.axes[:3]
    headline = "gpt2_train_asc: 8 graphs in 4,162 MiB instead of 11,366 MiB: 7,204 MiB saved"
    assert headline in (tmp_path / "map.svg").read_text()

    # Each shape is a piece, in its graph's colour; what is stitched is hatched.
    whole: Any
    stitched: Any
    whole, stitched = plane.collections
    assert (whole.get_hatch(), stitched.get_hatch()) == (None, plot._HATCH)
    pixels = 750 / 10 / (6 * len(plot._HATCH))  # between lines, where 10 inches are 750 pixels
    assert pixels >= 4, "closer ones make moiré"
    pieces = [len(placed.stretches) for placed in cost.map.placed]
    assert len(whole.get_paths()) == pieces.count(1)
    assert len(stitched.get_paths()) == sum(pieces) - pieces.count(1)
    shapes = (*whole.get_facecolor(), *stitched.get_facecolor())
    assert len({tuple(colour) for colour in shapes}) == len(cost.graphs)

    # PyTorch's own grows beside the pool's, to what the bars say.
    lines: Any = growth.lines
    curves: list[list[float]] = [list(line.get_ydata()) for line in lines]
    assert [curve[-1] for curve in curves] == [11_366, 4_162]
    assert all(curve == sorted(curve) for curve in curves)
    assert [text.get_text() for text in bars.texts][1:] == [
        *("11,366 MiB (2.75 ×)", "4,162 MiB (1.01 ×)", "4,138 MiB (1.00 ×)")
    ]


def test_what_no_graph_has_is_not_in_the_legend(figures: list[Figure], tmp_path: Path) -> None:
    drawn = MemoryMap(first_allocation=2)
    for n in range(6):
        drawn.allocate(n, [(0, n, 1)])
    graphs = [GraphCost(f"{n}" * 19, 0, 0, of) for n, of in enumerate([range(1, 4), range(5, 7)])]
    cost = PoolCost("pool", "", graphs, PAGE_BYTES, PAGE_BYTES, 0, map=drawn)
    assert plot._graphs_of(cost) == [0, 0, None, 1, 1, None]
    plot.draw(cost, tmp_path / "map.png")
    (legend,) = (part.legends[0] for part in figures[0].subfigs if part.legends)
    assert [text.get_text() for text in legend.get_texts()] == [
        "6 blocks, in the colour of their graph",
        "2 of no graph: eager work",
        "minimum: 2 MiB",
    ]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "shown"), [("W" * 200, "W" * 39 + "…: "), ("字", "字: "), (r"$\x$", r"\$\x\$: ")]
)
def test_names_from_elsewhere(
    write_trace: WriteTrace, figures: list[Figure], tmp_path: Path, name: str, shown: str
) -> None:
    plot.draw(of_trace(read_trace(write_trace(name=name)), maps=True), tmp_path / "map.png")
    assert figures[0].get_suptitle().startswith(shown)


def test_command_names_its_output(
    write_trace: WriteTrace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plot", str(write_trace())]) == 0
    assert capsys.readouterr() == ("", "wrote small.png\n")
    assert (tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")


def test_command_needs_no_backend(write_trace: WriteTrace, tmp_path: Path) -> None:
    command = ["-m", "cudagraph_pool", "plot", str(write_trace()), "-o", str(tmp_path / "map.pdf")]
    environment = dict(os.environ, MPLBACKEND="unknown")
    done = subprocess.run(
        [sys.executable, "-P", *command], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, f"wrote {tmp_path / 'map.pdf'}\n")


def test_without_matplotlib(
    write_trace: WriteTrace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["plot", str(write_trace())]) == 2
    assert "pip install 'cudagraph-pool[plot]'" in capsys.readouterr().err
