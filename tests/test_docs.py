"""What the documents and the comments point to is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://github.com/cudagraph-pool/cudagraph_pool"
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
        for link in re.findall(rf"\]\({REPOSITORY}/blob/main/([^)#]+)[)#]", text):
            yield ROOT / link, link
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
