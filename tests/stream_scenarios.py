"""Small programs on three or four streams, and what an allocator may do at the last tensor."""

from __future__ import annotations

from dataclasses import dataclass

from stream_programs import ELEMENT_BYTES, Kind, Op, Program

MIB = 1 << 20

# Stream 0 begins the capture, 1 and 2 are forked from it before all else, 3 is not.
MAIN, SIDE, THIRD, LATE = range(4)

_DELAY_CYCLES = 2_000_000  # about a millisecond: whatever is started early is early


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens between fork and join, and what the last allocation finds.

    Attributes:
        name (str): what it shows.
        steps (str): ``a0 m`` allocates and writes tensor 0 on the main stream, ``r0 s`` reads it on
            the side stream, late if it is ``R0 s``; ``u0 s`` records it for the side stream;
            ``f0`` frees it; ``w m s``: main waits for side; ``k m``: a kernel without tensors.
            Streams are m, s, t (third) and l (late).
        reserved_mib (int): what the pool reserves in the end.
        sizes_mib (tuple): of each tensor.
    """

    name: str
    steps: str
    reserved_mib: int
    sizes_mib: tuple[int, ...] = (8, 8)

    @property
    def is_shared(self) -> bool:
        """Whether the last tensor may have memory of tensor 0."""
        return self.reserved_mib < sum(self.sizes_mib)

    def program(self) -> Program:
        ops = [Op(Kind.START, MAIN, -1, -1)]
        for stream in (SIDE, THIRD):
            ops += [Op(Kind.WAIT, stream, -1, MAIN), Op(Kind.START, stream, -1, -1)]
        owners: dict[int, int] = {}
        streams = {MAIN, SIDE, THIRD}
        for step in self.steps.split(", "):
            what, *names = step.split()
            on = ["mstl".index(name) for name in names]
            ops += _ops(what, on, owners)
            if on and on[0] not in streams:
                streams.add(on[0])
                ops.append(Op(Kind.START, on[0], -1, -1))
        ops += [Op(Kind.WAIT, MAIN, -1, stream) for stream in sorted(streams - {MAIN})]
        elements = tuple(mib * MIB // ELEMENT_BYTES for mib in self.sizes_mib)
        return Program(
            len(streams), tuple(ops), elements, tuple(owners[t] for t in range(len(elements)))
        )


def _ops(what: str, on: list[int], owners: dict[int, int]) -> list[Op]:
    late = [Op(Kind.DELAY, on[0], -1, _DELAY_CYCLES)] if what[0].isupper() else []
    tensor = int(what[1:]) if what[1:] else -1
    match what[0].lower():
        case "a":
            owners[tensor] = on[0]
            return [Op(Kind.ALLOC, on[0], tensor, -1)]
        case "r":
            return [*late, Op(Kind.READ, on[0], tensor, -1)]
        case "u":
            return [Op(Kind.RECORD, on[0], tensor, -1)]
        case "f":
            return [Op(Kind.FREE, owners[tensor], tensor, -1)]
        case "w":
            return [Op(Kind.WAIT, on[0], -1, on[1])]
        case "k":
            return [Op(Kind.PLAIN, on[0], -1, -1)]
    raise ValueError(what)


# What a graph that CUDA captured must tell: cgp_fuzz --captures judges what follows from it.
SCENARIOS = (
    Scenario("same stream", "a0 m, R0 m, f0, a1 m, r1 m", 8),
    Scenario("another stream that waited", "a0 m, R0 m, f0, w s m, a1 s, r1 s", 8),
    Scenario("another stream that did not wait", "a0 m, R0 m, f0, a1 s, r1 s", 16),
    Scenario("a stream that joined the capture late", "a0 m, R0 m, f0, w l m, a1 l, r1 l", 8),
    Scenario("recorded, not waited for", "a0 m, w s m, R0 s, u0 s, f0, a1 m, r1 m", 16),
    Scenario(
        "recorded, waited after the free", "a0 m, w s m, R0 s, u0 s, f0, w m s, a1 m, r1 m", 8
    ),
    Scenario("not recorded but waited for", "a0 m, w s m, R0 s, w m s, f0, a1 m, r1 m", 8),
    Scenario("a third behind the reader", "a0 m, w s m, R0 s, u0 s, f0, w t s, a1 t, r1 t", 8),
    Scenario(
        "through another stream", "a0 m, w s m, R0 s, u0 s, f0, w t s, k t, w m t, a1 m, r1 m", 8
    ),
    Scenario(
        "through a node's second predecessor", "a0 s, R0 s, f0, w t m, w t s, k t, w m t, a1 m", 8
    ),
    Scenario(
        "proven only later",
        "a0 m, w s m, R0 s, u0 s, f0, k m, k m, a1 m, w m s, a2 m, r1 m, r2 m",
        16,
        sizes_mib=(8, 8, 8),
    ),
    Scenario(
        "two streams' memory, one of them proven",
        "a0 m, R0 m, f0, a1 s, R1 s, f1, w t m, a2 t, r2 t",
        12,
        sizes_mib=(4, 4, 8),
    ),
)
