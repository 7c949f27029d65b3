"""torch._C's checkpoint functions, called as torch._inductor.cudagraph_trees calls them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from ..work import adapter, torch
from .conftest import Side
from .memory import reserved

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


def test_a_checkpoint_restored_after_its_pool_has_grown(pool: Pool) -> None:
    first, outputs = pool.record(lambda: buffers(SIZES, 11))
    state = pool.checkpoint()
    before = reserved(pool.id)
    described = [describe(t) for t in outputs]
    addresses = [d["data_ptr"] for d in described]
    for turn in range(3):
        grown, big = pool.record(lambda: buffers([150 * MIB, MIB, 70_000, 33 * MIB], 12))
        assert reserved(pool.id) > before + 180 * MIB
        after = reserved(pool.id)
        del big
        outputs = None
        tensors = [rebuild(entry) for entry in described]
        pool.restore(state, live=tensors)
        assert pool.holds(*addresses)
        # What is recorded from here must leave alone what lives, and wants no more memory.
        again, more = pool.record(lambda: buffers([100 * MIB, 3 * MIB, 50_000], 13))
        if turn > 0:
            assert reserved(pool.id) == after
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
