"""What guard() finds, on graphs that the CPU records and replays, and on made-up replays."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
from cpu_captures import CpuRunner, Made, tree_equal, weight

import cudagraph_pool as cgp
from cudagraph_pool import _guard
from cudagraph_pool._guard import _Replays
from cudagraph_pool._guard.happens_before import HappensBefore
from cudagraph_pool._leases import preceded


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def runner(**options: object) -> CpuRunner:
    return CpuRunner(double, sizes=[2, 4], progress=False, **options)  # type: ignore[arg-type]


STALE = (
    r"aten\.\S+ uses what call 2 of its pool returned, of size 3 in the graph of 4, but call \d, "
)


def test_outputs_that_are_used_too_late() -> None:
    run = runner()
    x = torch.randn(3, 5)
    with cgp.guard():
        first = run(x)
        part = first[1:]
        assert tree_equal(part, x[1:] * 2)
        second = run(x[:1])
        with pytest.raises(RuntimeError, match=STALE + "of size 1 in the graph of 2, has over"):
            first + 1
        with pytest.raises(RuntimeError, match=STALE):
            part.sum()
        with pytest.raises(RuntimeError, match=STALE):
            run(first)
        assert run(x[:2]).shape == (2, 5)
        with pytest.raises(RuntimeError, match="uses what call 3"):
            torch.stack([second, second])
    assert (first + 1).shape == (3, 5), "nothing is looked at any more"


def test_what_is_no_mistake() -> None:
    run, copies = runner(), runner(clone_outputs=True)
    net = Made(lambda self, x: x * self.w, w=weight(5))
    training = CpuRunner(net, sizes=[2, 4], progress=False)
    with cgp.guard():
        y = torch.randn(3, 5)
        kept = copies(y)
        for _ in range(3):
            y = run(y)  # holds the last one while the next is made
            copies(y)
        assert kept.shape == (3, 5)
        for n in (1, 3, 2):
            net.w.grad = None
            x = torch.randn(n, 5)
            training(x).square().sum().backward()
            torch.testing.assert_close(net.w.grad, (2 * x * x * net.w).sum(0).detach())
    x = torch.randn(2, 5)
    held = run(x)
    run(x)
    with cgp.guard():
        held.sum()  # from before


def test_replays_that_nothing_orders() -> None:
    pool, other = (0, 1), (0, 2)
    replays = _Replays()
    replays.replay(pool, "graph a", 0x10, {})
    replays.replay(pool, "graph b", 0x10, {})
    replays.replay(other, "graph c", 0x20, {})
    with pytest.raises(RuntimeError, match=r"graph d is replayed on stream 0x20, and graph b, .*"):
        replays.replay(pool, "graph d", 0x20, {})
    replays.order.record(1, 0x10)
    replays.order.wait(1, 0x20)
    replays.replay(pool, "graph d", 0x20, {})
    with pytest.raises(RuntimeError, match=r"graph a is replayed on stream 0x10, and graph d"):
        replays.replay(pool, "graph a", 0x10, {})
    replays.order.synchronize_stream(0x20)
    replays.replay(pool, "graph a", 0x10, {})


def test_replays_that_share_a_workspace_of_cublas() -> None:
    both = {0x7000: 0x30, 0x8000: 0x40}
    replays = _Replays()
    replays.replay((0, 1), "graph a", 0x10, {0x7000: 0x30})
    replays.replay((0, 2), "graph b", 0x20, {})
    replays.replay((0, 3), "graph c", 0x20, {0x9000: 0x30})
    shared = (
        r"graph d is replayed on stream 0x20, and graph a, which shares cuBLAS's workspace of "
        r"stream 0x30, at 0x7000, was replayed on stream 0x10: .* with own_workspace=True"
    )
    with pytest.raises(RuntimeError, match=shared):
        replays.replay((0, 4), "graph d", 0x20, both)
    replays.replay((0, 5), "graph e", 0x10, {0x8000: 0x40})
    replays.order.record(1, 0x10)
    replays.order.wait(1, 0x20)
    replays.replay((0, 4), "graph d", 0x20, both)
    with pytest.raises(RuntimeError, match=r"graph e is .*, and graph d, .* 0x40, at 0x8000"):
        replays.replay((0, 5), "graph e", 0x10, {0x8000: 0x40})


def test_what_a_graph_computes_in_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is captured, if a guard listens then, or from what it keeps."""

    class Graph:
        templates = iter([0x1, 0x2])

        def capture_end(self) -> None: ...

        def raw_cuda_graph(self) -> int:
            try:
                return next(self.templates)
            except StopIteration:
                raise RuntimeError("initialized with keep_graph=true") from None

    graph = Graph()
    monkeypatch.setattr(_guard, "used_by", lambda template: {template: 0x30})
    monkeypatch.setattr(_guard, "used_by_capture", lambda stream: {0x9: stream})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0x10))
    capture_end = preceded(Graph.capture_end, by=_guard._end_capture)
    assert [_guard._workspaces(graph) for _ in range(2)] == [{0x1: 0x30}] * 2
    capture_end(graph)  # outside of guards: it may be another graph now
    assert [_guard._workspaces(graph) for _ in range(2)] == [{0x2: 0x30}] * 2
    capture_end(graph)
    assert _guard._workspaces(graph) == {}
    monkeypatch.setattr(_guard._state, "guards", 1)
    capture_end(graph)
    assert _guard._workspaces(graph) == {0x9: 0x10}


def test_events_that_are_collected_within_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = _Replays()
    launch = HappensBefore.launch

    def launch_collecting(order: HappensBefore, stream: int) -> int:
        _guard._tell(HappensBefore.forget, 7)
        return launch(order, stream)

    monkeypatch.setattr(_guard._state, "guards", 1)
    monkeypatch.setattr(_guard._state, "replays", replays)
    monkeypatch.setattr(HappensBefore, "launch", launch_collecting)
    thread = threading.Thread(
        target=replays.replay, args=((0, 1), "graph a", 0x10, {}), daemon=True
    )
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_guards_that_overlap_without_nesting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of two threads, of generators or of an ExitStack."""
    launched: list[int] = []
    stream = SimpleNamespace(cuda_stream=0x10)

    def native(graph: SimpleNamespace) -> None:
        launched.append(stream.cuda_stream)

    def replay(on: int) -> None:
        stream.cuda_stream = on
        torch.cuda.CUDAGraph.replay(SimpleNamespace(pool=lambda: (0, 1), _workspaces={}))

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", native)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(_guard, "_trace", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    guards = [cgp.guard() for _ in range(2)]
    for guard in guards:
        guard.__enter__()
    replay(0x10)
    guards.pop().__exit__(None, None, None)

    with pytest.raises(RuntimeError, match="nothing orders the two"):
        replay(0x20)
    _guard._tell(HappensBefore.synchronize_device)
    replay(0x20)
    guards.pop().__exit__(None, None, None)

    assert torch.cuda.CUDAGraph.replay is native
    replay(0x10)  # nothing is looked at any more
    assert launched == [0x10, 0x20, 0x10]
