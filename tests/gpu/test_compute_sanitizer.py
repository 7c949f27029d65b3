"""NVIDIA's compute-sanitizer finds nothing in what captures of all kinds do.

No error of a CUDA call, no access outside of what is allocated, no race in a kernel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

# Results are compared as well: a tool that slows everything down finds other orders of events.
PROGRAM = """
import random

import torch

import cudagraph_pool as cgp

cgp.enable()
weight = torch.randn(512, 512, device="cuda")
side_streams = [torch.cuda.Stream() for _ in range(3)]


def layers(x):
    for _ in range(3):
        x = torch.relu(x @ weight) * 0.5 + x
    return x


def branches(x):
    main = torch.cuda.current_stream()
    results = []
    for i in range(12):
        side = side_streams[i % 3]
        given = x * (i + 1)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            result = given.sin() + 1
            given.record_stream(side)
        del given
        beside = x + i
        main.wait_stream(side)
        result.record_stream(main)
        results.append(result + beside)
        del result, beside
    return sum(results)


def capture(work, shape, pool):
    x = torch.randn(shape, device="cuda")
    work(x)  # what is loaded at first use
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with cgp.graph(graph, pool=pool):
        y = work(x)
    return graph, x, y


def check(work, graph, x, y):
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, work(x))


one_stream = cgp.GraphPool()
graphs = [capture(layers, (rows, 512), one_stream) for rows in (64, 256, 1024, 4096, 2048, 8192)]
for captured in reversed(graphs):
    check(layers, *captured)

several_streams = cgp.GraphPool()
for n in (1 << 12, 1 << 20, 1 << 16):
    check(branches, *capture(branches, (n,), several_streams))

shared = cgp.GraphPool(shared_exec=True, max_execs=2)
graphs = [capture(layers, (rows, 512), shared) for rows in (16, 64, 48, 32, 128)]
for captured in random.Random(0).choices(graphs, k=20):
    check(layers, *captured)
assert shared.stats()["exec_updates"] > 0

print("all equal")
"""


def compute_sanitizer() -> str | None:
    folders = [os.environ[name] for name in ("CUDA_HOME",) if name in os.environ]
    places = (f"{folder}/bin/compute-sanitizer" for folder in (*folders, "/usr/local/cuda"))
    found = (shutil.which(place) for place in ("compute-sanitizer", *places))
    return next((place for place in found if place), None)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_is_reported(tool: str) -> None:
    sanitizer = compute_sanitizer()
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer, which comes with the CUDA toolkit")
    watched = [sanitizer, "--tool", tool, "--error-exitcode", "7"]
    command = [*watched, sys.executable, "-P", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all equal" in done.stdout
