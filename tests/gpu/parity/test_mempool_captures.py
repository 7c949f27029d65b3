"""Captures into torch.cuda.MemPools, and MemPools inside captures."""

from __future__ import annotations

import gc

from ..work import capture_chain, chain, fresh, torch
from .conftest import Side
from .memory import ids, inside, new_bytes, settle


def test_a_mem_pool_collected_in_the_middle_of_a_capture(side: Side) -> None:
    """Stock aborts: captures_underway.empty() (transformers#48312)."""
    if side == "native":
        return
    settle()
    before = torch.cuda.memory_reserved()
    into, beside = torch.cuda.MemPool(), torch.cuda.MemPool()
    into_id, beside_id = into.id, beside.id
    with torch.cuda.use_mem_pool(beside):
        new_bytes(8)
    x = fresh(512, seed=0)
    chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=into_id):
        y = chain(x)
        del into, beside
        gc.collect()
        y = chain(y)
    settle()
    assert tuple(beside_id) not in ids()
    x.copy_(fresh(512, seed=1))
    graph.replay()
    assert torch.equal(y, chain(chain(x)))
    del graph, y, x
    settle()
    assert ids() == []
    assert torch.cuda.memory_reserved() <= before


def test_memory_of_a_mem_pool_inside_a_capture_is_kept_for_the_graph(side: Side) -> None:
    """Also when the MemPool, and all tensors in it, are gone. Stock aborts in the capture."""
    if side == "native":
        return
    x = fresh(512, seed=0)
    out = torch.zeros_like(x)
    chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            out.copy_(chain(x) + 1)
        del pool
    settle()
    taken = [new_bytes(2, 9) for _ in range(64)]
    x.copy_(fresh(512, seed=1))
    graph.replay()
    assert torch.equal(out, chain(x) + 1)
    assert all(int(t.min()) == int(t.max()) == 9 for t in taken)
    del graph
    settle()
    assert ids() == []


def test_scratch_of_flashinfer_outlives_the_graph_that_made_it(side: Side) -> None:
    """By its order of calls (0.7.4, flashinfer/utils.py: _get_stream_cache_buf): a stream's buffer
    is made in a MemPool where it is missing, be it in a capture, and later captures find it.
    """
    settle()
    before = torch.cuda.memory_reserved()
    mem_pool, stream = torch.cuda.MemPool(), torch.cuda.Stream()
    pool = torch.cuda.graph_pool_handle()
    inputs, outputs = [fresh(512, seed=0)], [fresh(512, seed=1), fresh(512, seed=2)]
    chain(inputs[0])
    torch.cuda.synchronize()
    graphs: list[torch.cuda.CUDAGraph] = []
    for output in outputs:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=pool, stream=stream):
            y = chain(inputs[0])
            if len(graphs) == 1:
                with torch.cuda.use_mem_pool(mem_pool, device=0):
                    buffer = torch.zeros_like(y)
            buffer.copy_(y)
            del y
            torch.cat([*inputs, *inputs]).fill_(-1)  # takes what was freed just now
            output.copy_(buffer + len(graphs))
    assert inside(buffer, mem_pool.id)
    assert not inside(buffer, pool)

    def replay(*numbers: int) -> None:
        for seed, number in enumerate(numbers, start=3):
            inputs[0].copy_(fresh(512, seed=seed))
            graphs[number].replay()
            assert torch.equal(outputs[number], chain(inputs[0]) + (number + 1))

    replay(0, 1, 1, 0)
    graphs[0].reset()  # in whose capture the buffer was made
    settle()
    taken = [new_bytes(2, 9) for _ in range(64)]
    replay(1, 1)
    buffer.fill_(5)  # eager work has it too
    assert all(int(t.min()) == int(t.max()) == 9 for t in taken)
    graphs.clear()
    settle()
    assert inside(buffer, mem_pool.id)
    assert (buffer == 5).all().item()
    del buffer, mem_pool, taken, output
    inputs.clear()
    outputs.clear()
    settle()
    assert ids() == []
    assert torch.cuda.memory_reserved() <= before


def test_captured_into_again_after_its_last_graph(side: Side) -> None:
    pool = torch.cuda.MemPool()
    for seed in range(3):
        captured = capture_chain(512, pool.id)
        x = fresh(512, seed=seed)
        assert torch.equal(captured.replay(x), chain(x))
        del captured
        gc.collect()
        assert pool.use_count() == 1
    if side == "native":  # the next asserts use_count > 0 (vllm#53679)
        return
    pool_id = pool.id
    del pool
    for seed in range(2):
        captured = capture_chain(512, pool_id)
        x = fresh(512, seed=seed)
        assert torch.equal(captured.replay(x), chain(x))
        del captured
        settle()
