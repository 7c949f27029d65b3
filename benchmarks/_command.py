"""What the command lines of benchmarks have in common."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# A cell that has nothing but figures, signs and MiB.
_FIGURE = re.compile(r"[\d\s.,()*MiB×-]*")
_NUMBERS = {
    "repeats": "captures of each row",
    "rounds": "in which all that is compared takes its turn",
    "timeout": "seconds that one step of a process may take",
}


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """With a script's text at the top as it stands there."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=formatter)


def add_common(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """--output, and those of --repeats, --rounds, --timeout and --seed that have a default here."""
    for name, default in defaults.items():
        if name == "seed":
            parser.add_argument("--seed", type=int, default=default, help="of all that is drawn")
        else:
            parser.add_argument(f"--{name}", type=positive, default=default, help=_NUMBERS[name])
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON")


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


def device() -> dict[str, str]:
    """What a report says of the machine. Without a GPU the program ends, with exit code 2."""
    import torch

    if not torch.cuda.is_available():
        print(f"{Path(sys.argv[0]).name}: no CUDA device", file=sys.stderr)
        raise SystemExit(2)
    return {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}


def new_report(options: argparse.Namespace) -> dict[str, Any]:
    """What a report begins with: what was asked for, of which machine, and no rows. Without a GPU
    the program ends.
    """
    return {"options": {**vars(options), "output": str(options.output)}, **device(), "rows": []}


def number(value: float | None, scale: float, form: str) -> str:
    """A cell of a table; of what was not measured a dash."""
    return "-" if value is None else f"{value * scale:{form}}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table. Columns of figures are aligned to the right."""
    rows = list(rows)
    titles = "|".join(f" {title} " if title else " " for title in head)
    columns = zip(*rows, strict=True) if rows else [[""]] * len(head)
    rules = ["---:" if all(map(_FIGURE.fullmatch, cells)) else "---" for cells in columns]
    lines = [f"|{titles}|", f"|{'|'.join(rules)}|"]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def verdict(problems: Iterable[str]) -> int:
    """Prints what is not as it should be, and returns the exit code."""
    problems = list(problems)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def resume(path: Path, **settings: Any) -> dict[str, Any]:
    """A report that an earlier call wrote on this machine with these settings, or a new one of no
    rows. The program ends if it is of others, or without a GPU.
    """
    settings = {**device(), **settings}
    report = json.loads(path.read_text()) if path.exists() else {**settings, "rows": []}
    before = {name: value for name, value in report.items() if name != "rows"}
    if before != settings:
        raise SystemExit(f"{path} is of {before}, this is {settings}: name another --output")
    return dict(report)


def write_report(report: Mapping[str, Any], path: Path) -> None:
    """All or nothing: a run that is cut off leaves the rows before it."""
    part = path.with_name(path.name + ".part")
    part.write_text(as_text(report) + "\n")
    os.replace(part, path)


def as_text(value: Any, levels: int = 2) -> str:
    """JSON; each item of the first levels, and so each row, has a line of its own."""
    if not levels or not value or not isinstance(value, (dict, list)):
        return json.dumps(value)
    if isinstance(value, list):
        lines = [as_text(item, levels - 1) for item in value]
        return "[\n" + ",\n".join(lines) + "\n]"
    lines = [f"{json.dumps(key)}: {as_text(item, levels - 1)}" for key, item in value.items()]
    return "{\n" + ",\n".join(lines) + "\n}"
