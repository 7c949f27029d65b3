"""vLLM's estimate of what graphs take, on a runner and a torch that are made up after theirs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cudagraph_pool._forecast import exec_bytes
from cudagraph_pool.integration import vllm

LOGGER = "vllm.cudagraph_pool"
MIB = 1 << 20
MEASURED, SAMPLES, TOTAL = 200 * MIB, [40 * MIB, 2 * MIB], 35
NODES = [7] * 800 + [200, 200]
THEIRS = MEASURED - 2 * MIB + 34 * 2 * MIB


def module(name: str) -> Any:
    return ModuleType(name)


class Engine:
    """vLLM 0.33's V2 runner, as far as it is asked: it captures, measures, and adds up."""

    def __init__(self) -> None:
        self.hooks: list[Callable[[int], None]] = []
        self.utils, self.runner, self.graphs = map(
            module, (vllm._UTILS, vllm._RUNNER, "torch.cuda.graphs")
        )
        self.utils._extrapolate_full_graph_memory = self.extrapolate
        self.graphs.register_graph_capture_end_hook = self.register
        engine = self

        class GPUModelRunner:
            def profile_cudagraph_memory(self) -> int:
                for nodes in NODES:
                    for hook in engine.hooks:
                        hook(nodes)
                full = engine.utils._extrapolate_full_graph_memory(SAMPLES, TOTAL)
                return int(MEASURED - sum(SAMPLES) + full)

        self.runner.GPUModelRunner = GPUModelRunner

    @staticmethod
    def extrapolate(samples: list[int], total: int) -> int:
        return samples[0] + (total - 1) * max(samples[1], MIB) if samples else 0

    def register(self, hook: Callable[[int], None]) -> Any:
        self.hooks.append(hook)
        return SimpleNamespace(remove=lambda: self.hooks.remove(hook))

    def estimate(self) -> int:
        return int(self.runner.GPUModelRunner().profile_cudagraph_memory())


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    for fake in (made.utils, made.runner, made.graphs):
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    parents = [vllm._UTILS.split(".")[:length] for length in range(1, 5)]
    for parent in (["torch"], ["torch", "cuda"], *parents):
        name = ".".join(parent)
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(vllm, "is_enabled", lambda: True)
    monkeypatch.setattr(vllm, "count_nodes", lambda nodes: nodes)
    vllm.serve_estimate.cache_clear()
    return made


def share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "all_share", lambda: True)


def test_other_full_graphs_take_their_executables(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert engine.estimate() == THEIRS
    vllm.serve_estimate(LOGGER)
    assert caplog.messages == []
    assert engine.estimate() == MEASURED + int(33 * exec_bytes(200) * 1.25) + 2 * MIB
    assert caplog.messages == ["sets aside for 35 full graphs -39 MiB beside vLLM's own"]
    assert engine.hooks == []
    assert engine.utils._extrapolate_full_graph_memory is engine.extrapolate


def test_replays_make_the_executables_that_are_shared(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    share(monkeypatch)
    vllm.serve_estimate(LOGGER)
    all_of_them = 800 * exec_bytes(7) + 35 * exec_bytes(200)
    assert engine.estimate() == MEASURED + int(all_of_them * 1.25) + 2 * MIB
    monkeypatch.setattr(sys.modules[__name__], "NODES", [7] * 4_000 + [200, 200])
    most = 4 * exec_bytes(200) + 256 * MIB
    assert engine.estimate() == MEASURED + int(most * 1.25) + 2 * MIB


@pytest.mark.parametrize("nodes", [[], [200, 200]])
def test_where_the_pool_is_off_or_nothing_was_counted_nothing_changes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, nodes: list[int]
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "NODES", nodes)
    monkeypatch.setattr(vllm, "is_enabled", lambda: not nodes)
    vllm.serve_estimate(LOGGER)
    assert engine.estimate() == THEIRS


def test_a_profile_that_fails_leaves_nothing(engine: Engine) -> None:
    def fails(samples: list[int], total: int) -> int:
        raise RuntimeError("out of memory")

    engine.utils._extrapolate_full_graph_memory = fails
    vllm.serve_estimate(LOGGER)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.estimate()
    assert engine.hooks == []
    assert engine.utils._extrapolate_full_graph_memory is fails


@pytest.mark.parametrize("lacks", ["extrapolation", "method", "hook", "module"])
def test_what_is_not_known_is_left(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    caplog.set_level(logging.INFO)
    before = engine.runner.GPUModelRunner.profile_cudagraph_memory
    if lacks == "extrapolation":
        del engine.utils._extrapolate_full_graph_memory
    elif lacks == "method":
        del engine.runner.GPUModelRunner.profile_cudagraph_memory
    elif lacks == "hook":
        del engine.graphs.register_graph_capture_end_hook
    else:
        monkeypatch.setitem(sys.modules, vllm._RUNNER, None)
    vllm.serve_estimate(LOGGER)
    assert caplog.messages == []
    if lacks != "method":
        assert engine.runner.GPUModelRunner.profile_cudagraph_memory is before
