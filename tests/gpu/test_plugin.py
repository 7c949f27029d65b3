"""The pytest plugin with real captures: each suite runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .parity.programs import python_path

SUITE = """
import pytest
import torch
import cudagraph_pool as cgp

def capture(pool=None):
    graph = torch.cuda.CUDAGraph()
    x = torch.ones(1 << 20, device="cuda")
    with torch.cuda.graph(graph, pool=pool):
        y = x * 2
    x.fill_(3)
    graph.replay()
    assert y.sum().item() == 6 << 20

@pytest.mark.parametrize("size", range(4))
def test_capture(size):
    capture()

def test_capture_in_a_mem_pool():
    pool = torch.cuda.MemPool()
    capture(pool.id)

def test_capture_of_the_bases():
    enabled = cgp.is_enabled()
    cgp.disable()
    pool = torch.cuda.MemPool()
    if enabled:
        cgp.enable()
    capture(pool.id)
"""


def pytest_run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_suite.py").write_text(SUITE)
    return subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-p", "cudagraph_pool.testing", *arguments],
        cwd=folder,
        env=dict(os.environ, PYTHONPATH=python_path()),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_captures_go_through_the_pool(tmp_path: Path) -> None:
    done = pytest_run(tmp_path, "--cudagraph-pool")
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    assert "CUDA graph captures: 5 in pools of cudagraph_pool, 1 in PyTorch's own" in done.stdout


def test_fails_where_every_capture_was_the_bases(tmp_path: Path) -> None:
    done = pytest_run(tmp_path, "--cudagraph-pool", "-k", "of_the_bases")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "CUDA graph captures: 0 in pools of cudagraph_pool, 1 in PyTorch's own" in done.stdout
    assert "FAILED: graphs were captured, but none in a pool" in done.stdout


def test_without_the_option(tmp_path: Path) -> None:
    done = pytest_run(tmp_path)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    assert "cudagraph_pool" not in done.stdout.replace("cudagraph_pool.testing", "")
