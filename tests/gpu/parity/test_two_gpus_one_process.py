"""Two GPUs of one process: each reaches the other's pools, and uses what lies there."""

from __future__ import annotations

import pytest

from ..conftest import Run
from ..work import torch
from .conftest import Side
from .programs import PRELUDE

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

# torch asks for access between two devices once, and remembers the answer.
PEERS = """
WHEN, CASE = sys.argv[2], sys.argv[3]


def become_peers():
    a = torch.ones(1 << 20, device="cuda:0")
    b = a.to("cuda:1")
    a.copy_(b)
    for device in (0, 1):
        torch.cuda.synchronize(device)


if WHEN == "before enable":
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
if WHEN == "after the capture":
    become_peers()
(_, x0, y0), (_, _, y1) = kept
if CASE == "copy out":
    result, wanted = y0.to("cuda:1"), 2
elif CASE == "copy in":
    result, wanted = y1.copy_(x0), 1
elif CASE == "kernel reads":
    result, wanted = y0[:, ::2].to("cuda:1"), 2
elif CASE == "kernel writes":
    y1[:, ::2].copy_(x0[:, ::2])
    result, wanted = y1[:, ::2], 1
else:
    y1.zero_()
    result, wanted = y1.copy_(y0), 2
for device in (0, 1):
    torch.cuda.synchronize(device)
assert (result == wanted).all().item()
"""

# All memory from the C functions, of which torch tells nobody who their peers are.
PEERS_OF_THE_C_FUNCTIONS = """
if side == "ours":
    torch.cuda.memory.change_current_allocator(cgp.pluggable_allocator())
x0 = torch.rand(4, 1 << 20, device="cuda:0")
x1 = x0.to("cuda:1")
assert torch.equal(x0.cpu(), x1.cpu())
y1 = torch.zeros_like(x1)
y1[:, ::2].copy_(x0[:, ::2])
assert torch.equal(y1[:, ::2].cpu(), x0[:, ::2].cpu())
x0[:, 1::2].copy_(x1[:, ::2])
assert torch.equal(x0[:, 1::2].cpu(), x1[:, ::2].cpu())
"""

# The other GPU's work on a freed block goes on, behind which another graph wants the bytes.
RECORDED_STREAM = """
import gc

enable()
for device in (0, 1):
    torch.zeros(1, device=f"cuda:{device}").to(f"cuda:{1 - device}")
other = torch.cuda.default_stream(1) if sys.argv[2] == "default" else torch.cuda.Stream(1)
x = torch.full((8 << 20,), 3.0, device="cuda:0")
read = torch.zeros(8 << 20, device="cuda:1")
x * 2
for device in (0, 1):
    torch.cuda.synchronize(device)
torch.cuda.empty_cache()
allocated = torch.cuda.memory_allocated(0)
pool = torch.cuda.graph_pool_handle()


def capture(factor):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(capture_stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        y = x * factor
        graph.capture_end()
    return graph, y


capture_stream = torch.cuda.Stream(0)
first, y = capture(2)
with torch.cuda.stream(capture_stream):
    first.replay()
torch.cuda.synchronize(0)
with torch.cuda.stream(other):
    torch.cuda._sleep(500_000_000)
    read.copy_(y)  # on this GPU's current stream, when the other GPU has got there
y.record_stream(other)
del y
second, z = capture(5)
with torch.cuda.stream(capture_stream):
    second.replay()
for device in (0, 1):
    torch.cuda.synchronize(device)
assert (read == 6).all().item(), "overwritten before it was read"
assert (z == 15).all().item()

del z
for graph in (first, second):
    graph.reset()
gc.collect()
torch.cuda.empty_cache()
assert torch.cuda.memory_allocated(0) < allocated + (1 << 20)  # of the generator's
assert not ours()
"""


@pytest.mark.parametrize("when", ["before enable", "after the capture"])
@pytest.mark.parametrize(
    "case", ["copy out", "copy in", "kernel reads", "kernel writes", "pool to pool"]
)
def test_peers_reach_pools(case: str, when: str, side: Side, run: Run) -> None:
    run(PRELUDE + PEERS, side, when, case)


def test_peers_reach_what_the_c_functions_give(side: Side, run: Run) -> None:
    run(PRELUDE + PEERS_OF_THE_C_FUNCTIONS, side)


@pytest.mark.parametrize("stream", ["default", "its own"])
def test_a_stream_of_the_other_gpu_holds_what_it_uses(stream: str, side: Side, run: Run) -> None:
    run(PRELUDE + RECORDED_STREAM, side, stream)
