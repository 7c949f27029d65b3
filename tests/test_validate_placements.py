"""The independent validator sees each thing that can be wrong with a file of placements."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(
    ("place", "changes", "said"),
    [
        (4, block(12, PAGE + 512 - 8 * PAGE, [1, 512, 512]), "shares bytes"),
        (3, block(11, 1024, [0, 1024, 1024], [0, 1024, 1024]), "page 0 with live block 11"),
        (4, block(12, PAGE, [1, 1536, 512]), "addresses of live block 11"),
        (4, block(12, -512, [1, 1024, 1536]), "addresses of live block"),
        (3, {"bytes": PAGE + 512}, "its pieces"),
        (4, {"pages": [[1, PAGE - 256, 512]]}, "is not in page 1"),
        (4, {"pages": [[2, 1024, 512]]}, "is not in page 2"),
        (4, {"pages": [[1, 1024, 512], [1, 1024, 0]]}, "is not in page 1"),
        (2, {"page": 0}, "made twice"),
        (0, {"bytes": PAGE + 1}, "not granules"),
        (4, {"id": 11}, "allocated twice"),
        (6, {"id": 10}, "allocated twice"),
        (4, {"pages": []}, "no pieces"),
        (4, {"pages": [[1, 1024]]}, "line 5: "),
        (4, {"bytes": 500}, "no granule"),
        (4, {"va": BASE + PAGE + 1025}, "no granule"),
        (6, {"va": BASE + 9 * PAGE + 512}, "multiple of its size"),
        (7, block(14, PAGE, [0, 1024, 512]), "addresses of live block"),
        (5, {"id": 99}, "not live"),
        (7, {"id": 10}, "not live"),
        (8, {"reserved_bytes": 3 * PAGE}, "pages of"),
        (7, {"op": "end", "reserved_bytes": 2 * PAGE, "id": 1}, "line 8: "),
        (5, {"op": "move"}, "no attribute 'move'"),
    ],
)
def test_damage_is_seen(place: int, changes: dict[str, Any], said: str) -> None:
    records = valid()
    records[place].update(changes)
    with pytest.raises(PlacementError, match=said):
        judge(records)


def test_a_page_stays_where_it_is_mapped() -> None:
    records = valid()
    records[6], records[7] = records[7], block(13, PAGE, [0, 0, 512])  # where page 1 stands
    with pytest.raises(PlacementError, match="where page 1 is mapped"):
        judge(records)


def test_an_end_is_there_and_is_the_end() -> None:
    for records, said in ((valid()[:-1], "line 8: the file stops"), (valid() * 2, "after the end")):
        with pytest.raises(PlacementError, match=said):
            judge(records)
