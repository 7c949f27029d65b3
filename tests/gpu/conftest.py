"""Tests that need a GPU, torch and the adapter; without one of them each is skipped and says so."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def missing() -> str | None:
    """What these tests need and this machine lacks."""
    try:
        import torch
    except ImportError:
        return "needs torch"
    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    try:
        from cudagraph_pool._adapter import load_adapter

        load_adapter()
    except ImportError as error:
        return f"needs the adapter: {error}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    # What torch says of its own backward passes, once in a process.
    torch_talks = [
        pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no"),
        pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
    ]
    for item in items:
        if "gpu" not in item.path.parts:
            continue
        for mark in torch_talks:
            item.add_marker(mark)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def warm() -> None:
    """What torch and CUDA load and keep at the first capture is loaded: tests count memory."""
    import torch

    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(256, 256, device="cuda")
    with torch.cuda.graph(graph):
        (x + 1).cumsum(0)
    graph.replay()
    torch.cuda.synchronize()


@contextlib.contextmanager
def nothing_left(request: pytest.FixtureRequest, enable: bool) -> Iterator[None]:
    """Enables the package if asked to; afterwards no graph pool is left, whatever the test did."""
    import torch

    import cudagraph_pool as cgp
    from cudagraph_pool import _torch

    before = torch.cuda.current_stream()
    if enable:
        cgp.enable()
    yield
    torch.cuda.set_stream(before)
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # those of the capture stream lie in its pool
    gc.collect()
    torch.cuda.empty_cache()
    left = [_torch.pool_ids(device) for device in range(torch.cuda.device_count())]
    cgp.disable()
    # The traceback of a failed test keeps its graphs alive: no fault of this one.
    if not request.session.testsfailed:
        assert not any(left), f"pools left by the test: {left}"


@pytest.fixture
def enabled(warm: None, request: pytest.FixtureRequest) -> Iterator[None]:
    with nothing_left(request, enable=True):
        yield


@pytest.fixture
def run() -> Run:
    """Runs a program in a process of its own, which must end well and say nothing on stderr."""

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-P", "-c", program, *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        # Since 2.14 torch logs each allocation that the device refused.
        refused = "memory allocation failed with OOM on device"
        assert [line for line in done.stderr.splitlines() if refused not in line] == []
        return done

    return run
