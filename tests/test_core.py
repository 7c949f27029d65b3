"""The bindings of the core: each call reaches it, each error arrives as its own exception."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cudagraph_pool import _core
from cudagraph_pool._core import NumberDriver, PoolSet, ScopeKind

PAGE = 2 << 20
POOL = (0, 1)
OTHER = (0, 2)


@pytest.fixture
def pools() -> Iterator[PoolSet]:
    """A set with an open capture scope of POOL; checked at the end."""
    pools = PoolSet(NumberDriver(physical_limit_bytes=64 * PAGE))
    pools.begin_scope(POOL, ScopeKind.CAPTURE)
    yield pools
    pools.check()


def test_stats_and_snapshot(pools: PoolSet) -> None:
    blocks = [pools.allocate(POOL, size, 0) for size in (100, 3 * PAGE, 5000)]
    pools.free(blocks[2].address)
    stats = pools.stats(POOL)
    assert stats.page_bytes == PAGE
    assert stats.reserved_bytes == stats.pages * PAGE == stats.peak_reserved_bytes
    assert stats.allocated_bytes == 512 + 3 * PAGE
    assert stats.peak_allocated_bytes == 512 + 3 * PAGE + 5120
    assert stats.requested_bytes == 100 + 3 * PAGE
    assert (stats.live_blocks, stats.allocations, stats.frees) == (2, 3, 1)
    assert stats.ranges >= 1
    assert stats.page_mappings >= stats.pages  # one page each in a pool as small as this

    snapshot = pools.snapshot(POOL)
    assert snapshot.stats.reserved_bytes == stats.reserved_bytes
    addresses = [live.block.address for live in snapshot.blocks]
    assert addresses == sorted(block.address for block in blocks[:2])
    for live in snapshot.blocks:
        assert live.pieces == pools.pieces(live.block.address)
        assert sum(length for _, _, length in live.pieces) == live.block.bytes
    mapped = [page for mapped in snapshot.ranges for page in mapped.pages]
    assert len(mapped) == stats.page_mappings
    assert set(mapped) == set(range(stats.pages))
    assert all(mapped.address % PAGE == 0 for mapped in snapshot.ranges)


def test_life_of_a_pool(pools: PoolSet) -> None:
    block = pools.allocate(POOL, PAGE, 0)
    pools.retain(OTHER)
    assert pools.ids() == [POOL, OTHER]
    assert (pools.use_count(POOL), pools.use_count(OTHER)) == (1, 1)
    pools.end_scope(POOL)
    pools.release(POOL)
    assert pools.trimmable_bytes() == 0  # the block lives
    pools.free(block.address)
    reserved = pools.stats(POOL).reserved_bytes
    assert reserved > 0
    assert pools.trimmable_bytes() == reserved
    assert pools.trim() == reserved
    assert not pools.contains(POOL)
    assert pools.contains(OTHER)
    assert pools.use_count(POOL) == 0


def test_usage_errors_name_what_is_wrong(pools: PoolSet) -> None:
    block = pools.allocate(POOL, 100, 0)
    before = pools.stats(POOL)
    cases: dict[str, Callable[[], object]] = {
        "(5, 6)": lambda: pools.allocate((5, 6), 100, 0),
        "already being allocated to": lambda: pools.begin_scope(POOL, ScopeKind.CAPTURE),
        hex(block.address + 512): lambda: pools.free(block.address + 512),
        hex(12347): lambda: pools.pieces(12347),
        "0 bytes": lambda: pools.allocate(POOL, 0, 0),
    }
    for words, call in cases.items():
        with pytest.raises(_core.UsageError) as caught:
            call()
        assert words in str(caught.value)
        assert isinstance(caught.value, RuntimeError)
    pools.free(block.address)
    with pytest.raises(_core.UsageError, match=hex(block.address)):
        pools.free(block.address)
    assert pools.stats(POOL).reserved_bytes == before.reserved_bytes
    assert not pools.contains((5, 6))


def test_out_of_memory_names_the_size_and_changes_nothing(pools: PoolSet) -> None:
    pools.allocate(POOL, PAGE, 0)
    before = pools.stats(POOL)
    with pytest.raises(_core.OutOfMemoryError) as caught:
        pools.allocate(POOL, 64 * PAGE, 0)
    assert isinstance(caught.value, MemoryError)
    assert str(64 * PAGE) in str(caught.value)
    after = pools.stats(POOL)
    assert (after.pages, after.page_mappings) == (before.pages, before.page_mappings)
    pools.allocate(POOL, 62 * PAGE, 0)


def test_driver_error_names_the_call() -> None:
    pools = PoolSet(NumberDriver(address_limit_bytes=PAGE, physical_limit_bytes=64 * PAGE))
    pools.begin_scope(POOL, ScopeKind.CAPTURE)
    with pytest.raises(_core.DriverError, match=r"Reserve.*device 0") as caught:
        pools.allocate(POOL, 32 * PAGE, 0)
    assert isinstance(caught.value, RuntimeError)
    pools.check()


def test_options_of_the_driver() -> None:
    driver = NumberDriver(device=3, granularity=64 << 10, physical_limit_bytes=1 << 20)
    assert (driver.device, driver.granularity) == (3, 64 << 10)
    assert driver.info() == (1 << 20, 1 << 20)
    pools = PoolSet(driver, page_bytes=128 << 10)
    pools.begin_scope(POOL, ScopeKind.CAPTURE)
    pools.allocate(POOL, 1, 0)
    assert driver.info() == ((1 << 20) - (128 << 10), 1 << 20)
    with pytest.raises(_core.UsageError, match="1000"):
        NumberDriver(granularity=1000)
    with pytest.raises(_core.UsageError, match="3000"):
        PoolSet(driver, page_bytes=3000).begin_scope(POOL, ScopeKind.CAPTURE)


@pytest.mark.parametrize("size", [-1, 1 << 64, 1.5, "1", None])
def test_sizes_that_are_no_sizes(pools: PoolSet, size: object) -> None:
    with pytest.raises(TypeError):
        pools.allocate(POOL, size, 0)  # type: ignore[arg-type]


def test_stub_describes_the_module() -> None:
    """Names of the stub and of the module are the same, in each class too."""
    stub = Path(_core.__file__).parent / "_core.pyi"
    tree = ast.parse(stub.read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    assert set(classes) == {name for name, value in vars(_core).items() if isinstance(value, type)}
    for name, node in classes.items():
        described = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        real = {member for member in vars(getattr(_core, name)) if not member.startswith("_")}
        if name == "ScopeKind":
            assert {"CAPTURE", "EAGER"} <= real
        else:
            assert described - {"__init__"} == real, name
