"""What the command lines of benchmarks have in common."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any


def positive(text: str) -> int:
    """An argument that is a number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, is {value}")
    return value


def device() -> dict[str, str] | None:
    """What a report says of the machine; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    return {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}


def write_report(report: dict[str, Any], path: Path) -> None:
    """All or nothing: a run that is cut off leaves the rows before it."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(part, path)
