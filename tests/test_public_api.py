"""What users may call is written down in public_api.txt: a change of it is seen in review.

``python tests/test_public_api.py`` writes the file anew.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import cudagraph_pool
from cudagraph_pool.cli.main import main

SNAPSHOT = Path(__file__).with_name("public_api.txt")
COMMANDS = ("demo", "footprint", "info", "plot", "record", "replay", "report", "run")


def names() -> Iterator[str]:
    for name in sorted(cudagraph_pool.__all__):
        yield from described(name, getattr(cudagraph_pool, name))


def described(name: str, value: Any) -> Iterator[str]:
    if inspect.ismodule(value):
        for member in sorted(value.__all__):
            yield from described(f"{name}.{member}", getattr(value, member))
    elif inspect.isclass(value):
        yield f"class {name}{inspect.signature(value)}"
        for member in sorted(vars(value)):
            if not member.startswith("_") or member in ("__call__", "__enter__", "__exit__"):
                yield f"  {of_class(member, vars(value)[member])}"
    else:
        yield f"{name}{inspect.signature(value)}"


def of_class(name: str, value: Any) -> str:
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    return f"{name}{inspect.signature(value)}" if callable(value) else name


def commands() -> Iterator[str]:
    for command in ("", *COMMANDS):
        text = help_of(*command.split())
        options = sorted(set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", options_in(text))))
        yield " ".join(["cudagraph-pool", *command.split(), *options])


def options_in(text: str) -> str:
    """The left column of the options' help, where the right one cannot be."""
    return "\n".join(re.split(r"\s{2,}", line[2:])[0] for line in re.findall("^  -.*", text, re.M))


def help_of(*command: str) -> str:
    output = io.StringIO()
    with (
        mock.patch.dict("os.environ", COLUMNS="200", NO_COLOR="1"),
        contextlib.redirect_stdout(output),
        pytest.raises(SystemExit),
    ):
        main([*command, "--help"])
    return output.getvalue()


def section(title: str) -> list[str]:
    return SNAPSHOT.read_text().split(f"# {title}\n")[1].split("\n\n")[0].splitlines()


def test_names_and_signatures() -> None:
    pytest.importorskip("torch")
    assert list(names()) == section("Names")


def test_commands_and_options() -> None:
    assert list(commands()) == section("Commands")


if __name__ == "__main__":
    parts = {"Names": names(), "Commands": commands()}
    text = "\n".join(
        f"# {title}\n" + "".join(f"{line}\n" for line in parts[title]) for title in parts
    )
    SNAPSHOT.write_text(text)
    sys.stdout.write(text)
