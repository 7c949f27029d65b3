"""Each test here runs on PyTorch's own allocator first, which shows that the test is right, and
then with the package enabled: what passes on the one must pass on the other.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Literal

import pytest

Side = Literal["native", "ours"]


@pytest.fixture(params=["native", "ours"], autouse=True)
def side(request: pytest.FixtureRequest, warm: None) -> Iterator[Side]:
    """Which allocator graph captures have; afterwards nothing is left, whatever the test did."""
    import torch

    import cudagraph_pool as cgp
    from cudagraph_pool import _torch

    stream = torch.cuda.current_stream()
    if request.param == "ours":
        cgp.enable()
    yield request.param
    torch.cuda.set_stream(stream)
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # those of the capture stream lie in its pool
    gc.collect()
    torch.cuda.empty_cache()
    left = [_torch.pool_ids(device) for device in range(torch.cuda.device_count())]
    cgp.disable()
    # The traceback of a failed test keeps its graphs alive: no fault of this one.
    if not request.session.testsfailed:
        assert not any(left), f"pools left by the test: {left}"
