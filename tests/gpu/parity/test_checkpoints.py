"""torch._C's checkpoint functions, called as torch._inductor.cudagraph_trees calls them."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ..conftest import Run
from ..work import adapter, torch
from .conftest import Side

if TYPE_CHECKING:
    from torch import Tensor

# What inductor warns of when it is imported is its own affair.
pytestmark = pytest.mark.filterwarnings("ignore")

MIB = 1 << 20
SIZES = [4, 100_000, MIB, 3 * MIB, 20 * MIB + 5]


class Pool:
    """A pool as the manager of a graph tree has it: one stream, held open by an empty graph."""

    def __init__(self) -> None:
        self.device = torch.cuda.current_device()
        self.stream = torch.cuda.Stream()
        self.id = tuple(torch.cuda.graph_pool_handle())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            self._anchor, _ = self.record(lambda: None)

    def close(self) -> None:
        """Lets go of the pool: pytest holds on to this object for longer."""
        self._anchor.reset()

    def record(self, function: Callable[[], Any]) -> tuple[Any, Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self.id, stream=self.stream, capture_error_mode="thread_local"
        ):
            outputs = function()
        return graph, outputs

    @contextmanager
    def eager(self) -> Iterator[None]:
        """This thread's allocations go to the pool: a warm-up."""
        from torch._inductor.cudagraph_trees import _use_cuda_memory_pool_manager

        with _use_cuda_memory_pool_manager(self.device, self.id, self.stream):
            yield

    def checkpoint(self) -> Any:
        return torch._C._cuda_getCheckpointState(self.device, self.id)

    def restore(
        self, state: Any, live: Sequence[Tensor] = (), stale: Sequence[Tensor] = ()
    ) -> None:
        torch._C._cuda_setCheckpointPoolState(
            self.device, state, [storage_of(t) for t in stale], [storage_of(t) for t in live]
        )

    def holds(self, *expected: int) -> bool:
        """Whether exactly these addresses are allocated, by both ways that the trees ask."""
        from torch._inductor.cudagraph_trees import get_block_addrs

        by_snapshot = sorted(get_block_addrs(self.id)) == sorted(expected)
        checked = torch._C._cuda_checkPoolLiveAllocations(self.device, self.id, set(expected))
        assert by_snapshot == checked
        return bool(checked)

    def reserved(self) -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == self.id)


@pytest.fixture
def pool(side: Side) -> Iterator[Pool]:
    made = Pool()
    assert (made.id in map(tuple, adapter.pool_ids(made.device))) == (side == "ours")
    yield made
    gc.collect()
    made.close()


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def owns(tensor: Tensor) -> bool:
    """Whether the tensor's storage frees its memory, by the deleter that torch knows."""
    return bool(torch._C._has_Standard_Deleter(storage_of(tensor)))


def buffers(sizes: Sequence[int], value: int) -> list[Tensor]:
    return [torch.full((size,), value, dtype=torch.uint8, device="cuda") for size in sizes]


def describe(tensor: Tensor) -> dict[str, Any]:
    from torch._inductor.cudagraph_trees import CUDAGraphNode

    described: dict[str, Any] = CUDAGraphNode._tensor_metadata(tensor, ignore_storage_offset=False)
    return described


def rebuild(described: dict[str, Any]) -> Tensor:
    """The tensor that stood there; it does not own its memory."""
    storage = torch._C._construct_storage_from_data_pointer(
        described["data_ptr"], described["device"], described["nbytes"]
    )
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(described, storage)


def raw_delete(tensor: dict[str, Any]) -> None:
    torch._C._cuda_cudaCachingAllocator_raw_delete(tensor["data_ptr"])


def all_are(tensors: Sequence[Tensor], value: int) -> bool:
    return all(bool((t == value).all()) for t in tensors)


def test_live_allocations(pool: Pool) -> None:
    graph, outputs = pool.record(lambda: buffers([4, 4, 5 * MIB], 1))
    addresses = [t.data_ptr() for t in outputs]
    assert pool.holds(*addresses)
    assert not pool.holds()
    assert not pool.holds(*addresses[:2])
    assert not pool.holds(addresses[0], addresses[1], addresses[2] + 256)
    outside = torch.ones(4, device="cuda")
    assert not pool.holds(*addresses, outside.data_ptr())
    view = outputs[2][7:]  # inside a block that lives on
    del outputs[1:]
    assert pool.holds(addresses[0], addresses[2])
    assert not pool.holds(addresses[0], view.data_ptr())
    del outputs, view
    assert pool.holds()
    del graph


def test_live_allocations_of_a_pool_that_is_not(pool: Pool) -> None:
    unknown = tuple(torch.cuda.graph_pool_handle())
    with pytest.raises(RuntimeError):
        torch._C._cuda_checkPoolLiveAllocations(pool.device, unknown, set())
    with pytest.raises(RuntimeError):
        torch._C._cuda_getCheckpointState(pool.device, unknown)


def test_a_restore_brings_blocks_back(pool: Pool) -> None:
    graph, outputs = pool.record(lambda: buffers(SIZES, 7))
    state = pool.checkpoint()
    described = [describe(t) for t in outputs]
    addresses = [d["data_ptr"] for d in described]
    del outputs
    assert pool.holds()
    pool.restore(state)
    assert pool.holds(*addresses)
    for at, entry in enumerate(described):
        raw_delete(entry)
        assert pool.holds(*addresses[at + 1 :])
    pool.restore(state)  # more than once
    assert pool.holds(*addresses)
    graph.replay()
    assert all_are([rebuild(entry) for entry in described], 7)
    for entry in described:
        raw_delete(entry)
    assert pool.holds()


def test_a_restore_gives_live_tensors_their_deleter(pool: Pool) -> None:
    graph, outputs = pool.record(lambda: buffers(SIZES, 9))
    state = pool.checkpoint()
    assert all(owns(t) for t in outputs)
    described = [describe(t) for t in outputs]
    addresses = [d["data_ptr"] for d in described]
    del outputs
    graph.replay()
    tensors = [rebuild(entry) for entry in described]
    assert not any(owns(t) for t in tensors)
    pool.restore(state, live=tensors[:3])
    assert [owns(t) for t in tensors] == [True, True, True, False, False]
    assert all_are(tensors, 9)
    for at in range(3):
        del tensors[0]
        assert pool.holds(*addresses[at + 1 :])
    del tensors  # those that were not named own nothing
    assert pool.holds(*addresses[3:])
    for entry in described[3:]:
        raw_delete(entry)
    assert pool.holds()


def test_tensors_that_own_their_block_keep_it(pool: Pool) -> None:
    """A block that lives now and lived then: the restore frees it and allocates it again."""
    _graph, outputs = pool.record(lambda: buffers(SIZES, 3))
    state = pool.checkpoint()
    addresses = [t.data_ptr() for t in outputs]
    for _ in range(3):
        pool.restore(state)
        assert pool.holds(*addresses)
        assert all(owns(t) for t in outputs)
    del outputs[::2]
    assert pool.holds(*addresses[1::2])
    del outputs
    assert pool.holds()


def test_stale_tensors_lose_their_block(pool: Pool) -> None:
    """What lives now and did not then, if the restore is told so."""
    _graph, first = pool.record(lambda: buffers(SIZES, 1))
    state = pool.checkpoint()
    _second_graph, second = pool.record(lambda: buffers(SIZES, 2))
    with pool.eager():
        warm = buffers([MIB], 4)
    stale = [*second, *warm]
    assert pool.holds(*(t.data_ptr() for t in [*first, *stale]))
    pool.restore(state, stale=stale)
    assert pool.holds(*(t.data_ptr() for t in first))
    assert not any(owns(t) for t in stale)
    assert all(owns(t) for t in first)
    with pool.eager():
        again = buffers([MIB], 5)  # may take the memory of stale ones
    del stale, second, warm  # frees nothing, twice least of all
    assert pool.holds(*(t.data_ptr() for t in [*first, *again]))
    assert all_are(again, 5)
    del again
    pool.restore(state)
    del first


def test_stale_tensors_that_are_not_named_are_an_error(run: Run, side: Side) -> None:
    """In a process of its own, which then ends at once: tensors are left without their memory."""
    program = """
import os, sys, torch
if sys.argv[1] == "ours":
    import cudagraph_pool
    cudagraph_pool.enable()
graph, later = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
pool = torch.cuda.graph_pool_handle()
with torch.cuda.graph(graph, pool=pool):
    a = torch.ones(100, device="cuda")
state = torch._C._cuda_getCheckpointState(0, pool)
with torch.cuda.graph(later, pool=pool):
    b = torch.ones(100, device="cuda")
try:
    torch._C._cuda_setCheckpointPoolState(0, state, [], [])
except RuntimeError as error:
    assert "being manually freed must be passed" in str(error), error
    print("refused", flush=True)
os._exit(0)
"""
    assert run(program, side).stdout == "refused\n"


def test_a_checkpoint_restored_after_its_pool_has_grown(pool: Pool) -> None:
    first, outputs = pool.record(lambda: buffers(SIZES, 11))
    state = pool.checkpoint()
    before = pool.reserved()
    described = [describe(t) for t in outputs]
    addresses = [d["data_ptr"] for d in described]
    for turn in range(3):
        grown, big = pool.record(lambda: buffers([150 * MIB, MIB, 70_000, 33 * MIB], 12))
        assert pool.reserved() > before + 180 * MIB
        after = pool.reserved()
        del big
        outputs = None
        tensors = [rebuild(entry) for entry in described]
        pool.restore(state, live=tensors)
        assert pool.holds(*addresses)
        # What is recorded from here must leave alone what lives, and wants no more memory.
        again, more = pool.record(lambda: buffers([100 * MIB, 3 * MIB, 50_000], 13))
        if turn > 0:
            assert pool.reserved() == after
        first.replay()
        again.replay()
        assert all_are(tensors, 11)
        assert all_are(more, 13)
        del more
        grown.replay()  # its memory is its own no more, but it exists
        first.replay()
        assert all_are(tensors, 11)
        del tensors
        assert pool.holds()


def test_two_branches_use_the_same_memory(pool: Pool) -> None:

    def branch(x: Tensor, factor: int) -> Tensor:
        return (x * factor).flip(0) + 1

    static = torch.ones(8 * MIB, dtype=torch.uint8, device="cuda")
    root, kept = pool.record(lambda: static + 1)
    state = pool.checkpoint()
    described = describe(kept)
    branches: list[Any] = []
    results: list[dict[str, Any]] = []
    reserved: list[int] = []
    for factor in range(2, 6):
        if branches:
            kept = rebuild(described)
            pool.restore(state, live=[kept])
        graph, result = pool.record(partial(branch, kept, factor))
        assert pool.holds(kept.data_ptr(), result.data_ptr())
        branches.append(graph)
        results.append(describe(result))
        reserved.append(pool.reserved())
        del kept, result
    assert max(reserved) == reserved[0]
    for value in (1, 4, 7):
        static.fill_(value)
        for number, graph in enumerate(branches):
            root.replay()
            graph.replay()
            assert all_are([rebuild(described)], value + 1)
            assert all_are([rebuild(results[number])], (value + 1) * (number + 2) + 1)


def test_a_checkpoint_with_memory_of_a_warm_up(pool: Pool) -> None:
    with pool.eager():
        warm = buffers(SIZES, 21)
    assert pool.holds(*(t.data_ptr() for t in warm))
    state = pool.checkpoint()
    described = [describe(t) for t in warm]
    del warm
    with pool.eager():
        other = buffers([30 * MIB, 1000, 1000], 22)
    del other
    tensors = [rebuild(entry) for entry in described]
    pool.restore(state, live=tensors)
    assert pool.holds(*(d["data_ptr"] for d in described))
    with pool.eager():
        other = buffers([30 * MIB, 1000, 1000], 23)
        for tensor in tensors:
            tensor.fill_(24)
    torch.cuda.synchronize()
    assert all_are(other, 23)
    assert all_are(tensors, 24)
    del tensors, other, tensor
    assert pool.holds()


def test_a_thousand_restores(side: Side, pool: Pool) -> None:
    """As a tree that records again and again: nothing grows."""
    _graph, outputs = pool.record(lambda: buffers([4, 3 * MIB, 60_000], 1))
    state = pool.checkpoint()
    described = [describe(t) for t in outputs]
    addresses = [d["data_ptr"] for d in described]
    del outputs

    def turn(number: int) -> None:
        tensors = [rebuild(entry) for entry in described]
        pool.restore(state, live=tensors[:2])
        raw_delete(described[2])  # died since
        with pool.eager():
            warm = buffers([2 * MIB, 1000, 5 * MIB], number % 251)
        if number % 10 == 0:
            graph, recorded = pool.record(lambda: buffers([4 * MIB, 700], 2))
            del graph, recorded
        assert all_are(warm, number % 251)

    for number in range(20):
        turn(number)
    reserved, total = pool.reserved(), torch.cuda.memory_reserved()
    allocated = torch.cuda.memory_allocated()
    mapped = adapter.stats(pool.device, pool.id)["page_mappings"] if side == "ours" else 0
    for number in range(20, 1000):
        turn(number)
    assert pool.holds()
    assert pool.reserved() == reserved
    assert torch.cuda.memory_reserved() == total
    assert torch.cuda.memory_allocated() == allocated
    if side == "ours":
        assert adapter.stats(pool.device, pool.id)["page_mappings"] == mapped
    pool.restore(state)
    assert pool.holds(*addresses)
    for entry in described:
        raw_delete(entry)


def test_a_checkpoint_outlives_no_pool(pool: Pool) -> None:
    """Its pool is gone: an error, whatever else has come to where it was."""
    other = tuple(torch.cuda.graph_pool_handle())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=other):
        torch.ones(1000, device="cuda") + 1
    state = torch._C._cuda_getCheckpointState(pool.device, other)
    graph.reset()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with pytest.raises(RuntimeError):
        pool.restore(state)
    with pytest.raises(RuntimeError):
        torch._C._cuda_getCheckpointState(pool.device, other)
    assert pool.holds()


def test_taking_a_block_from_a_living_tensor(pool: Pool) -> None:
    """What ends a warm-up or a recording whose outputs are still held."""
    _graph, outputs = pool.record(lambda: buffers([4, 5 * MIB], 1))
    addresses = [t.data_ptr() for t in outputs]
    storage = storage_of(outputs[0])
    torch._C._free_And_Remove_DeleterFn(storage)
    assert pool.holds(addresses[1])
    with pytest.raises(RuntimeError, match="Expected standard deleter"):
        torch._C._free_And_Remove_DeleterFn(storage)
    torch._C._set_storage_data_ptr_access_error_msg(storage, "gone for good")
    with pytest.raises(RuntimeError, match="gone for good"):
        outputs[0] + 1
    del outputs
    assert pool.holds()


def test_only_this_thread_warms_up_in_the_pool(pool: Pool) -> None:
    elsewhere: list[Tensor] = []

    def allocate() -> None:
        elsewhere.extend(buffers([5000], 6))

    with pool.eager():
        here = buffers([5000], 5)
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
    after = buffers([5000], 4)
    assert pool.holds(here[0].data_ptr())
    assert owns(here[0])
    assert owns(elsewhere[0]) == owns(after[0])
    del here


def test_the_error_of_a_leak_shows_where_it_was_allocated(pool: Pool) -> None:
    from torch._inductor.cudagraph_trees import StorageWeakRefWrapper, check_memory_pool

    torch.cuda.memory._record_memory_history(context="all", stacks="python")
    try:
        with pool.eager():
            leaked, known = buffers([10_000, 3 * MIB], 1)
        with pytest.raises(RuntimeError, match="Detected 1 tensor") as raised:
            check_memory_pool(pool.device, pool.id, [StorageWeakRefWrapper(known)])
        assert f"Data Pointer: {leaked.data_ptr()}" in str(raised.value)
        assert "test_checkpoints.py" in str(raised.value)
        outside = torch.ones(10, device="cuda")
        with pytest.raises(RuntimeError, match="are not allocated in pool"):
            check_memory_pool(
                pool.device, pool.id, [StorageWeakRefWrapper(t) for t in (leaked, known, outside)]
            )
        check_memory_pool(pool.device, pool.id, [StorageWeakRefWrapper(t) for t in (leaked, known)])
        del raised
    finally:
        torch.cuda.memory._record_memory_history(enabled=None, clear_history=True)
    del leaked, known
