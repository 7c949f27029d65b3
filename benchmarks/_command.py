"""What the command lines of benchmarks have in common."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_MOST_ON_A_LINE = 1500


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """With a script's text at the top as it stands there."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=formatter)


def add_some(
    parser: argparse.ArgumentParser, option: str, choices: Iterable[str], **more: Any
) -> None:
    """An option that takes some of the choices; all of them, unless it is given."""
    names = list(choices)
    parser.add_argument(option, nargs="+", choices=names, **{"default": names, **more})


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


def new_report(options: argparse.Namespace, machine: dict[str, str]) -> dict[str, Any]:
    """What every report begins with: what was asked for, and of which machine."""
    return {"options": {**vars(options), "output": str(options.output)}, **machine}


def number(value: float | None, scale: float, form: str) -> str:
    """A cell of a table; of what was not measured a dash."""
    return "-" if value is None else f"{value * scale:{form}}"


def write_report(report: dict[str, Any], path: Path) -> None:
    """All or nothing: a run that is cut off leaves the rows before it."""
    part = path.with_name(path.name + ".part")
    part.write_text(as_text(report) + "\n")
    os.replace(part, path)


def as_text(value: Any, indent: str = "") -> str:
    """JSON with about a line for each row: what is short stands on one."""
    flat = json.dumps(value)
    if len(flat) <= _MOST_ON_A_LINE or not isinstance(value, (dict, list)):
        return flat
    names = [f"{json.dumps(str(key))}: " for key in value] if isinstance(value, dict) else []
    items = value.values() if isinstance(value, dict) else value
    lines = [
        f"{indent} {name}{as_text(item, indent + ' ')}"
        for name, item in zip(names or [""] * len(value), items, strict=True)
    ]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return ",\n".join([f"{begin}\n{lines[0]}", *lines[1:]]) + f"\n{indent}{end}"
