"""The independent validator sees each thing that can be wrong with a file of placements."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import validate_placements
from validate_placements import PlacementError, validate

PAGE = 2 << 20
BASE = 1 << 40

Records = list[dict[str, Any]]


def block(number: int, address: int, *pieces: list[int]) -> dict[str, Any]:
    size = sum(piece[2] for piece in pieces)
    return {"op": "alloc", "id": number, "bytes": size, "va": BASE + address, "pages": [*pieces]}


def valid() -> Records:
    """Two pages, a block over both, one before it, one after it, and one where a freed one was."""
    return [
        {"op": "page", "page": 0, "bytes": PAGE},
        block(10, 0, [0, 0, 1024]),
        {"op": "page", "page": 1, "bytes": PAGE},
        block(11, 1024, [0, 1024, PAGE - 1024], [1, 0, 1024]),
        block(12, PAGE + 1024, [1, 1024, 512]),
        {"op": "free", "id": 10},
        # The same byte at another address: page 1 is mapped before page 0 too.
        block(13, 8 * PAGE, [0, 0, 512]),
        {"op": "free", "id": 11},
        {"op": "end", "reserved_bytes": 2 * PAGE},
    ]


def judge(records: Records) -> validate_placements.Verdict:
    return validate([json.dumps(record) for record in records])


def test_valid_file() -> None:
    verdict = judge(valid())
    assert (verdict.pages, verdict.blocks, verdict.stitched_blocks) == (2, 4, 1)
    assert (verdict.shared_pages, verdict.reserved_bytes) == (1, 2 * PAGE)


def put(index: int, **changes: Any) -> Callable[[Records], None]:
    return lambda records: records[index].update(changes)


def insert(index: int, **record: Any) -> Callable[[Records], None]:
    return lambda records: records.insert(index, record)


def drop(index: int) -> Callable[[Records], None]:
    def apply(records: Records) -> None:
        del records[index]

    return apply


def remap(records: Records) -> None:
    """Puts block 13 after the free of block 11, through an address behind which page 1 stands."""
    records[6], records[7] = records[7], records[6]
    records[7].update(va=BASE + PAGE)


DAMAGE: dict[str, tuple[Callable[[Records], None], str]] = {
    "shares a byte": (
        put(4, pages=[[1, 512, 512]], va=BASE + PAGE + 512 - 8 * PAGE),
        "shares bytes",
    ),
    "shares within itself": (
        put(3, pages=[[0, 1024, PAGE - 1024], [0, 1024, 1024]]),
        "shares bytes of page 0 with live block 11",
    ),
    "same addresses": (
        put(4, va=BASE + PAGE, pages=[[1, 1536, 512]]),
        "addresses of live block 11",
    ),
    "surrounds addresses": (
        put(4, va=BASE - 512, bytes=1024 + 512, pages=[[1, 1024, 1536]]),
        "has addresses of live block",
    ),
    "pieces too short": (put(3, bytes=PAGE + 512), "its pieces"),
    "leaves the page": (put(4, pages=[[1, PAGE - 256, 512]]), "leaves page 1"),
    "unknown page": (put(4, pages=[[2, 1024, 512]]), "page 2 was never made"),
    "page twice": (insert(3, op="page", page=1, bytes=PAGE), "made twice"),
    "page of no granules": (put(0, bytes=PAGE + 1), "not granules"),
    "block twice": (put(4, id=11), "allocated twice"),
    "block again after its free": (put(6, id=10), "allocated twice"),
    "no pieces": (put(4, pages=[]), "no pieces"),
    "empty piece": (put(4, pages=[[1, 1024, 0]]), "empty piece"),
    "piece of two": (put(4, pages=[[1, 1024]]), "piece"),
    "odd size": (put(4, bytes=500, pages=[[1, 1024, 500]]), "no granule"),
    "odd address": (put(4, va=BASE + PAGE + 1025), "no granule"),
    "negative": (put(4, va=-512), "va is -512"),
    "remapped": (remap, "where page 1 is mapped"),
    "misaligned": (put(6, va=BASE + 9 * PAGE + 512), "multiple of its size"),
    "free of unknown": (put(5, id=99), "not live"),
    "free twice": (put(7, id=10), "not live"),
    "reserved too much": (put(8, reserved_bytes=3 * PAGE), "pages of"),
    "no end": (drop(8), "without an end"),
    "after the end": (insert(9, op="free", id=12), "after the end"),
    "unknown op": (put(5, op="move"), "unknown op"),
    "missing key": (insert(5, op="free"), "has the keys"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_seen(name: str) -> None:
    damage, what = DAMAGE[name]
    records = copy.deepcopy(valid())
    damage(records)
    with pytest.raises(PlacementError, match=what):
        judge(records)


@pytest.mark.parametrize("line", ["", "{", "[]", "7", '"alloc"', "null"])
def test_lines_that_are_no_records(line: str) -> None:
    with pytest.raises(PlacementError, match="line 2: "):
        validate([json.dumps(valid()[0]), line])


def test_script(tmp_path: Path) -> None:
    lines = [json.dumps(record) + "\n" for record in valid()]
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text("".join(lines))
    bad.write_text("".join(lines[:-1]))
    for paths, code, said in (
        ([good], 0, "valid: 4 blocks"),
        ([bad, good], 1, "INVALID: line 8: the file stops without an end"),
        (["nosuch"], 2, "nosuch: cannot be read: No such file or directory\n"),
    ):
        command = [sys.executable, validate_placements.__file__, *paths]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == code
        assert said in done.stdout + done.stderr
