"""What is installed: version, typing, command, and that torch is not needed for any of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from entry_points import declared

import cudagraph_pool
from cudagraph_pool import _core

ROOT = Path(__file__).parent.parent
PACKAGE = Path(_core.__file__).parent


def test_version_stands_in_one_place() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    versions = re.findall(r'^version = "(\d+\.\d+\.\d+)"$', text, re.MULTILINE)
    assert versions == [_core.__version__]


@pytest.fixture
def distribution() -> metadata.Distribution:
    try:
        return metadata.distribution("cudagraph-pool")
    except metadata.PackageNotFoundError:
        pytest.skip("the package is not installed, only importable")


def test_metadata(distribution: metadata.Distribution) -> None:
    assert distribution.version == _core.__version__
    assert distribution.metadata["License-Expression"] == "BSD-3-Clause"
    assert [r for r in distribution.requires or [] if "extra ==" not in r] == ["tqdm>=4"]
    found = {(entry.group, entry.name, entry.value) for entry in distribution.entry_points}
    points = declared().items()
    assert found == {(group, *point) for group, named in points for point in named.items()}


def test_command_is_installed(distribution: metadata.Distribution) -> None:
    # The second is where `pip install --target` puts it.
    folders = [Path(sys.executable).parent, PACKAGE.parent / "bin"]
    command = shutil.which("cudagraph-pool", path=os.pathsep.join(map(str, folders)))
    assert command
    done = subprocess.run([command, "--version"], capture_output=True, text=True)
    assert done.stdout.strip() == distribution.version


@pytest.mark.parametrize("name", ["py.typed", "_core.pyi", "traces/seed_asc.json.gz"])
def test_data_is_beside_the_modules(name: str) -> None:
    assert (PACKAGE / name).is_file()


def test_import_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import cudagraph_pool\n"
        "assert not cudagraph_pool.is_enabled()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_public_names_of_the_design() -> None:
    names = "enable disable is_enabled enabled allocator library_path GraphPool graph".split()
    assert set(names) <= set(dir(cudagraph_pool))
