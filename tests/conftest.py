"""What several tests need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_trace import WriteTrace, small_trace


@pytest.fixture
def write_trace(tmp_path: Path) -> WriteTrace:
    """Writes :func:`small_trace` with changes and returns its path."""

    def write(**changes: Any) -> Path:
        path = tmp_path / "small.json"
        path.write_text(json.dumps(small_trace(**changes)))
        return path

    return write
