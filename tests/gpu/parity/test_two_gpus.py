"""Two GPUs: collectives of a process each, and one process that uses what lies on both."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cudagraph_pool

from ..conftest import Run
from ..work import torch
from .conftest import Side
from .programs import PRELUDE

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
# With it NCCL is told of every segment there is when a group begins, and of each one made later.
REGISTERED = pytest.mark.parametrize("registered", ["0", "1"], ids=["plain", "registered"])

RANKS = """
import os
import torch.distributed as dist

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
enable()
# A pool from before the group begins: its memory is registered too.
before = capture_and_check(side == "ours")
segments = [
    segment["address"]
    for segment in torch.cuda.memory_snapshot()
    if segment["device"] == rank and tuple(segment["segment_pool_id"]) == tuple(before[0].pool())
]
dist.init_process_group(
    "nccl",
    init_method=sys.argv[2],
    rank=rank,
    world_size=2,
    device_id=torch.device("cuda", rank),
)


def in_a_pool_of_ours(graph):
    return tuple(graph.pool()) in ours(rank)


def assert_registered(addresses, registered):
    # NCCL writes down the buffers that it was told of.
    path = os.environ["NCCL_DEBUG_FILE"]
    told = open(path).read() if os.path.exists(path) else ""
    for address in addresses:
        assert (f"buffer 0x{address:x} " in told) == registered, (hex(address), told)


def finish(*graphs):
    assert segments
    assert_registered(segments, os.environ["TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"] == "1")
    # What a graph captured of a communicator must be gone before it.
    torch.cuda.synchronize()
    for graph in graphs:
        graph.reset()
    check(*before)
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()
"""

COLLECTIVES = """
def collectives(x):
    summed = x.clone()
    dist.all_reduce(summed)
    gathered = torch.empty(2 * x.numel(), device="cuda")
    dist.all_gather_into_tensor(gathered, x)
    part = torch.empty(x.numel() // 2, device="cuda")
    dist.reduce_scatter_tensor(part, x)
    # Freed between others that live on, so that what comes next has to fill the holes.
    small = [x + i for i in range(8)]
    del small[1::2]
    large = x.repeat(4)
    pending = dist.all_reduce(large, async_op=True)
    other = x * 3  # beside it
    pending.wait()
    return [summed, gathered, part, large, other, *small]


def expected(mine, theirs):
    zero, one = (mine, theirs) if rank == 0 else (theirs, mine)
    summed, pair = zero + one, torch.cat([zero, one])
    part = summed.chunk(2)[rank]
    return [summed, pair, part, summed.repeat(4), mine * 3, *(mine + i for i in range(0, 8, 2))]


def numbers(count, step, of):
    return torch.rand(count, generator=torch.Generator().manual_seed(10 * step + of)).cuda()


def assert_all_equal(results, wanted):
    for position, (result, right) in enumerate(zip(results, wanted, strict=True)):
        assert torch.equal(result, right), position


kept = []
for count in (256, 1 << 20, 1 << 18):
    x = numbers(count, 0, rank)
    assert_all_equal(collectives(x), expected(x, numbers(count, 0, 1 - rank)))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = collectives(x)
    assert in_a_pool_of_ours(graph) == (side == "ours")
    if side == "ours" and count == 1 << 20:
        ranges = _torch.snapshot(rank, tuple(graph.pool()))["ranges"]
        pages = [page for mapped in ranges for page in mapped["pages"]]
        assert len(pages) > len(set(pages)), "nothing was stitched"
    kept.append((count, graph, x, results))
for step in range(1, 4):
    for count, graph, x, results in kept:
        x.copy_(numbers(count, step, rank))
        for result in results:
            result.fill_(-1)
        graph.replay()
        assert_all_equal(results, expected(x, numbers(count, step, 1 - rank)))
    # Eager ones in between, in memory of the base.
    assert_all_equal(collectives(x), expected(x, numbers(count, step, 1 - rank)))
graphs = [graph for _, graph, _, _ in kept]
del kept, results, result
finish(*graphs)
"""

# NCCL may keep what a captured transfer has sent or received, and where that can be exported lets
# the other process map it.
DROPPED = """
import gc

if side == "ours":
    cgp.enable(exportable=EXPORTABLE)


def exchange(x):
    sent, received = x + 1, torch.empty_like(x)
    for sender in (0, 1):
        dist.send(sent, 1 - rank) if rank == sender else dist.recv(received, sender)
    return received


def used():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    dist.barrier(device_ids=[rank])
    free, total = torch.cuda.mem_get_info()
    return total - free


x = torch.zeros(1 << 18, device="cuda")
exchange(x)
left = []
for step in range(8):
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        received = exchange(x)
    for value in (10 * step, 10 * step + 5):
        x.fill_(value + rank)
        received.fill_(-1)
        graph.replay()
        assert (received == value + 2 - rank).all()
    del received
    graph.reset()
    left.append(used())
assert left[-1] == left[1], left  # the first one leaves what NCCL sets up once
finish()
"""


def run_two_ranks(folder: Path, program: str, side: Side, **environment: str) -> None:
    path = folder / "program.py"
    path.write_text(program)
    # Where the program finds this very package, installed or not.
    package = str(Path(cudagraph_pool.__file__).parent.parent)
    common = {
        **os.environ,
        "WORLD_SIZE": "2",
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
        # Its watchdog must not raise into a capture.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        # It writes down what buffers it is told of.
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "REG",
        **environment,
    }
    said = [folder / f"rank{rank}.txt" for rank in range(2)]
    ranks = []
    for rank, file in enumerate(said):
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "NCCL_DEBUG_FILE": str(folder / f"nccl{rank}.txt"),
        }
        command = [sys.executable, str(path), side, f"file://{folder / 'store'}"]
        with file.open("w") as output:
            ranks.append(
                subprocess.Popen(command, env=common | own, stdout=output, stderr=subprocess.STDOUT)
            )
    end = time.monotonic() + 240
    while None in (codes := [process.poll() for process in ranks]):
        # When one has failed the other would wait for it for ever.
        if any(codes) or time.monotonic() > end:
            break
        time.sleep(0.1)
    for process in ranks:
        process.kill()
        process.wait()
    text = "\n".join(file.read_text() for file in said)
    assert codes == [0, 0], text
    # NCCL and torch.distributed have warnings of their own; nobody may speak of these.
    for bad in ("Traceback", "terminate called", "CUDA error", "cudagraph_pool"):
        assert bad not in text, text


@REGISTERED
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(COLLECTIVES, id="collectives"),
        pytest.param(
            DROPPED.replace("EXPORTABLE", "False"), id="dropped", marks=pytest.mark.whole_gpu
        ),
        pytest.param(
            DROPPED.replace("EXPORTABLE", "True"),
            id="dropped_exportable",
            marks=pytest.mark.whole_gpu,
        ),
    ],
)
def test_two_ranks(program: str, registered: str, side: Side, tmp_path: Path) -> None:
    run_two_ranks(
        tmp_path,
        PRELUDE + RANKS + program,
        side,
        TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=registered,
    )


# torch asks for access between two devices once, and remembers the answer.
PEERS = """
def become_peers():
    a = torch.ones(1 << 20, device="cuda:0")
    b = a.to("cuda:1")
    a.copy_(b)
    for device in (0, 1):
        torch.cuda.synchronize(device)


if sys.argv[2] == "before enable":
    become_peers()
enable()
kept = []
for device in (0, 1):
    with torch.cuda.device(device):
        x = torch.ones(4, 1 << 20, device="cuda")
        (x * 2).sum().item()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            y = x * 2
        graph.replay()
        torch.cuda.synchronize()
        kept.append((graph, x, y))
if sys.argv[2] == "after the capture":
    become_peers()
(_, x0, y0), (_, _, y1) = kept


def check(result, wanted):
    for device in (0, 1):
        torch.cuda.synchronize(device)
    assert (result == wanted).all().item()


check(y0.to("cuda:1"), 2)
check(y1.copy_(x0), 1)
check(y0[:, ::2].to("cuda:1"), 2)  # a kernel reads
y1.zero_()[:, ::2].copy_(x0[:, ::2])  # a kernel writes
check(y1[:, ::2], 1)
check(y1[:, 1::2], 0)
check(y1.copy_(y0), 2)
"""


@pytest.mark.parametrize("when", ["before enable", "after the capture"])
def test_peers_reach_pools(when: str, side: Side, run: Run) -> None:
    run(PRELUDE + PEERS, side, when)
