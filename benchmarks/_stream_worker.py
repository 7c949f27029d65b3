"""One process of multi_stream.py: random programs under one allocator.

Takes commands as JSON lines, answers likewise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from _worker import answers_alone, require_settings, serve
from stream_programs import by_name

if TYPE_CHECKING:
    from _stream_captures import StreamCaptures


class StreamServer:
    """The commands. ``key`` is the number of a program: that of its configuration times the number
    of seeds, plus that of its seed.
    """

    def __init__(self, names: Sequence[str], seeds: Sequence[int], allocator: str) -> None:
        import torch  # noqa: F401  # slow, and needs no device

        self._programs = [(by_name(name), seed) for name in names for seed in seeds]
        self._allocator = allocator
        self._captures: StreamCaptures

    def prepare(self) -> dict[str, str]:
        import torch
        from _stream_captures import StreamCaptures

        device = torch.device("cuda", torch.cuda.current_device())
        self._captures = StreamCaptures(self._programs, device, ours=self._allocator == "ours")
        self._captures.warm_up()
        require_settings(self._allocator)
        return {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}

    def shape(self, key: int) -> dict[str, int]:
        return asdict(self._captures.shape(key))

    def capture(self, key: int) -> dict[str, Any]:
        return asdict(self._captures.capture([key]))

    def replay(self, times: int) -> float:
        return self._captures.replay(times)

    def wrong_sums(self, key: int, times: int) -> int:
        return self._captures.wrong_sums(key, times)

    def wrong_sums_eagerly(self, key: int) -> int:
        return self._captures.wrong_sums_eagerly(key)

    def spans(self, key: int) -> list[tuple[int, int]]:
        return self._captures.spans(key)

    def mapping(self, key: int) -> list[bool]:
        return self._captures.mapping(key)

    def release(self) -> None:
        self._captures.release()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configurations", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, required=True)
    parser.add_argument("--allocator", required=True)
    options = parser.parse_args()
    return serve(
        answers_alone(),
        lambda: StreamServer(options.configurations, options.seeds, options.allocator),
    )


if __name__ == "__main__":
    sys.exit(main())
