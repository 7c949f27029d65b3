"""Which launch comes before which: streams, events and waits as vector clocks.

After Lamport, "Time, clocks, and the ordering of events in a distributed system" (1978), and
Mattern, "Virtual time and global states of distributed systems" (1989). Needs no torch.
"""

from collections import defaultdict

# Of each stream the number of launches that are known to be done.
_Clock = dict[int, int]


class HappensBefore:
    """Knows which launches a stream comes after. A loop that queries an event orders nothing."""

    def __init__(self) -> None:
        self._launches: _Clock = {}
        self._streams: defaultdict[int, _Clock] = defaultdict(dict)
        self._events: dict[int, _Clock] = {}
        self._host: _Clock = {}  # what is done once the host has come so far

    def launch(self, stream: int) -> int:
        """Something is launched, behind all that the stream has and the host has waited for.
        Returns the how manieth it is of the stream.
        """
        _advance(self._streams[stream], self._host)
        number = self._launches.get(stream, 0) + 1
        self._launches[stream] = self._streams[stream][stream] = number
        return number

    def comes_after(self, stream: int, other: int, number: int) -> bool:
        """Whether what the stream gets next comes after that launch of the other one."""
        return any(number <= clock.get(other, 0) for clock in (self._streams[stream], self._host))

    def record(self, event: int, stream: int) -> None:
        """The event marks what the stream has now."""
        _advance(self._streams[stream], self._host)
        self._events[event] = dict(self._streams[stream])

    def wait(self, event: int, stream: int) -> None:
        """What the stream gets next comes after the event."""
        _advance(self._streams[stream], self._events.get(event, {}))

    def forget(self, event: int) -> None:
        """The event is gone, and another one may get its name."""
        self._events.pop(event, None)

    def synchronize_event(self, event: int) -> None:
        _advance(self._host, self._events.get(event, {}))

    def synchronize_stream(self, stream: int) -> None:
        _advance(self._host, self._streams[stream])

    def synchronize_device(self) -> None:
        _advance(self._host, self._launches)


def _advance(clock: _Clock, other: _Clock) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number
