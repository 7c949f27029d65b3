"""What the documents and the comments point to is there, and what they show is so."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_trace import TRACES

import cudagraph_pool
from cudagraph_pool.cli.main import main
from cudagraph_pool.tools.footprint import Footprint, as_json
from cudagraph_pool.tools.replay import replay
from cudagraph_pool.tools.trace import read_trace

ROOT = Path(__file__).parent.parent
FOLDERS = "benchmarks|csrc|cudagraph_pool|docs|examples|scripts|tests"
TEXTS = [
    path for part in (".", "benchmarks", "csrc", "docs") for path in (ROOT / part).glob("*.md")
]
SOURCES = [
    path
    for folder in ("benchmarks", "csrc", "cudagraph_pool", "examples", "scripts", "tests")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".h", ".cc", ".py", ".sh", ".cmake")
]

pytestmark = pytest.mark.skipif(
    not all((ROOT / folder).is_dir() for folder in FOLDERS.split("|")),
    reason="not all of the sources are here",
)


def said_in(path: Path) -> Iterator[tuple[Path, str]]:
    """Each file that is pointed to, and how."""
    text = path.read_text()
    if path.suffix == ".md":
        for link in re.findall(r"\]\(([^)#:]+)[)#]", text):
            yield path.parent / link, link
        # Of the C++ folders, also as they are named from csrc/.
        for name in re.findall(r"`((?:core|driver|exec|torch|testing)/[\w/]+\.\w+)`", text):
            yield ROOT / "csrc" / name, name
    # Not what stands in another commit, which git is asked for.
    text = re.sub(r"git show \S+", "", text)
    paths = rf"(?<![\w./])((?:{FOLDERS})/[\w/]+\.(?:cc|cu|h|md|py|sh|svg))\b"
    for name in re.findall(paths, text):
        yield ROOT / name, name
    documents = {document.name: document for document in TEXTS}
    for name in re.findall(r"(?<![\w./-])(\w+\.md)\b", text):
        yield documents.get(name, ROOT / name), name


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_point_to_what_is_there(path: Path) -> None:
    assert [said for file, said in said_in(path) if not file.is_file()] == []


def test_sources_point_to_what_is_there() -> None:
    missing = {
        f"{path.relative_to(ROOT)}: {said}"
        for path in SOURCES
        for file, said in said_in(path)
        if not file.is_file()
    }
    assert missing == set()


MOST_WORDS = 30
MOST_LINES = 1420  # of all pages in docs/


def sentences(path: Path) -> Iterator[str]:
    """Those outside of tables, code and headings. An entry of a list ends one."""
    text = re.sub(r"^ *(```.*?^ *```|\||#).*?$", "", path.read_text(), flags=re.M | re.S)
    text = re.sub(r"!?\[(.*?)\]\(.*?\)", r"\1", re.sub(r"\[!\[.*?\)\]\(.*?\)", "", text))
    for part in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", text):
        yield from re.split(r"(?<=[.?!])[*`)\"]*\s+(?=[^a-z])", " ".join(part.split()))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_are_short(path: Path) -> None:
    assert [s for s in sentences(path) if len(s.split()) > MOST_WORDS] == []


def test_pages_are_few_enough_to_read() -> None:
    pages = (ROOT / "docs").glob("*.md")
    assert sum(len(page.read_text().splitlines()) for page in pages) <= MOST_LINES


def test_a_release_has_few_lines() -> None:
    releases = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    assert all(len(release.strip().splitlines()) - 2 <= 15 for release in releases)


def blocks(path: Path, language: str = "python") -> list[str]:
    """The Python of a page, which runs from its first line to its last; or what else it shows."""
    shown = rf"^```{language}\n(.*?)^```$"
    return re.findall(shown, path.read_text(), re.MULTILINE | re.DOTALL)


PROGRAMS = [path for path in TEXTS if blocks(path)]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_programs_of_the_documents_call_what_there_is(path: Path) -> None:
    """tests/gpu runs them."""
    tree = ast.parse("".join(blocks(path)))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "cgp"
    }
    assert used <= set(cudagraph_pool.__all__)


def test_the_trace_that_is_shown_is_one(tmp_path: Path) -> None:
    (shown,) = blocks(ROOT / "docs/trace_format.md", "json")
    path = tmp_path / "shown.json"
    path.write_text(shown)
    result = replay(read_trace(path))
    assert (result["name"], result["graphs"], result["ops"]) == ("mlp", 2, 5)


def fields(value: Any, path: str = "") -> set[str]:
    """Of JSON, as the tables name them."""
    if isinstance(value, dict):
        return {f for name in value for f in fields(value[name], f"{path}.{name}".lstrip("."))}
    if isinstance(value, list):
        return {field for entry in value for field in fields(entry, f"{path}[]")}
    return {path}


def test_fields_of_json_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/api.md").read_text()
    ways = as_json({"eager": Footprint(1, 1, 0, 0), "compiled": "failed"})
    printed = {"footprint": {field for way in ways.values() for field in fields(way)}}
    for command in ("replay", "report"):
        assert main([command, "--json", str(TRACES[0])]) == 0
        printed[command] = fields(json.loads(capsys.readouterr().out))
    for command, names in printed.items():
        (table,) = re.findall(rf"^\| `{command}` (?:prints|writes).*\n((?:\|.*\n)+)", page, re.M)
        first = " ".join(row.split(" | ")[0] for row in table.splitlines())
        assert sorted(re.findall("`(.*?)`", first)) == sorted(names)


def test_rules_are_worth_what_was_measured() -> None:
    """But for what a rule is, which each says in its own words."""
    page, report = (
        re.findall(r"^\| ([a-z-]*) \|.*?\|(.*)", path.read_text(), re.MULTILINE)
        for path in (ROOT / "docs/ablation.md", ROOT / "benchmarks/results/ablation.md")
    )
    assert len(page) > 10
    assert page == report


HERE = str(Path(sys.executable).parent)


@pytest.mark.skipif(not shutil.which("cudagraph-pool", path=HERE), reason="there is no command")
def test_commands_of_the_guide_run(tmp_path: Path) -> None:
    """With a program that uses no GPU, whichever way it is named."""
    pytest.importorskip("torch")
    (shown,) = blocks(ROOT / "docs/guide.md", "bash")
    (tmp_path / "package").mkdir()
    for path in (tmp_path / "serve.py", tmp_path / "package/serve.py"):
        path.write_text("import sys; print(*sys.argv[1:])")
    commands = shown.replace("    # or: ", "\n")
    assert commands.count("\n") == 3
    environ = {**os.environ, "PATH": f"{HERE}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", commands], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["", "--port 8000", "--port 8000"]


def errors_explained() -> list[list[str]]:
    """The parts of each, which stand one after the other."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    errors = re.findall(r"^(?:### |\| )`(.*?)` *(?:\||$)", page, re.MULTILINE)
    return [[part.strip() for part in error.split("…")] for error in errors]


def test_errors_in_troubleshooting_are_those_of_the_sources() -> None:
    """Literals that follow each other are one text, without what is added between them."""
    text = "".join(path.read_text() for path in SOURCES if "tests" not in path.parts)
    text = re.sub(r'"\s*(?:\+ [^"]*? \+\s*)?f?"', "", text)
    errors = errors_explained()
    assert len(errors) > 40
    assert [part for error in errors for part in error if part not in text] == []


# What only a mistake in torch or in this package could raise.
OF_NOBODY = (
    *("is not a CUDA device", "before all its graphs were reset", "is in use already"),
    *("is not registered", "no live block", "an executable can be shared only", "cuGraphGetNodes"),
    *("computes values that are not finite",),
)


def test_errors_of_the_sources_are_in_troubleshooting() -> None:
    """What Python code raises of a state, not of an argument, and all of the adapter's."""
    raised = []
    for path in SOURCES:
        text = path.read_text()
        if (ROOT / "cudagraph_pool") in path.parents:
            raised += [
                " ".join(str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant))
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "RuntimeError"
            ]
        elif "torch" in (parts := path.relative_to(ROOT).parts) and (
            "testing" not in parts and re.fullmatch(r"((?!_test).)*\.cc", path.name)
        ):
            joined = re.sub(r'"\s*"', "", text)
            calls = re.findall(r"(?:throw [\w:]+|TORCH_CHECK\w*)\((.*?)\);", joined, re.DOTALL)
            raised += [" ".join(re.findall(r'"(.*?)"', call)) for call in calls]
    assert len(raised) > 30
    explained = errors_explained()
    assert [
        text
        for text in raised
        if len(text) > 25
        and not any(part in text for part in OF_NOBODY)
        and not any(all(part in text for part in error) for error in explained)
    ] == []
