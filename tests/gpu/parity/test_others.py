"""The allocator's switches and the second way to ask it: both still reach who they concern."""

from __future__ import annotations

import pytest

import cudagraph_pool as cgp

from ..conftest import Run
from ..work import adapter, capture_chain, chain, fresh, torch
from .conftest import Side
from .programs import PRELUDE

ALLOCATOR_SETTINGS = """
import warnings

def step(bytes):
    before = torch.cuda.memory_allocated()
    tensor = torch.empty(bytes, dtype=torch.uint8, device="cuda")
    return torch.cuda.memory_allocated() - before

def expandable(tensor):
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]:
            return segment["is_expandable"]
    raise AssertionError("in no segment")

def set_by_memory(settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it names the other way, which is tried too
        torch.cuda.memory._set_allocator_settings(settings)

enable()
kept = [capture_and_check(side == "ours")]
for set_settings in (set_by_memory, torch._C._accelerator_setAllocatorSettings):
    set_settings("roundup_power2_divisions:1")
    assert step(1200 << 10) == 1200 << 10
    # Halves of the way from 1 to 2 MiB.
    set_settings("roundup_power2_divisions:2")
    assert step(1200 << 10) == 1536 << 10, step(1200 << 10)
    kept.append(capture_and_check(side == "ours"))
    set_settings("roundup_power2_divisions:1")
    assert step(1200 << 10) == 1200 << 10

    torch.cuda.empty_cache()
    plain = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
    assert not expandable(plain)
    set_settings("expandable_segments:True")
    assert torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    grows = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
    assert expandable(grows)
    kept.append(capture_and_check(side == "ours"))
    set_settings("expandable_segments:False")
    assert not torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    del plain, grows
for graph, x, y in kept:
    check(graph, x, y)

try:
    set_by_memory("no_such_setting:1")
except (RuntimeError, ValueError) as error:
    assert "no_such_setting" in str(error), error
else:
    raise AssertionError("took a setting that there is not")
"""

# Another process on the GPU may allocate meanwhile: the tensor is large, the slack is small to it.
CACHING_OFF = """
SIZE = 1 << 30
SLACK = 256 << 20

def free():
    return torch.cuda.mem_get_info()[0]

enable()
kept = [capture_and_check(side == "ours")]
cached = torch.ones(1 << 20, device="cuda")
torch.cuda.empty_cache()
before, allocated, reserved = free(), torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

torch.cuda.caching_allocator_enable(False)
direct = torch.full((SIZE,), 3, dtype=torch.uint8, device="cuda")
assert torch.cuda.memory_allocated() == allocated  # cudaMalloc's: nobody counts it
assert torch.cuda.memory_reserved() == reserved
assert before - free() >= SIZE - SLACK
del direct
assert before - free() < SLACK  # given back without empty_cache()
direct = torch.full((1000,), 3, dtype=torch.uint8, device="cuda")
graph, x, y = kept[0]
x.fill_(4)
graph.replay()
assert torch.equal(y, work(x))
assert cached.sum().item() == 1 << 20

torch.cuda.caching_allocator_enable(True)
assert direct.sum().item() == 3000
del direct  # by cudaFree, as it was made
assert torch.cuda.memory_allocated() == allocated
kept.append(capture_and_check(side == "ours"))
graph, x, y = kept[0]

# A tensor of a graph's pool that dies while caching is off goes back to its pool all the same.
inside = capture(x)[1]
allocated = torch.cuda.memory_allocated()
torch.cuda.caching_allocator_enable(False)
del inside
assert torch.cuda.memory_allocated() == allocated - (1 << 20)
torch.cuda.caching_allocator_enable(True)
for graph, x, y in kept:
    check(graph, x, y)
"""

# Native refuses a capture without caching on purpose: it would call cudaMalloc, which no global
# capture survives. Pools of ours do not ask the base, and so captures go on working.
CAPTURE_WITH_CACHING_OFF = """
import warnings
warnings.filterwarnings("ignore", message="The CUDA Graph is empty")

enable()
x = torch.ones(1 << 18, device="cuda")
work(x)
torch.cuda.caching_allocator_enable(False)
if side == "ours":
    graph, y = capture(x)
    assert tuple(graph.pool()) in ours()
else:
    stream = torch.cuda.current_stream()
    try:
        capture(x)
    except RuntimeError:
        torch.cuda.set_stream(stream)
    else:
        raise AssertionError("native captured without caching")
torch.cuda.caching_allocator_enable(True)
if side == "ours":
    check(graph, x, y)
"""

ACCELERATOR_UNDER_CHANGE_CURRENT_ALLOCATOR = """
if side == "ours":
    torch.cuda.memory.change_current_allocator(cgp.allocator())
kept = [capture_and_check(side == "ours") for _ in range(2)]
more = torch.ones(30 << 20, dtype=torch.uint8, device="cuda")
assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated() >= 30 << 20
assert torch.accelerator.memory_reserved() == torch.cuda.memory_reserved()
del more
torch.accelerator.empty_cache()
assert torch.accelerator.memory_reserved() == torch.cuda.memory_reserved() < 30 << 20
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(ALLOCATOR_SETTINGS, id="allocator_settings"),
        pytest.param(CACHING_OFF, id="caching_off"),
        pytest.param(CAPTURE_WITH_CACHING_OFF, id="capture_with_caching_off"),
        pytest.param(ACCELERATOR_UNDER_CHANGE_CURRENT_ALLOCATOR, id="accelerator_from_the_start"),
    ],
)
def test_in_a_process_of_its_own(program: str, side: Side, run: Run) -> None:
    run(PRELUDE + program, side)


def assert_accelerator_agrees() -> None:
    ask, cuda = torch.accelerator, torch.cuda
    assert ask.memory_allocated() == cuda.memory_allocated()
    assert ask.max_memory_allocated() == cuda.max_memory_allocated()
    assert ask.memory_reserved() == cuda.memory_reserved()
    assert ask.max_memory_reserved() == cuda.max_memory_reserved()
    theirs, ours = ask.memory_stats(), cuda.memory_stats()
    common = theirs.keys() & ours.keys()  # each has a few that the other has not
    assert len(common) >= 8 * 3 * 4
    assert {key: theirs[key] for key in common} == {key: ours[key] for key in common}
    assert ask.get_memory_info() == cuda.mem_get_info()


@pytest.mark.whole_gpu
def test_torch_accelerator_agrees(side: Side) -> None:
    assert_accelerator_agrees()
    captured = capture_chain(2048, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=captured.graph.pool()):
        inside = torch.zeros(9 << 20, dtype=torch.uint8, device="cuda")
    eager = torch.zeros(7 << 20, dtype=torch.uint8, device="cuda")
    assert bool(adapter.pool_ids(torch.cuda.current_device())) == (side == "ours")
    assert torch.accelerator.memory_allocated() >= 16 << 20
    assert_accelerator_agrees()

    del eager, inside
    assert torch.accelerator.max_memory_allocated() >= torch.cuda.memory_allocated() + (16 << 20)
    torch.accelerator.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    assert_accelerator_agrees()
    torch.accelerator.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocated_bytes.all.freed"] == 0
    assert_accelerator_agrees()

    # Memory of a pool that is in use stays; when nothing needs it any more, it goes.
    reserved = torch.cuda.memory_reserved()
    torch.accelerator.empty_cache()
    x = fresh(2048, seed=9)
    assert torch.equal(captured.replay(x), chain(x))
    del captured, graph, x
    torch.accelerator.empty_cache()
    assert torch.cuda.memory_reserved() < reserved
    assert adapter.pool_ids(torch.cuda.current_device()) == []
    assert_accelerator_agrees()


@pytest.mark.whole_gpu
def test_torch_accelerator_agrees_whoever_is_installed(side: Side) -> None:
    captured = capture_chain(700, None)
    assert_accelerator_agrees()
    cgp.disable()
    assert_accelerator_agrees()
    again = capture_chain(700, None)
    assert_accelerator_agrees()
    if side == "ours":
        cgp.enable()
    assert_accelerator_agrees()
    x = fresh(700, seed=1)
    assert torch.equal(captured.replay(x), again.replay(x))
    assert_accelerator_agrees()
