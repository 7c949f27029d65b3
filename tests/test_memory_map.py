"""Which bytes of a pool a block had: of a replay, and of this process by torch's memory history."""

from __future__ import annotations

from small_trace import WriteTrace, as_adapter

from cudagraph_pool import _core
from cudagraph_pool.tools.costs import of_trace
from cudagraph_pool.tools.memory_map import Operation, joined, map_of_history, operation_of
from cudagraph_pool.tools.replay import POOL
from cudagraph_pool.tools.trace import read_trace

PAGE = 2 << 20


def test_map_of_a_replay(write_trace: WriteTrace) -> None:
    """The small trace has eight operations: 0 and 1 (freed at once), 0 freed, 2, 3 ..."""
    drawn = of_trace(read_trace(write_trace()), maps=True).map
    assert drawn is not None
    assert drawn.operations == 8
    assert [(placed.born, placed.died) for placed in drawn.placed] == [
        (0, 3),
        (1, 2),
        (4, 7),
        (5, 6),
    ]
    sizes = [sum(end - begin for begin, end in placed.stretches) for placed in drawn.placed]
    assert sizes == [512, 3 << 20, 1024, 512]


def test_a_history_makes_the_map_that_the_replay_made() -> None:
    """Addresses and the ranges of a snapshot say where a block lay, also when it is gone."""
    pools = _core.PoolSet(_core.NumberDriver())
    operations = [Operation(7, 512), Operation(7, 0)]  # of other pools
    expected = []
    pools.begin_scope(POOL, _core.ScopeKind.CAPTURE)
    live: list[int] = []
    for n, size in enumerate([3 * PAGE, 100, PAGE // 2, 5 * PAGE, PAGE + 512, 7 * PAGE]):
        block = pools.allocate(POOL, size, 1)
        operations.append(Operation(block.address, size))
        expected.append(
            joined([(page * PAGE + begin, n) for page, begin, n in pools.pieces(block.address)])
        )
        live.append(block.address)
        if n % 2:
            operations.append(Operation(live[n - 1], 0))
            pools.free(live[n - 1])
    snapshot = pools.snapshot(POOL)
    drawn = map_of_history(operations, as_adapter(snapshot))
    assert [placed.stretches for placed in drawn.placed] == expected
    assert any(len(stretches) > 1 for stretches in expected)
    assert [placed.died for placed in drawn.placed] == [2, None, 5, None, 8, None]
    assert drawn.first_allocation == 0


def test_what_an_entry_says() -> None:
    of = {"alloc": Operation(8, 16), "free_requested": Operation(8, 0), "free_completed": None}
    for action, found in of.items():
        assert operation_of({"action": action, "addr": 8, "size": 16}) == found
