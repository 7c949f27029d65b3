"""Captures of several threads and on several devices."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ..work import adapter, chain, fresh, in_threads, torch
from .conftest import Side
from .memory import inside

TWO_DEVICES = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
MODES = pytest.mark.parametrize("mode", ["thread_local", "relaxed"])

# capture_begin() and capture_end() of several graphs change state of torch's that they share (the
# random number generator's), which is not what is tested here.
_ONE_AT_A_TIME = threading.Lock()


class Capturing(threading.Thread):
    """Captures `chain` on a stream of its own, at the same time as others do.

    torch.cuda.graph synchronizes the device, which no other thread's capture would survive.
    """

    def __init__(
        self,
        seed: int,
        mode: str,
        together: threading.Barrier,
        device: int = 0,
        middle: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._mode = mode
        self._together = together
        self._middle = middle
        self.device = device
        self.graph = torch.cuda.CUDAGraph()
        rows = 300 + 50 * seed
        with torch.cuda.device(device):
            self.x = fresh(rows, seed=seed)
            self.y = torch.zeros_like(self.x)
            self._stream = torch.cuda.Stream()
            chain(self.x)
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                self._capture()
        except BaseException as error:
            self.error = error
            self._together.abort()

    def _capture(self) -> None:
        self._together.wait(60)
        with _ONE_AT_A_TIME:
            self.graph.capture_begin(capture_error_mode=self._mode)
        self._together.wait(60)  # all of them are under way
        for _ in range(20):
            self.y.copy_(chain(self.x))
        self._middle()
        self._together.wait(60)  # none has ended
        with _ONE_AT_A_TIME:
            self.graph.capture_end()

    def check(self) -> None:
        with torch.cuda.device(self.device):
            self.x.copy_(fresh(self.x.shape[0], seed=77))
            self.y.fill_(float("nan"))
            self.graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(self.y, chain(self.x))

    def is_ours(self) -> bool:
        return tuple(self.graph.pool()) in adapter.pool_ids(self.device)


def run_together(threads: list[Capturing]) -> None:
    for device in {thread.device for thread in threads}:
        torch.cuda.synchronize(device)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for thread in threads:
        if thread.error is not None and not isinstance(thread.error, threading.BrokenBarrierError):
            raise thread.error
    assert not any(thread.error for thread in threads)


@MODES
def test_captures_in_several_threads(side: Side, mode: str) -> None:
    count = 6
    together = threading.Barrier(count)
    threads = [Capturing(seed, mode, together) for seed in range(count)]
    run_together(threads)
    assert {thread.is_ours() for thread in threads} == {side == "ours"}
    # Their pools differ, and so do their pages: any order of replays is right, twice.
    for thread in [*threads, *reversed(threads)]:
        thread.check()


@MODES
def test_eager_work_beside_a_capture(side: Side, mode: str) -> None:
    """What other threads allocate meanwhile is no replay's to overwrite."""
    kept: list[torch.Tensor] = []

    def eager() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(200):
                kept.append(torch.full((200, 256), float(step), device="cuda") * 2)
            torch.cuda.current_stream().synchronize()

    capturing = Capturing(0, mode, threading.Barrier(1), middle=lambda: in_threads(eager))
    run_together([capturing])
    assert capturing.is_ours() == (side == "ours")
    for _ in range(3):
        capturing.check()
    for step, tensor in enumerate(kept):
        assert (tensor == 2 * step).all().item()
        assert not inside(tensor, capturing.graph.pool())


@pytest.mark.parametrize("empties", [False, True])
def test_eager_memory_that_a_side_stream_uses_is_freed_in_a_capture(
    side: Side, empties: bool
) -> None:
    """Nobody may ask CUDA for an event meanwhile, nor ever for one of a stream that captured."""
    other = torch.cuda.Stream()
    eager = torch.ones(1 << 20, device="cuda")
    x = fresh(300, seed=0)
    chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other.wait_stream(torch.cuda.current_stream())
        eager.record_stream(other)
        del eager
        if empties:
            torch.cuda.empty_cache()
        y = chain(x)
        torch.cuda.current_stream().wait_stream(other)
    x.copy_(fresh(300, seed=1))
    graph.replay()
    assert torch.equal(y, chain(x))


@TWO_DEVICES
@MODES
def test_captures_on_two_devices_at_once(side: Side, mode: str) -> None:
    together = threading.Barrier(4)
    threads = [Capturing(seed, mode, together, device=seed % 2) for seed in range(4)]
    run_together(threads)
    assert {thread.is_ours() for thread in threads} == {side == "ours"}
    for thread in [*threads, *reversed(threads)]:
        thread.check()
    if side == "ours":
        # Each device has the pools of its own captures, and the other's statistics do not show it.
        for device in (0, 1):
            assert len(adapter.pool_ids(device)) == 2
