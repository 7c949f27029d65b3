"""enable(shared_exec=True): which captures of others share, with an adapter that is made up."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from test_shared_exec import Adapter, Graph

from cudagraph_pool import _shared_exec


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Any]]:
    """Stands for torch.cuda.CUDAGraph, whose captures share."""

    class Captured(Graph):
        adapter: Any
        refuses: str = ""

        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            self.log.append(f"begin {args} {kwargs}")
            if self.refuses == "begin":
                raise RuntimeError("cannot begin")

        def capture_end(self) -> None:
            self.log.append("end")
            if self.refuses == "end":
                raise RuntimeError("cannot end")

    adapter: Any = Adapter()
    adapter.ExecCache = lambda device, *limits: ("cache", device, *limits)
    monkeypatch.setattr(_shared_exec, "load_adapter", lambda: adapter)
    monkeypatch.setattr(_shared_exec, "caches", {})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Captured)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    Captured.adapter = adapter
    yield Captured
    _shared_exec.let_all_share(False)


def capture(graph: Any) -> Any:
    graph.capture_begin((0, 1), capture_error_mode="relaxed")
    graph.capture_end()
    return graph


BEGIN = "begin ((0, 1),) {'capture_error_mode': 'relaxed'}"


def test_captures_share_while_they_are_to(captured: type[Any]) -> None:
    assert capture(captured()).log == [BEGIN, "end"]
    _shared_exec.let_all_share(True)
    graph = capture(captured())
    graph.replay()
    assert graph.log == [BEGIN, "end", "share on 3", "lend", "replay", "back"]
    _shared_exec.let_all_share(False)
    assert capture(captured()).log == [BEGIN, "end"]
    graph.replay()  # one that shares goes on
    assert graph.log[-3:] == ["lend", "replay", "back"]
    _shared_exec.let_all_share(True)
    again = capture(captured())
    assert again.log.count("share on 3") == 1, "replaced once"


def test_one_cache_for_each_device(captured: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _shared_exec.let_all_share(True)
    graphs = []  # all of them alive: the adapter knows them by their addresses
    for device in (3, 3, 0):
        monkeypatch.setattr(torch.cuda, "current_device", functools.partial(int, device))
        graphs.append(capture(captured()))
    made: dict[int, Any] = {device: ("cache", device, 4, 256 << 20) for device in (3, 0)}
    assert made == _shared_exec.caches


@pytest.mark.parametrize("refuses", ["begin", "end"])
def test_a_capture_that_fails_leaves_the_graph_as_it_was(captured: type[Any], refuses: str) -> None:
    _shared_exec.let_all_share(True)
    graph = captured()
    graph.refuses = refuses
    with pytest.raises(RuntimeError, match=f"cannot {refuses}"):
        capture(graph)
    assert not captured.adapter.keeps[id(graph)]
    assert set(vars(graph)) == {"log", "refuses"}
    graph.refuses = ""
    capture(graph).replay()
    assert graph.log[-3:] == ["lend", "replay", "back"]
