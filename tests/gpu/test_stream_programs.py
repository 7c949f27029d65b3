"""Random programs on several streams, with delays: captured, replayed, and their sums compared with
what eager runs make and with what the programs say.

A wrong reuse is caught twice: by the sums, if the delays let it show, and by an oracle that looks
at where the tensors lie.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from stream_oracle import Piece, sharing, taken_too_early
from stream_programs import Configuration, generate

import cudagraph_pool as cgp

from .graph_shape import GraphShape, shape_of
from .work import adapter, torch

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

    def shape(self, key: int, pool: tuple[int, int]) -> GraphShape:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, pool=pool, stream=self.stream):
            self.work.step(key)
        return shape_of(graph)

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
    ours, stock = [], []
    for key in programs.keys:
        pool = cgp.GraphPool()
        shape = programs.shape(key, pool.id)
        ours.append((shape, pool.stats()["peak_reserved_bytes"]))
        pool.close()
        assert shape.nodes == programs.work.program(key).nodes
    cgp.disable()
    try:
        for key in programs.keys:
            handle = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph, pool=handle, stream=programs.stream):
                programs.work.step(key)
            reserved = sum(
                segment["total_size"]
                for segment in torch.cuda.memory_snapshot()
                if tuple(segment["segment_pool_id"]) == tuple(handle)
            )
            stock.append((shape_of(graph), reserved))
            del graph
    finally:
        cgp.enable()
    assert [shape for shape, _ in ours] == [shape for shape, _ in stock]
    for key, ((_, reserved), (_, of_stock)) in enumerate(zip(ours, stock, strict=True)):
        assert reserved <= of_stock, f"program {key} on {streams} streams"
    assert sum(reserved for _, reserved in ours) < 0.9 * sum(of_stock for _, of_stock in stock)


def test_captures_at_once_in_threads() -> None:
    """Each on several streams, into a pool of its own; none sees what another's graph proves."""
    count = 3
    all_programs = [Programs(3, count=1, seed=4000 + number) for number in range(count)]
    pools = [cgp.GraphPool() for _ in range(count)]
    graphs = [torch.cuda.CUDAGraph() for _ in range(count)]
    together = threading.Barrier(count, timeout=60)
    # Begin and end change what graphs of torch share, its random number generator's state.
    one_at_a_time = threading.Lock()
    errors: list[BaseException] = []

    def capture(number: int) -> None:
        try:
            with torch.cuda.stream(all_programs[number].stream):
                together.wait()
                with one_at_a_time:
                    graphs[number].capture_begin(
                        pool=pools[number].id, capture_error_mode="thread_local"
                    )
                together.wait()
                all_programs[number].work.step(0)
                together.wait()
                with one_at_a_time:
                    graphs[number].capture_end()
        except BaseException as error:
            errors.append(error)
            together.abort()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=capture, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for number, programs in enumerate(all_programs):
        program = programs.work.program(0)
        assert pools[number].stats()["allocations"] == len(program.elements)
        for turn in range(3):
            found = programs.replay(0, graphs[number])
            assert_same(found, programs.work.expected(0), f"thread {number}, replay {turn}")


def test_a_long_program_finds_again_what_it_freed() -> None:
    """Though nearly all of it was recorded for other streams."""
    programs = Programs(4, count=1, seed=5000, operations=2_000)
    pool = cgp.GraphPool()
    graph = programs.capture(0, pool)
    program = programs.work.program(0)
    everything = sum(-(-elements * 4 // 512) * 512 for elements in program.elements)
    reserved = pool.stats()["reserved_bytes"]
    assert reserved < 2 * program.peak_bytes()
    assert reserved < everything / 4
    assert_same(programs.replay(0, graph), programs.work.expected(0), "the long program")
    assert tuple(graph.pool()) in adapter.pool_ids(torch.cuda.current_device())
