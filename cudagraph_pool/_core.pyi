"""The allocator's core on numbers: the same decisions as on a GPU, without torch, driver or GPU.

Sizes and addresses are bytes. A pool is named by a pair of integers, as torch names its graph
pools. Every call may be made from any thread, and one that raises has changed nothing.
"""

from enum import Enum

__version__: str  # with what a build holds, where that is not everything: "0.1.0+torch2.11"

PoolId = tuple[int, int]

class UsageError(RuntimeError):
    """What was asked for is not allowed: an unknown or released pool, a double free, a scope begun
    twice.
    """

class OutOfMemoryError(MemoryError):
    """Physical memory ran out. Freeing some and asking again may succeed."""

class DriverError(RuntimeError):
    """A call of the driver failed; the text says which, and why."""

class InternalError(RuntimeError):
    """An invariant of the core does not hold: a bug of this package."""

class NumberDriver:
    """Counts memory and addresses: numbers with nothing behind them.

    Args:
        device (int): the device number it answers with.
        granularity (int): size and alignment of what can be mapped, a power of two.
        physical_limit_bytes (int): how much memory it has.
        address_limit_bytes (int): how many addresses it has.
    """

    def __init__(
        self,
        *,
        device: int = ...,
        granularity: int = ...,
        physical_limit_bytes: int = ...,
        address_limit_bytes: int = ...,
    ) -> None: ...
    @property
    def device(self) -> int: ...
    @property
    def granularity(self) -> int: ...
    def info(self) -> tuple[int, int]:
        """Free and total physical bytes."""

class ScopeKind(Enum):
    """Whether the streams that allocate are capturing a graph, or run what is submitted at once."""

    CAPTURE = ...
    EAGER = ...

class Block:
    """What one allocation got: the addresses ``[address, address + bytes)``."""

    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def requested_bytes(self) -> int: ...
    @property
    def stream(self) -> int: ...

class PoolStats:
    """Counters of one pool; see ``csrc/core/pool.h``."""

    @property
    def page_bytes(self) -> int: ...
    @property
    def pages(self) -> int: ...
    @property
    def reserved_bytes(self) -> int: ...
    @property
    def allocated_bytes(self) -> int: ...
    @property
    def requested_bytes(self) -> int: ...
    @property
    def live_blocks(self) -> int: ...
    @property
    def peak_reserved_bytes(self) -> int: ...
    @property
    def peak_allocated_bytes(self) -> int: ...
    @property
    def scope_peak_bytes(self) -> int: ...
    @property
    def ranges(self) -> int: ...
    @property
    def page_mappings(self) -> int: ...
    @property
    def allocations(self) -> int: ...
    @property
    def frees(self) -> int: ...
    @property
    def asleep(self) -> bool: ...
    @property
    def away_bytes(self) -> int: ...
    @property
    def lent_bytes(self) -> int: ...
    @property
    def unnamed_captures(self) -> int: ...

class LiveBlock:
    """A block and the physical bytes behind it: (page, offset, length), in the order of its
    addresses.
    """

    @property
    def block(self) -> Block: ...
    @property
    def pieces(self) -> list[tuple[int, int, int]]: ...

class Range:
    """Consecutive addresses and the pages mapped behind them, in that order."""

    @property
    def address(self) -> int: ...
    @property
    def pages(self) -> list[int]: ...

class PoolSnapshot:
    @property
    def stats(self) -> PoolStats: ...
    @property
    def blocks(self) -> list[LiveBlock]: ...
    @property
    def ranges(self) -> list[Range]: ...

class PoolSet:
    """All pools of one device; see ``csrc/core/pool_set.h`` for what each member promises.

    Args:
        driver (NumberDriver): what the set asks for memory; kept alive by the set.
        page_bytes (int): size of a page, a power-of-two multiple of the driver's granularity; 0
            means the granularity.
    """

    def __init__(self, driver: NumberDriver, *, page_bytes: int = 0) -> None: ...
    def retain(self, id: PoolId, /) -> None:
        """Holds a pool open, creating it if need be, and adds one user to it."""

    def begin_scope(self, id: PoolId, kind: ScopeKind, /) -> None:
        """Begins allocating to a pool, creating it if need be, and adds one user to it."""

    def end_scope(self, id: PoolId, /) -> None:
        """Ends the pool's scope; its user stays."""

    def release(self, id: PoolId, /) -> None:
        """Takes one user of the pool away."""

    def allocate(self, id: PoolId, bytes: int, stream: int, /) -> Block:
        """A block of at least ``bytes`` for work on ``stream``; a scope must be open."""

    def free(self, address: int, /) -> None:
        """Frees the block that starts at ``address``."""

    def record_use(self, address: int, stream: int, /) -> None:
        """Notes that ``stream`` uses the block that starts at ``address`` too."""

    def find(self, address: int, /) -> Block | None:
        """The live block that holds ``address``."""

    def pieces(self, address: int, /) -> list[tuple[int, int, int]]:
        """The physical bytes behind the block that starts at ``address``: (page, offset, length) by
        address.
        """

    def trim(self) -> int:
        """Gives back the memory of pools without users and live blocks; returns the bytes given
        back.
        """

    def trimmable_bytes(self) -> int:
        """What :meth:`trim` would give back."""

    def contains(self, id: PoolId, /) -> bool:
        """Whether the pool is known."""

    def use_count(self, id: PoolId, /) -> int:
        """How many users the pool has; 0 for an unknown pool."""

    def ids(self) -> list[PoolId]:
        """The pools that are known."""

    def stats(self, id: PoolId, /) -> PoolStats:
        """Counters of one pool."""

    def snapshot(self, id: PoolId, /) -> PoolSnapshot:
        """Everything that is live and mapped in one pool."""

    def captures(self, id: PoolId, /) -> list[dict[str, int]]:
        """What each capture scope took that has ended, oldest first: the last 65,536. The keys are
        the members of ``CaptureStats`` in ``csrc/core/pool.h``.
        """

    def check(self) -> None:
        """Recomputes every invariant; raises :class:`InternalError` if one does not hold."""
