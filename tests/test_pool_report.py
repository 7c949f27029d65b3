"""cgp.stats(), cgp.report() and GraphPool.plot() of a process, on an adapter that is made up; and
the report of recorded captures.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_trace import TRACES, WriteTrace, as_adapter, fields

import cudagraph_pool as cgp
from cudagraph_pool import _core, pools
from cudagraph_pool.cli.main import main
from cudagraph_pool.tools import pool_report
from cudagraph_pool.tools.costs import of_trace
from cudagraph_pool.tools.replay import POOL
from cudagraph_pool.tools.trace import read_trace

PAGE = 2 << 20
TREE, MEMPOOL, OWN, SHARED = (0, 4), (0, 5), (9, 0), (2**64 - 1, 0)


class Adapter:
    """Has pools of the driver that counts."""

    def __init__(self) -> None:
        self.pools = _core.PoolSet(_core.NumberDriver())
        for name in (POOL, TREE, MEMPOOL, OWN, SHARED):
            self.pools.begin_scope(name, _core.ScopeKind.CAPTURE)
            self.pools.allocate(name, 3 * PAGE, 1)
            self.pools.end_scope(name)
            self.pools.begin_scope(name, _core.ScopeKind.CAPTURE)
            self.second = self.pools.allocate(name, PAGE, 1).address  # of the last pool
            self.pools.free(self.second)
            self.pools.end_scope(name)

    def pool_ids(self, device: int) -> list[tuple[int, int]]:
        return [*self.pools.ids(), (77, 0)] if device == 1 else []  # the last is given back

    def is_mempool(self, device: int, id: tuple[int, int]) -> bool:
        return id == MEMPOOL

    def use_count(self, device: int, id: tuple[int, int]) -> int:
        return self.pools.use_count(id)

    def stats(self, device: int, id: tuple[int, int]) -> dict[str, int]:
        return fields(self.pools.stats(id))

    def captures(self, device: int, id: tuple[int, int]) -> list[dict[str, int]]:
        return self.pools.captures(id)

    def snapshot(self, device: int, id: tuple[int, int]) -> dict[str, Any]:
        return as_adapter(self.pools.snapshot(id))

    def capture_counts(self) -> dict[str, int]:
        return {"ours": 10, "base": 3}

    def base_captures(self) -> dict[str, int]:
        return {"disabled": 2, "mempool": 0, "older_pool": 1}


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Adapter:
    fake = Adapter()
    monkeypatch.setattr(pools, "loaded_adapter", lambda: fake)
    monkeypatch.setattr(pool_report, "load_adapter", lambda: fake)
    execs = {"execs": 3, "exec_alone": {"the driver is too new": 2}}
    monkeypatch.setattr(pools, "caches", {1: SimpleNamespace(stats=lambda: execs)})
    torch: Any = SimpleNamespace(
        cuda=SimpleNamespace(device_count=lambda: 2, memory=SimpleNamespace()),
        _C=SimpleNamespace(_cuda_isHistoryEnabled=lambda: False),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    return fake


def test_without_an_adapter_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "loaded_adapter", lambda: None)
    reasons = {"disabled": 0, "mempool": 0, "older_pool": 0}
    captures = {"ours": 0, "base": 0, "base_reasons": reasons}
    assert cgp.stats() == {"captures": captures, "pools": [], "execs": []}
    assert "there are no graph pools" in str(cgp.report())


def test_stats_of_every_kind_of_pool(adapter: Adapter) -> None:
    found = cgp.stats()
    alone = {"the driver is too new": 2}
    assert found["execs"] == [{"device": 1, "execs": 3, "exec_alone": alone}]
    assert found["captures"] == {
        "ours": 10,
        "base": 3,
        "base_reasons": {"disabled": 2, "mempool": 0, "older_pool": 1},
    }
    kinds = {pool["id"]: pool["kind"] for pool in found["pools"]}
    assert kinds == {
        POOL: "graph_pool_handle",
        TREE: "graph_pool_handle",
        MEMPOOL: "MemPool",
        OWN: "one capture's own",
        SHARED: "shared captures",
    }
    names = ("added_bytes", "live_before_bytes", "peak_bytes", "first_allocation", "allocations")
    graphs = [(3 * PAGE, 0, 3 * PAGE, 0, 1), (PAGE, 3 * PAGE, 4 * PAGE, 1, 1)]
    for pool in found["pools"]:
        assert (pool["device"], pool["users"], pool["reserved_bytes"]) == (1, 2, 4 * PAGE)
        assert pool["graphs"] == [dict(zip(names, graph, strict=True)) for graph in graphs]


def test_report_of_a_process(adapter: Adapter) -> None:
    report = cgp.report()
    text = str(report)
    assert text.startswith(
        "10 captures in pools of cudagraph_pool, 3 in PyTorch's own\n"
        "why there: disabled: 2, older_pool: 1\n"
        "3 executables run all graphs of cuda:1 that share them\n"
        "2 graphs of cuda:1 do not share: the driver is too new\n"
    )
    row = next(line for line in text.splitlines() if line.startswith("cuda:1 (0, 5)"))
    assert row.split()[3:] == ["MemPool", "2", "8", "8", "1.000", "8"]
    assert "cuda:1 (0, 5): 2 graphs in 8 MiB\n  its largest graph (1) needs 6 MiB alone" in text
    pool = report.as_json()["pools"][0]
    assert pool["apart_bytes"] == 4 * PAGE
    assert pool["graphs"][1] == {"name": "2", "needed_bytes": PAGE, "added_bytes": PAGE}
    json.dumps(report.as_json())


def history(adapter: Adapter) -> list[dict[str, Any]]:
    """Of the pools' second captures, and of what is elsewhere."""
    entry = {"action": "alloc", "addr": adapter.second, "size": PAGE}
    return [{"action": "alloc", "addr": 4096, "size": 512}, entry, {**entry, "action": "oom"}]


def with_history(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = sys.modules["torch"]
    traces = {"device_traces": [[], history(adapter)]}
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: traces, raising=False)


def test_pages_have_pictures_where_there_is_a_history(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    cgp.report().save_html(tmp_path / "without.html")
    assert "_record_memory_history() was not called" in (tmp_path / "without.html").read_text()
    with_history(adapter, monkeypatch)
    report = cgp.report()
    drawn = next(pool.map for pool in report.pools if pool.kind == "shared captures")
    assert drawn is not None
    assert drawn.first_allocation == 1
    report.save_html(tmp_path / "with.html")
    page = (tmp_path / "with.html").read_text()
    assert page.count("data:image/png;base64,") == 1


def test_plot_of_a_pool(adapter: Adapter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pool = object.__new__(cgp.GraphPool)
    vars(pool).update(_adapter=adapter, _open=True, _id=SHARED, _execs=SimpleNamespace(stats=dict))
    vars(pool)["_device"] = SimpleNamespace(index=1)
    try:
        with pytest.raises(RuntimeError, match="before the captures"):
            pool.plot(tmp_path / "map.png")
        with_history(adapter, monkeypatch)
        pool.plot(tmp_path / "map.png")
        assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
        pool._open = False
        with pytest.raises(RuntimeError, match="was released"):
            pool.plot(tmp_path / "map.png")
    finally:
        pool._open = False


def test_report_of_traces(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    page = tmp_path / "page.html"
    (small,) = (path for path in TRACES if path.name.startswith("seed"))
    assert main(["report", str(TRACES[0]), str(small), "--html", str(page)]) == 0
    text, err = capsys.readouterr()
    assert err == f"wrote {page}\n"
    head = text.splitlines()[0].split()
    row = next(line for line in text.splitlines() if line.startswith("gpt2_train_asc "))
    reserved = of_trace(read_trace(TRACES[0])).reserved >> 20
    assert dict(zip(head, row.split(), strict=True)) == {
        **{"pool": "gpt2_train_asc", "order": "recorded", "graphs": "8", "minimum": "4,138"},
        **{"reserved": f"{reserved:,}", "ratio": f"{reserved / 4138:.3f}", "stock": "11,366"},
        **{"saved": f"{11366 - reserved:,}", "apart": "19,136"},
        **{"expandable": "4,666", "primed": "4,958"},
    }
    saved = f"instead of 11,366 MiB: {11366 - reserved:,} MiB saved"
    assert f"gpt2_train_asc: 8 graphs in {reserved:,} MiB {saved}" in text
    assert "its largest graph (512) needs 4,138 MiB alone; all 8 together take" in text
    assert re.search(r"^all 2 pools: .* MiB saved$", text, re.M)
    shown = page.read_text()
    assert saved in shown
    assert re.search(r"Recorded with torch 2\.11\.0\S*, NVIDIA H200\.", shown)
    assert '<meta name="viewport"' in shown
    assert not re.search(r"(src|href)=\"(?!data:)", shown), "it stands alone"
    assert shown.count("<tr>") == 1 + 2 + (1 + 8) + (1 + 128)


def test_report_as_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["report", "--json", str(TRACES[0]), "--order", "desc"]
    assert main(arguments) == 0
    (pool,) = json.loads(capsys.readouterr().out)["pools"]
    assert (pool["kind"], pool["order"]) == ("trace", "desc")
    assert sum(graph["added_bytes"] for graph in pool["graphs"]) == pool["reserved_bytes"]
    assert pool["graphs"][0]["name"] == "512"
    stock = 4658 << 20
    assert pool["stock_reserved_bytes"] == stock, "worked out: another order was recorded"
    assert pool["stock_growth_bytes"][-1] == stock
    assert pool["saved_bytes"] == stock - pool["reserved_bytes"]


def test_stocks_growth_is_as_recorded(write_trace: WriteTrace) -> None:
    graphs = [{"key": 1, "stock": n, "events": [[1, n, 512, n]]} for n in (3, 4)]
    trace = read_trace(write_trace(graphs=graphs))
    assert of_trace(trace).stock_growth == [3, 4], "also of several streams"
    assert of_trace(trace, "shuffled", seed=1).stock_growth is None
    del graphs[0]["stock"]
    assert of_trace(read_trace(write_trace(graphs=graphs))).stock_growth is None


@pytest.mark.parametrize(
    ("stock", "said"),
    [
        (8, "2 graphs in 2 MiB instead of 8 MiB: 6 MiB saved, 4.0 times less"),
        (1, "2 graphs in 2 MiB, 1 MiB with PyTorch's own allocator: nothing is saved"),
        (0, "2 graphs in 2 MiB, where a pool for each would take 4 MiB"),
    ],
)
def test_headlines(write_trace: WriteTrace, stock: int, said: str) -> None:
    """Of captures on several streams nobody works out what stock would take."""
    graphs = [
        {"key": n, "events": [[1, 2 * n, 512, 0], [1, 2 * n + 1, 512, 1], [-1, 2 * n]]}
        for n in range(2)
    ]
    trace = read_trace(write_trace(graphs=graphs, stock={"reserved": stock << 20}))
    assert of_trace(trace).headline() == f"small: {said}"


def test_graphs_of_record_have_numbers_as_their_sizes_are_not_known() -> None:
    (recorded,) = (path for path in TRACES[0].parent.glob("models/*") if "h100" in path.name)
    assert [graph.name for graph in of_trace(read_trace(recorded)).graphs[:3]] == ["1", "2", "3"]


def test_names_from_elsewhere_are_no_markup(write_trace: WriteTrace, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    name = "<script>alert('x')</script>"
    page = tmp_path / "page.html"
    assert main(["report", str(write_trace(name=name)), "--html", str(page)]) == 0
    assert name not in page.read_text()
    assert "&lt;script&gt;alert(" in page.read_text()


# A page of one table, as far as the script asks; prints its rows after each press on a column.
PRESSED = """
const rows = [["a", "1,000"], ["b", "20.5"], ["c", "-"], ["d", "3"]].map(words => ({
  name: words[0], cells: words.map(word => ({ textContent: ` ${word} ` })) }))
const body = { rows, append: (...sorted) => { body.rows = sorted } }
const heads = ["pool", "MiB"].map((word, cellIndex) => ({
  childNodes: [word], cellIndex, append(button) { this.button = button },
  closest: () => ({ tBodies: [body] }) }))
for (const head of heads) head.parentNode = { cells: heads }
global.document = { querySelectorAll: () => heads, createElement: () => ({ append() {} }) }
SCRIPT
for (const column of [1, 1, 0]) {
  heads[column].button.onclick()
  console.log(body.rows.map(row => row.name).join(""), ...heads.map(head => head.ariaSort))
}
"""


def test_a_page_sorts_its_tables(write_trace: WriteTrace, tmp_path: Path) -> None:
    """Numbers by what they are, and what is not known below all of them."""
    pytest.importorskip("jinja2")
    page = tmp_path / "page.html"
    assert main(["report", str(write_trace()), "--html", str(page)]) == 0
    (script,) = re.findall("<script>(.*)</script>", page.read_text(), re.DOTALL)
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    command = [node, "-e", PRESSED.replace("SCRIPT", script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        *("abdc none descending", "cdba none ascending", "dcba descending none")
    ]


def test_without_jinja2(
    write_trace: WriteTrace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["report", str(write_trace()), "--html", "page.html"]) == 2
    assert "pip install 'cudagraph-pool[report]'" in capsys.readouterr().err
    assert not Path("page.html").exists()


def test_pools_are_released_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever lets them go; and then they are nobody's."""
    registered: list[tuple[int, int]] = []
    fake: Any = SimpleNamespace(
        register_pool=lambda device, id_: registered.append(id_),
        unregister_pool=lambda device, id_: registered.remove(id_),
        ExecCache=lambda device, max_execs, budget: None,
    )
    handles = iter([(0, 7), (0, 8)])
    torch: Any = SimpleNamespace(cuda=SimpleNamespace(graph_pool_handle=lambda: next(handles)))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(pools, "_require_enabled", lambda what: fake)
    monkeypatch.setattr(pools, "_cuda_device", lambda device: SimpleNamespace(index=3))
    first, second = cgp.GraphPool(), cgp.GraphPool()
    assert pools._owner(3, (0, 7)) is first
    first.close()
    first.close()
    assert pools._owner(3, (0, 7)) is None
    del first, second
    assert not registered
