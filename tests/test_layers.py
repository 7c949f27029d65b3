"""The C++ folders include only what stands above them, as csrc/README.md says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent / "csrc"
ABOVE = {
    "core": {"core"},
    "driver": {"core", "driver"},
    "exec": {"core", "driver", "exec"},
    "torch": {"core", "driver", "exec", "torch"},
    "python": {"core", "driver", "exec", "torch", "python"},
    "testing": {"core", "driver", "exec", "testing"},
}
ROOMS = ["base", "memory", "placement", "leases"]  # of the core, in this order, below the rest
# Of the adapter: what every file of it may know, then its rooms in this order, below the rest.
ADAPTER_WORDS = {"device_pools.h", "errors.h", "runtime.h", "torch_version.h", "workspaces.h"}
ADAPTER_ROOMS = ["observe", "scopes"]
MOST_FILES = 16  # of a folder, without what is for tests
FOREIGN = re.compile(r"(cuda|nv|torch|c10|ATen|pybind11|Python|structmember)", re.IGNORECASE)
FOR_TESTS = re.compile(r"_(test|benchmark|fixture|fuzz)(_|$)")
STANDARD = re.compile(r"[a-z_]+")

pytestmark = pytest.mark.skipif(not CSRC.is_dir(), reason="the C++ sources are not here")


def includes(folder: str) -> Iterator[tuple[Path, str, str]]:
    """Each file, and each of its includes: the bracket or quote, and the name."""
    for path in sorted((CSRC / folder).rglob("*")):
        if path.suffix in (".h", ".cc"):
            for found in re.finditer(
                r'^#include ([<"])([^>"]+)[>"]', path.read_text(), re.MULTILINE
            ):
                yield path, found[1], found[2]


@pytest.mark.parametrize("folder", ABOVE)
def test_own_headers_come_from_above(folder: str) -> None:
    seen = 0
    for path, bracket, name in includes(folder):
        if bracket == '"':
            seen += 1
            allowed = ABOVE[folder] | (set() if is_product(path) else {"testing", "driver"})
            top = name.partition("/")[0]
            assert top in allowed, (path, name)
            assert (CSRC / name).is_file(), (path, name)
    assert seen


def is_product(path: Path) -> bool:
    return "testing" not in path.parts and not FOR_TESTS.search(path.stem)


@pytest.mark.parametrize(
    ("folder", "rooms", "known"),
    [("core", ROOMS, {"driver.h"}), ("torch", ADAPTER_ROOMS, ADAPTER_WORDS)],
)
def test_rooms_include_what_stands_above(folder: str, rooms: list[str], known: set[str]) -> None:
    for path, bracket, name in includes(folder):
        if bracket != '"' or not name.startswith(f"{folder}/") or not is_product(path):
            continue
        room, _, rest = name.removeprefix(f"{folder}/").rpartition("/")
        assert room != "testing", (path, name)
        if path.parent != CSRC / folder:
            above = rooms[: rooms.index(path.parent.name) + 1]
            assert room in above or rest in known, (path, name)
    found = {path.name for path in (CSRC / folder).iterdir() if path.is_dir()}
    assert found - {"testing"} == set(rooms)


def test_headers_of_the_adapter_include_each_other_in_no_circle() -> None:
    below = {
        str(path.relative_to(CSRC)): set[str]()
        for path in (CSRC / "torch").rglob("*.h")
        if is_product(path)
    }
    for path, _, name in includes("torch"):
        if (header := str(path.relative_to(CSRC))) in below and name in below:
            below[header].add(name)
    while leaves := {name for name, names in below.items() if not names}:
        below = {name: names - leaves for name, names in below.items() if name not in leaves}
    assert not below


def test_folders_of_the_adapter_can_be_looked_over() -> None:
    for folder in (CSRC / "torch", *(CSRC / "torch" / room for room in ADAPTER_ROOMS)):
        product = [p for p in folder.iterdir() if p.suffix in (".h", ".cc") and is_product(p)]
        assert len(product) <= MOST_FILES, folder


def test_core_knows_the_standard_library_only() -> None:
    for path, bracket, name in includes("core"):
        assert not FOREIGN.match(name), (path, name)
        if bracket == "<" and not FOR_TESTS.search(path.stem):
            assert STANDARD.fullmatch(name), (path, name)


@pytest.mark.parametrize("folder", ["driver", "exec"])
def test_only_the_cuda_drivers_know_cuda_and_nothing_there_knows_torch(folder: str) -> None:
    for path, bracket, name in includes(folder):
        if bracket == "<" and FOREIGN.match(name):
            assert path.stem.startswith("cuda_"), (path, name)
            assert name.startswith("cuda"), (path, name)


def test_shared_executables_know_no_pool() -> None:
    needed = {"core/base/error.h", "core/driver.h", "driver/cuda_context.h"}
    for path, bracket, name in includes("exec"):
        if bracket == '"' and not re.search("_(test|fixture)", path.stem):
            assert name in needed or name.startswith("exec/"), (path, name)


def test_adapter_needs_little_of_aten() -> None:
    # Heavy headers: torch's allocator of host memory, its graphs, and what a test wraps.
    needed = {
        ("pluggable_base_test.cc", "torch/csrc/cuda/CUDAPluggableAllocator.h"),
        ("runtime.cc", "ATen/core/CachingHostAllocator.h"),
        ("shared_graph.cc", "ATen/cuda/CUDAGraph.h"),
    }
    for path, _, name in includes("torch"):
        if (path.name, name) not in needed:
            assert not name.startswith(("ATen", "torch/extension", "torch/csrc")), (path, name)


def test_every_folder_is_known() -> None:
    assert {path.name for path in CSRC.iterdir() if path.is_dir()} == set(ABOVE)
