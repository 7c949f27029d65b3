"""Random programs on several streams, with delays: captured, replayed, and their sums compared with
what eager runs make and with what the programs say.

A wrong reuse is caught twice: by the sums, if the delays let it show, and by an oracle that looks
at where the tensors lie.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from stream_oracle import Piece, sharing, taken_too_early
from stream_programs import Configuration, generate

import cudagraph_pool as cgp

from .shared import Driver
from .work import torch

if TYPE_CHECKING:
    from _stream_work import StreamPrograms
else:
    StreamPrograms = pytest.importorskip("_stream_work", reason="needs torch").StreamPrograms

pytestmark = pytest.mark.usefixtures("enabled")

STREAMS = pytest.mark.parametrize("streams", [2, 3, 4, 8])


class Programs:
    """Programs of one configuration, and the stream that captures them."""

    def __init__(self, streams: int, count: int, seed: int = 0, operations: int = 120) -> None:
        made = Configuration(
            streams,
            operations,
            alloc=0.4,
            free=0.4,
            join=0.2,
            smallest=512,
            largest=4 << 20,
            unrecorded=0.3,
            delay=0.2,
            delay_cycles=60_000,
        )
        device = torch.device("cuda", torch.cuda.current_device())
        programs = [generate(made, seed + number) for number in range(count)]
        self.work = StreamPrograms(device, programs)
        self.keys = range(count)
        # torch hands out 32 streams in turn: those of one object differ.
        self.stream = torch.cuda.Stream()
        self.run_eagerly(0)  # loads the kernels

    def run_eagerly(self, key: int) -> list[torch.Tensor]:
        """Sums that no graph made."""
        self.work.clear(key)
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            self.work.step(key)
        torch.cuda.synchronize()
        return [sums.clone() for sums in self.work.outputs(key)]

    def capture(self, key: int, pool: cgp.GraphPool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool.id, stream=self.stream):
            self.work.step(key)
        return graph

    def replay(self, key: int, graph: torch.cuda.CUDAGraph) -> list[torch.Tensor]:
        self.work.clear(key)
        graph.replay()
        torch.cuda.synchronize()
        return self.work.outputs(key)


def assert_same(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor], what: str) -> None:
    for stream, (sums, wanted) in enumerate(zip(found, right, strict=True)):
        wrong = int(torch.count_nonzero(sums != wanted))
        assert wrong == 0, f"{what}: {wrong} wrong sums of stream {stream}"


@STREAMS
def test_replays_are_what_eager_runs_are(streams: int) -> None:
    programs = Programs(streams, count=80)
    for key in programs.keys:
        right = programs.work.expected(key)
        assert_same(programs.run_eagerly(key), right, f"eager run of program {key}")
        pool = cgp.GraphPool()
        graph = programs.capture(key, pool)
        stats = pool.stats()
        assert stats["live_blocks"] == 0
        assert stats["peak_allocated_bytes"] == programs.work.program(key).peak_bytes()
        for turn in range(3):
            found = programs.replay(key, graph)
            assert_same(found, right, f"replay {turn} of program {key} on {streams} streams")
        graph.reset()
        pool.close()


@STREAMS
def test_no_memory_is_taken_before_its_users_are_done(streams: int) -> None:
    """By the graph alone, whatever the times of a replay are."""
    programs = Programs(streams, count=25, seed=1000)
    work = programs.work
    shared = 0
    for key in programs.keys:
        pool = cgp.GraphPool()
        pieces: dict[int, list[Piece]] = {}

        def allocate(
            elements: int, pool: cgp.GraphPool = pool, pieces: dict[int, list[Piece]] = pieces
        ) -> torch.Tensor:
            tensor = work.empty(elements)
            blocks = {block["address"]: block for block in pool.snapshot()["blocks"]}
            pieces[len(pieces)] = blocks[tensor.data_ptr()]["pieces"]
            return tensor

        work.allocate = allocate
        graph = programs.capture(key, pool)
        work.allocate = work.empty
        program = work.program(key)
        assert len(pieces) == len(program.elements)
        assert taken_too_early(program, pieces) == [], f"program {key} on {streams} streams"
        shared += sum(program.owners[a] != program.owners[b] for a, b in sharing(pieces))
        graph.reset()
        pool.close()
    assert shared > len(programs.keys)  # across streams: else this would prove little


@pytest.mark.parametrize("streams", [2, 8])
def test_graphs_of_one_pool(streams: int) -> None:
    """What one capture frees, on whatever stream, later ones take on any."""
    programs = Programs(streams, count=30, seed=2000)
    pool = cgp.GraphPool()
    right = {key: programs.work.expected(key) for key in programs.keys}
    graphs = {key: programs.capture(key, pool) for key in programs.keys}
    peak = max(programs.work.program(key).peak_bytes() for key in programs.keys)
    assert pool.stats()["peak_allocated_bytes"] == peak
    order = list(programs.keys) * 3
    random.Random(streams).shuffle(order)
    for key in order:
        assert_same(programs.replay(key, graphs[key]), right[key], f"program {key}")


@STREAMS
def test_graphs_and_memory_against_stock(streams: int) -> None:
    """Reuse adds no node and no edge, and no program reserves more than stock reserves."""
    programs = Programs(streams, count=12, seed=3000)

    def captured(key: int, pool: tuple[int, int]) -> tuple[tuple[int, int], int]:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, pool=pool, stream=programs.stream):
            programs.work.step(key)
        shown = torch.cuda.memory_snapshot()
        segments = [s for s in shown if tuple(s["segment_pool_id"]) == tuple(pool)]
        return Driver().shape(graph), sum(s["total_size"] for s in segments)

    ours = []
    for key in programs.keys:
        pool = cgp.GraphPool()
        shape, _ = captured(key, pool.id)
        ours.append((shape, pool.stats()["peak_reserved_bytes"]))
        pool.close()
        assert shape[0] == programs.work.program(key).nodes
    cgp.disable()
    try:
        stock = [captured(key, torch.cuda.graph_pool_handle()) for key in programs.keys]
    finally:
        cgp.enable()
    assert [shape for shape, _ in ours] == [shape for shape, _ in stock]
    for key, ((_, reserved), (_, of_stock)) in enumerate(zip(ours, stock, strict=True)):
        assert reserved <= of_stock, f"program {key} on {streams} streams"
    assert sum(reserved for _, reserved in ours) < 0.9 * sum(of_stock for _, of_stock in stock)
