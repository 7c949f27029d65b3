"""Training on two GPUs, eager and captured; and pools' memory between processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..conftest import Run
from ..work import torch
from .conftest import Side
from .programs import PRELUDE, python_path, run_file

TWO_DEVICES = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
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
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))


def rows(seed):
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).cuda()


def data(step, of):
    return rows(1000 * step + 2 * of), rows(1000 * step + 2 * of + 1)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
    ).cuda()


def loss_of(net, x, target):
    return torch.nn.functional.mse_loss(net(x), target)


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
    exchanged = torch.empty_like(x)
    dist.all_to_all_single(exchanged, x)
    # Freed between others that live on, so that what comes next has to fill the holes.
    small = [x + i for i in range(8)]
    del small[1::2]
    large = x.repeat(4)
    pending = dist.all_reduce(large, async_op=True)
    other = x * 3  # beside it
    pending.wait()
    sent = x + 1
    dist.broadcast(sent, src=1)
    return [summed, gathered, part, exchanged, large, other, sent, *small]


def expected(mine, theirs):
    zero, one = (mine, theirs) if rank == 0 else (theirs, mine)
    half = slice(0, mine.numel() // 2) if rank == 0 else slice(mine.numel() // 2, None)
    summed = zero + one
    return [
        summed,
        torch.cat([zero, one]),
        summed[half],
        torch.cat([zero[half], one[half]]),
        summed.repeat(4),
        mine * 3,
        one + 1,
        *(mine + i for i in range(0, 8, 2)),
    ]


def numbers(count, step, of):
    return torch.rand(count, generator=torch.Generator().manual_seed(10 * step + of)).cuda()


def assert_all_equal(results, wanted):
    for position, (result, right) in enumerate(zip(results, wanted, strict=True)):
        assert torch.equal(result, right), position


graphs = []
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
    graphs.append(graph)
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
del kept, results, result
finish(*graphs)
"""

# The same collective in graphs of many sizes, which on our side run by one executable.
SHARED_EXECS = """
import random

pool = cgp.GraphPool(shared_exec=True, max_execs=1) if side == "ours" else None


def capture_step(graph, x):
    mode = {"capture_error_mode": "thread_local"}
    context = torch.cuda.graph(graph, **mode)
    if side == "ours":
        context = cgp.graph(graph, pool, **mode)
    with context:
        return step(x)


def numbers(count, seed, of):
    return torch.rand(count, generator=torch.Generator().manual_seed(10 * seed + of)).cuda()


def step(x):
    doubled = x * 2
    dist.all_reduce(doubled)
    moved = doubled + 1
    dist.all_reduce(moved)
    return moved


def expected(count, seed):
    doubled = numbers(count, seed, 0) * 2 + numbers(count, seed, 1) * 2
    return (doubled + 1) * 2


kept = []
for count in (64, 100, 3000, 1 << 16, 1 << 20, 5000, 4 << 20):
    x = numbers(count, 0, rank)
    assert torch.equal(step(x), expected(count, 0))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    kept.append((count, graph, x, capture_step(graph, x)))
order = random.Random(4)
for seed in range(1, 80):
    count, graph, x, y = order.choice(kept)
    x.copy_(numbers(count, seed, rank))
    y.fill_(-1)
    graph.replay()
    assert torch.equal(y, expected(count, seed)), (seed, count)
# What a template keeps for its launches outlives it as long as they run.
for count, graph, x, y in kept:
    fresh = numbers(count, 99, rank)
    torch.cuda._sleep(20_000_000)
    x.copy_(fresh)
    graph.replay()
    graph.reset()
    assert torch.equal(y, expected(count, 99)), count
if side == "ours":
    assert pool.stats()["exec_updates"] > 0, pool.stats()
    assert pool.stats()["execs"] == 0, pool.stats()
finish()
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

# Both follow the same steps: `net` on two GPUs, `twin` on one, with the data of both ranks.
TRAINING = """
twin = model()
twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)


def twin_step(step):
    twin_optimizer.zero_grad(set_to_none=True)
    losses = [loss_of(twin, *data(step, of)) for of in (0, 1)]
    (sum(losses) / 2).backward()
    twin_optimizer.step()


def assert_followed():
    for (name, parameter), wanted in zip(net.named_parameters(), twin.parameters(), strict=True):
        for mine, right in ((parameter, wanted), (parameter.grad, wanted.grad)):
            mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
            torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5, msg=name)


side_stream = torch.cuda.Stream()
side_stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side_stream):
    net = distributed(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, target = data(0, rank)
    for step in range(12):  # DDP times its first eleven steps, with events
        x, target = data(step, rank)
        optimizer.zero_grad(set_to_none=True)
        loss_of(net, x, target).backward()
        optimizer.step()
        twin_step(step)
        assert_followed()
torch.cuda.current_stream().wait_stream(side_stream)

optimizer.zero_grad(set_to_none=True)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=side_stream, capture_error_mode="thread_local"):
    loss_of(net, x, target).backward()
    if STEP_IS_CAPTURED:
        optimizer.step()
assert in_a_pool_of_ours(graph) == (side == "ours")
for step in range(12, 18):
    for static, new in zip((x, target), data(step, rank), strict=True):
        static.copy_(new)
    graph.replay()
    if not STEP_IS_CAPTURED:
        optimizer.step()
    twin_step(step)
    assert_followed()
optimizer.zero_grad(set_to_none=True)
finish(graph)
"""

DDP = """
from torch.nn.parallel import DistributedDataParallel

STEP_IS_CAPTURED = True


def distributed(net):
    return DistributedDataParallel(net, device_ids=[rank])
"""

# Its parameters are sharded tensors, whose optimizer step asks the CPU for their layout: eager.
FSDP2 = """
from torch.distributed.fsdp import fully_shard

STEP_IS_CAPTURED = False


def distributed(net):
    for layer in net:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    return fully_shard(net)
"""


def wait_for_all(ranks: list[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """Their exit codes. When one has failed the other would wait for it for ever: it is killed."""
    end = time.monotonic() + seconds
    while None in (codes := [rank.poll() for rank in ranks]):
        if any(codes) or time.monotonic() > end:
            break
        time.sleep(0.1)
    for rank in ranks:
        rank.kill()
    return [rank.wait() for rank in ranks]


def run_two_ranks(folder: Path, program: str, side: Side, **environment: str) -> None:
    """As torchrun does: two processes of one program that find each other by their environment."""
    path = folder / "program.py"
    path.write_text(program)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "PYTHONPATH": python_path(),
        # What torch asks of those who capture DDP: its watchdog must not raise into a capture.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        # It writes down what buffers it is told of.
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "REG",
        **environment,
    }
    said = [folder / f"rank{rank}.txt" for rank in range(2)]
    ranks = []
    for rank, file in enumerate(said):
        with file.open("w") as output:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(path), side],
                    env={
                        **common,
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "NCCL_DEBUG_FILE": str(folder / f"nccl{rank}.txt"),
                    },
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    codes = wait_for_all(ranks, seconds=240)
    text = "\n".join(file.read_text() for file in said)
    assert codes == [0, 0], text
    # NCCL and torch.distributed have warnings of their own; nobody may speak of these.
    for bad in ("Traceback", "terminate called", "CUDA error", "cudagraph_pool"):
        assert bad not in text, text


@TWO_DEVICES
@REGISTERED
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(COLLECTIVES, id="collectives"),
        pytest.param(SHARED_EXECS, id="shared_execs"),
        pytest.param(
            DROPPED.replace("EXPORTABLE", "False"), id="dropped", marks=pytest.mark.whole_gpu
        ),
        pytest.param(
            DROPPED.replace("EXPORTABLE", "True"),
            id="dropped_exportable",
            marks=pytest.mark.whole_gpu,
        ),
        pytest.param(DDP + TRAINING, id="ddp"),
        pytest.param(FSDP2 + TRAINING, id="fsdp2"),
    ],
)
def test_two_ranks(program: str, registered: str, side: Side, tmp_path: Path) -> None:
    run_two_ranks(
        tmp_path,
        PRELUDE + RANKS + program,
        side,
        TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=registered,
    )


SPAWNED = """
def rank_of_two(rank, store):
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    enable()
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=2, device_id=device)
    x = torch.full((1 << 20,), rank + 1.0, device="cuda")
    dist.all_reduce(x.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x * 2
        dist.all_reduce(y)
    assert (tuple(graph.pool()) in ours(rank)) == (side == "ours")
    for step in range(3):
        x.fill_(rank + step)
        graph.replay()
        assert (y == 2 * (2 * step + 1)).all().item()
    torch.cuda.synchronize()
    graph.reset()
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch.multiprocessing

    torch.multiprocessing.spawn(rank_of_two, args=("file://" + sys.argv[2],), nprocs=2)
"""


@TWO_DEVICES
def test_spawned_ranks(side: Side, run: Run, tmp_path: Path) -> None:
    run_file(run, tmp_path, PRELUDE + SPAWNED, side, str(tmp_path / "store"))


# Native shares what graphs allocated. A page of ours may stand at several addresses and belong to
# several graphs at once, so that it is not shared, which it says; a copy is.
SHARED = """
def child(tensors, totals):
    enable()
    for _ in range(2):
        tensor = tensors.get()
        total = tensor.sum().item()
        del tensor
        torch.cuda.ipc_collect()
        totals.put(total)


if __name__ == "__main__":
    import gc

    import torch.multiprocessing

    enable()
    context = torch.multiprocessing.get_context("spawn")
    tensors, totals = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=child, args=(tensors, totals))
    process.start()
    graph, x, y = capture_and_check(side == "ours")
    x.fill_(4)
    graph.replay()
    torch.cuda.synchronize()
    if side == "ours":
        try:
            tensors.put(y)
        except RuntimeError as error:
            assert "cannot be shared with another process" in str(error), error
        else:
            raise AssertionError("shared memory of a pool")
        shared = y.clone()
    else:
        shared = y
    tensors.put(shared)
    assert totals.get() == 3 << 18
    # Eager memory is shared as ever, with graphs about.
    eager = torch.full((1000,), 5.0, device="cuda")
    tensors.put(eager)
    assert totals.get() == 5000
    process.join()
    assert process.exitcode == 0
    check(graph, x, y)
    # torch warns of what is still shared when the process ends.
    del shared, eager, graph, x, y
    gc.collect()
    torch.cuda.ipc_collect()
"""


def test_sharing_with_another_process(side: Side, run: Run, tmp_path: Path) -> None:
    run_file(run, tmp_path, PRELUDE + SHARED, side)
