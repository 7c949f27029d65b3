"""``CUDAGRAPH_POOL`` and ``cudagraph-pool run`` with real captures, in processes of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from entry_points import environment

Start = Callable[..., str]

# Knows nothing of the package until it asks what has happened.
PROGRAM = r"""
import multiprocessing, sys, torch

def capture():
    x = torch.ones(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x * 2) + 1
    x.fill_(3)
    graph.replay()
    assert y.sum().item() == 7 << 20
    return graph, y

def whose():
    from cudagraph_pool import _torch
    counts = _torch.capture_counts().values()
    # One write: print writes words and line ends apart under torchrun, whose workers share a pipe.
    sys.stdout.write("{} {}\n".format(*counts))
    sys.stdout.flush()

def work():
    kept = capture()
    whose()
    return kept

if __name__ == "__main__":
    methods = sys.argv[1:]
    for method in methods:
        child = multiprocessing.get_context(method).Process(target=work)
        child.start()
        child.join()
        assert child.exitcode == 0
    kept = work()
"""


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Runs Python where the package is installed; returns what it says on stdout and stderr."""

    def start(*arguments: str, **variables: str) -> str:
        (tmp_path / "program.py").write_text(PROGRAM)
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment(tmp_path, **variables),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return start


def test_torchrun(start: Start) -> None:
    pytest.importorskip("torch.distributed.run")
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "program.py"]
    assert start(*arguments, CUDAGRAPH_POOL="1").count("1 0\n") == 2


def test_no_context_is_made(start: Start) -> None:
    """Of several GPUs a process uses the one that it chooses, and has no memory on the others."""
    program = (
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "torch.cuda.init()\n"
        "import cudagraph_pool\n"
        "print(cudagraph_pool.is_enabled(), torch._C._cuda_hasPrimaryContext(0))\n"
    )
    assert start("-c", program, CUDAGRAPH_POOL="1") == "True False\n"


def test_run_reports(start: Start) -> None:
    """A forked child comes first: only as long as the parent has not used CUDA can it use it."""
    said = start("-m", "cudagraph_pool", "run", "--report", "program.py", "fork", "spawn")
    assert said.count("1 0\n") == 3
    reports = re.findall(
        r"^cudagraph_pool, process \d+: 1 CUDA graph captures, 1 of them in pools of cudagraph_pool"
        r"\ncudagraph_pool, process \d+: GPU 0: reserved (\d+) MiB at most; graph pools took "
        r"(\d+) MiB, of which (\d+) were in use at once$",
        said,
        re.MULTILINE,
    )
    assert len(reports) == 3, said
    # The graph of the main process lives to its end: 4 MiB of result and 4 of a temporary.
    reserved, held, needed = map(int, reports[-1])
    assert reserved >= held >= needed >= 8
