"""Captures of several threads, on several devices, beside autograd's and data loaders' threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest

import cudagraph_pool as cgp

from ..work import Captured, adapter, capture_chain, chain, fresh, torch
from .conftest import Side
from .memory import mapped_pages

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
        middle: Callable[[torch.Tensor], None] | None = None,
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
        if self._middle is not None:
            self._middle(self.x)
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
    together = threading.Barrier(2)
    capturing = Capturing(0, mode, together)
    kept: list[tuple[torch.Tensor, float]] = []
    errors: list[BaseException] = []

    def eager() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                together.wait(60)
                together.wait(60)
                for step in range(200):
                    tensor = torch.full((200, 256), float(step), device="cuda")
                    kept.append((tensor * 2, 2.0 * step))
                torch.cuda.current_stream().synchronize()
                together.wait(60)
        except BaseException as error:
            errors.append(error)
            together.abort()

    thread = threading.Thread(target=eager)
    thread.start()
    run_together([capturing])
    thread.join()
    assert not errors, errors
    assert capturing.is_ours() == (side == "ours")
    for _ in range(3):
        capturing.check()
    for tensor, value in kept:
        assert (tensor == value).all().item()
    if side == "ours":
        snapshot = adapter.snapshot(0, tuple(capturing.graph.pool()))
        assert snapshot["ranges"]
        for mapped in snapshot["ranges"]:
            end = mapped["address"] + len(mapped["pages"]) * snapshot["stats"]["page_bytes"]
            assert not any(mapped["address"] <= tensor.data_ptr() < end for tensor, _ in kept)


@MODES
def test_captured_tensors_freed_by_another_thread(side: Side, mode: str) -> None:
    """A free comes from any thread; what it frees may be taken again by the capture at once."""
    together = threading.Barrier(1)

    def hand_over(x: torch.Tensor) -> None:
        for _ in range(20):
            tensors = [x * 2, torch.cat([x, x])]
            thread = threading.Thread(target=tensors.clear)
            thread.start()
            thread.join()

    capturing = Capturing(3, mode, together, middle=hand_over)
    run_together([capturing])
    assert capturing.is_ours() == (side == "ours")
    capturing.check()
    if side == "ours":
        # Twenty times the same memory: a chain needs less than 12, rounded up to pages; without
        # taking it again the tensors handed over need 60.
        stats = adapter.stats(0, tuple(capturing.graph.pool()))
        assert stats["live_blocks"] == 0
        assert stats["reserved_bytes"] <= 24 * capturing.x.nbytes


# ---- autograd's threads -------------------------------------------------------------------------


def small_model(device: str = "cuda") -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64), torch.nn.LayerNorm(64)
    ).to(device)


def test_backward_in_autograds_threads(side: Side) -> None:
    """The device's thread of autograd runs the backward pass and allocates for the capture."""
    model, twin = small_model(), small_model()
    x = torch.zeros(32, 64, device="cuda")
    target = torch.zeros(32, 64, device="cuda")
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            torch.nn.functional.mse_loss(model(x), target).backward()
    torch.cuda.current_stream().wait_stream(other)

    threads: set[int] = set()
    hook = model[0].weight.register_hook(lambda _: threads.add(threading.get_ident()))
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.nn.functional.mse_loss(model(x), target).backward()
    hook.remove()
    assert threads
    assert threading.get_ident() not in threads

    gradients = [parameter.grad for parameter in model.parameters()]
    if side == "ours":
        blocks = adapter.snapshot(0, tuple(graph.pool()))["blocks"]
        addresses = {block["address"] for block in blocks}
        assert {gradient.data_ptr() for gradient in gradients} <= addresses
    for step in range(5):
        x.copy_(torch.randn(32, 64, generator=torch.Generator().manual_seed(step)))
        target.copy_(torch.randn(32, 64, generator=torch.Generator().manual_seed(100 + step)))
        graph.replay()
        twin.zero_grad(set_to_none=True)
        torch.nn.functional.mse_loss(twin(x), target).backward()
        for gradient, parameter in zip(gradients, twin.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


# ---- data loaders -------------------------------------------------------------------------------


class Numbers:
    """The i-th is a row of i."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((256,), float(index))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader_with_pinned_memory(side: Side, workers: int) -> None:
    """A pinned batch is copied into the graph's input; one capture begins while it loads.

    Its pin-memory thread allocates pinned memory and asks for events at any time, so the capture
    is one of this thread alone, as native needs it too.
    """
    x = torch.zeros(8, 256, device="cuda")
    chain(x)
    torch.cuda.synchronize()
    loader = torch.utils.data.DataLoader(
        Numbers(), batch_size=8, pin_memory=True, num_workers=workers
    )
    graph: torch.cuda.CUDAGraph | None = None
    seen = 0
    for batch in loader:
        assert batch.is_pinned()
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                y = chain(x)
            assert (tuple(graph.pool()) in adapter.pool_ids(0)) == (side == "ours")
        x.copy_(batch, non_blocking=True)
        graph.replay()
        assert torch.equal(y, chain(batch.cuda()))
        assert x[0, 0].item() == 8 * seen
        seen += 1
    assert seen == 8


# ---- two devices --------------------------------------------------------------------------------


_inputs: list[torch.Tensor] = []  # of graphs that are replayed again


def stitched(device: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, list[torch.Tensor]]:
    """A graph whose output of 16 MiB fills the holes between others of 4 MiB, that live on."""
    with torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        source = torch.zeros(1 << 20, device="cuda")
        _inputs.append(source)
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
            small = [source + i for i in range(8)]
            del small[1::2]
            large = source.repeat(4).view(4, -1)
            large += torch.arange(4, device="cuda").view(4, 1)
        graph.replay()
        torch.cuda.synchronize()
    return graph, large, small


def assert_stitched(graph: torch.cuda.CUDAGraph, large: torch.Tensor) -> None:
    pages = mapped_pages(graph.pool(), large.device.index)
    assert len(pages) > len(set(pages)), "no page is mapped twice: nothing was stitched"
    blocks = adapter.snapshot(large.device.index, tuple(graph.pool()))["blocks"]
    block = next(b for b in blocks if b["address"] == large.data_ptr())
    assert len(block["pieces"]) > 1


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


def expected() -> torch.Tensor:
    return torch.arange(4.0).view(4, 1).expand(4, 1 << 20)


@TWO_DEVICES
def test_copies_between_devices_from_stitched_memory(side: Side) -> None:
    """Plain copies, and kernels that read and write the peer's memory; mapped before and after."""
    for source, target in ((0, 1), (1, 0)):
        # The second graph's pages are mapped after the devices have become peers.
        for _ in range(2):
            graph, large, small = stitched(source)
            if side == "ours":
                assert_stitched(graph, large)
            copied = large.to(f"cuda:{target}")
            assert torch.equal(copied.cpu(), expected())
            # Not contiguous: where devices are peers, a kernel of one reads from the other.
            columns = large[:, ::3].to(f"cuda:{target}")
            assert torch.equal(columns.cpu(), expected()[:, ::3])

            there = torch.full((4, 1 << 20), -1.0, device=f"cuda:{target}")
            there[:, ::2].copy_(large[:, ::2])
            assert torch.equal(there[:, ::2].cpu(), expected()[:, ::2])
            assert (there[:, 1::2] == -1).all().item()
            large.copy_(there)
            assert torch.equal(large.cpu(), there.cpu())
            large[:, ::2].copy_(copied[:, ::2])
            assert torch.equal(large[:, ::2].cpu(), expected()[:, ::2])
            for i, tensor in enumerate(small):
                assert (tensor == 2 * i).all().item()
            graph.replay()
            torch.cuda.synchronize(source)
            assert torch.equal(large.cpu(), expected())
            del graph, large, small


@TWO_DEVICES
def test_copies_between_stitched_memory_of_both(side: Side) -> None:
    first, second = stitched(0), stitched(1)
    first[1].mul_(3)
    second[1].copy_(first[1])
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    assert torch.equal(second[1].cpu(), expected() * 3)
    second[1][:, ::2].copy_(first[1][:, 1::2])
    assert torch.equal(second[1].cpu(), expected() * 3)
    for device, (graph, large, _) in enumerate((first, second)):
        assert (tuple(graph.pool()) in adapter.pool_ids(device)) == (side == "ours")
        with torch.cuda.device(device):
            graph.replay()
            torch.cuda.synchronize()
        assert torch.equal(large.cpu(), expected())


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


@TWO_DEVICES
def test_each_device_has_a_shared_pool_of_its_own(side: Side) -> None:
    """Captures that name no pool, on both devices in turn."""
    if side == "ours":
        cgp.disable()
        cgp.enable(share_captures=True)
    captured: list[tuple[int, Captured]] = []
    for rows in (64, 1000, 300):
        for device in (0, 1):
            with torch.cuda.device(device):
                torch.cuda.graph.default_capture_stream = None  # it belongs to one device
                captured.append((device, capture_chain(rows, None)))
    torch.cuda.graph.default_capture_stream = None
    for device in (0, 1):
        assert len(adapter.pool_ids(device)) == (side == "ours")
    for seed, (device, one) in enumerate([*captured, *reversed(captured)]):
        with torch.cuda.device(device):
            x = fresh(one.x.shape[0], seed=seed)
            assert torch.equal(one.replay(x), chain(x))
    del captured, one
    gc.collect()
    cgp.disable()  # which lets go of the shared pools


@TWO_DEVICES
def test_backward_over_two_devices(side: Side) -> None:
    """A model whose halves lie on two devices, each half's passes captured on its own device."""
    halves = [small_model(f"cuda:{device}") for device in (0, 1)]
    twins = [small_model(f"cuda:{device}") for device in (0, 1)]
    graphed = []
    for device in (0, 1):
        with torch.cuda.device(device):
            sample = torch.zeros(32, 64, device="cuda", requires_grad=True)
            torch.cuda.graph.default_capture_stream = None  # it belongs to one device
            graphed.append(torch.cuda.make_graphed_callables(halves[device], (sample,)))
    torch.cuda.graph.default_capture_stream = None
    if side == "ours":
        assert adapter.pool_ids(0)
        assert adapter.pool_ids(1)
    for step in range(3):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).cuda(0)
        x.requires_grad_()  # as the sample does
        for module in (*halves, *twins):
            module.zero_grad(set_to_none=True)  # else a replay writes to what it is added to
        graphed[1](graphed[0](x).to("cuda:1")).square().mean().backward()
        twins[1](twins[0](x).to("cuda:1")).square().mean().backward()
        for half, twin in zip(halves, twins, strict=True):
            for ours, theirs in zip(half.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)
