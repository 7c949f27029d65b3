"""What pools will hold, by forecast(), and recordings of what they would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from entry_points import environment

import cudagraph_pool as cgp
from cudagraph_pool import _forecast
from cudagraph_pool.tools.trace import PAGE_BYTES, minimum_bytes, read_trace

from .work import chain, fresh, torch

pytestmark = pytest.mark.usefixtures("enabled")


@pytest.mark.parametrize("shared_exec", [False, True])
def test_forecast(shared_exec: bool) -> None:
    pool = cgp.GraphPool(shared_exec=shared_exec)
    sizes = [8192, *range(512, 8192, 512)]
    graphs, outputs = {}, {}
    for rows in sizes:
        x = fresh(rows, seed=rows)
        graphs[rows] = torch.cuda.CUDAGraph(keep_graph=not shared_exec)
        with cgp.graph(graphs[rows], pool):
            outputs[rows] = chain(x)
        if rows == sizes[0]:
            predicted = cgp.forecast(pool, sizes, graphs[rows])
    held = pool.stats()["reserved_bytes"]
    assert predicted.pool_bytes == pytest.approx(held, rel=0.02, abs=2 * PAGE_BYTES)
    nodes = _forecast.count_nodes(graphs[8192])
    count = 4 if shared_exec else len(sizes)
    assert predicted.exec_bytes == count * _forecast.exec_bytes(nodes)


RECORDED = """
import sys, torch
sizes = list(map(int, sys.argv[1:]))
pool = torch.cuda.graph_pool_handle()
graphs = []
for rows in sizes:
    x = torch.ones(rows, 256, device="cuda")
    graphs.append(torch.cuda.CUDAGraph())
    with torch.cuda.graph(graphs[-1], pool=pool):
        y = (x * 2).softmax(1) + x.sum()
print(sum(s["total_size"] for s in torch.cuda.memory_snapshot(pool)))
"""


def test_record(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(RECORDED)
    sizes = [512, 4096, 64, *range(100, 2000, 100)]
    command = ["-m", "cudagraph_pool", "record", "-o", "traces", "program.py", *map(str, sizes)]
    done = subprocess.run(
        [sys.executable, "-P", *command],
        env=environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(rf"{len(sizes)} graphs of one pool: ", done.stderr), done.stderr
    (path,) = (tmp_path / "traces").iterdir()
    trace = read_trace(path)
    assert len(trace.graphs) == len(sizes)
    assert trace.stock_reserved_bytes == int(done.stdout)
    assert 4096 * 1024 <= minimum_bytes(trace.graphs) <= trace.stock_reserved_bytes
    assert max(trace.graphs, key=lambda graph: graph.key) is trace.graphs[1]
