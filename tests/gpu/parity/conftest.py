"""Each test here runs on PyTorch's own allocator first, which shows that the test is right, and
then with the package enabled: what passes on the one must pass on the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest

from ..conftest import nothing_left

Side = Literal["native", "ours"]


@pytest.fixture(params=["native", "ours"], autouse=True)
def side(request: pytest.FixtureRequest, warm: None) -> Iterator[Side]:
    """Which allocator graph captures have."""
    with nothing_left(request, enable=request.param == "ours"):
        yield request.param
