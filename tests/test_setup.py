"""setup.py finds the torch that Python finds, though pip hides it; what it says of the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = Path(__file__).parent.parent / "setup.py"
pytestmark = pytest.mark.skipif(not SETUP.is_file(), reason="the sources are not here")

# A virtual environment has no user site.
PYTHON = getattr(sys, "_base_executable", sys.executable)

# pip, as far as it isolates; and what setup.py does in there, with setuptools doing nothing.
PIP = """
import os, subprocess, sys
hidden = {**os.environ, "PYTHONNOUSERSITE": "1", "PYTHONPATH": "/overlay"}
subprocess.run([sys.executable, "-I", "-c", sys.argv[1]], env=hidden, check=True)
"""
BUILD = f"""
import runpy, setuptools
given = {{}}
setuptools.setup, setuptools.__version__ = lambda **of: given.update(of), "99"
print(runpy.run_path({str(SETUP)!r})["TORCHES"], given["long_description"], sep="\\n")
"""


def make_torch(folder: Path) -> Path:
    torch = folder / "torch"
    (torch / "include/c10/cuda").mkdir(parents=True)
    (torch / "include/c10/cuda/CUDACachingAllocator.h").touch()
    (torch / "__init__.py").touch()
    (torch / "version.py").write_text("__version__ = '2.12.0'\ncuda: str = '13.0'\n")
    return torch


def build(**variables: str) -> tuple[str, str]:
    """The torches that are found, and the page that PyPI shows."""
    environment = {name: value for name, value in os.environ.items() if "PYTHON" not in name}
    environment = {**environment, "PATH": "/usr/bin:/bin", **variables}
    done = subprocess.run(
        [PYTHON, "-c", PIP, BUILD], env=environment, capture_output=True, text=True
    )
    if "No module named 'setuptools'" in done.stderr:
        pytest.skip("there are no setuptools")
    assert done.returncode == 0, done.stderr
    torches, _, page = done.stdout.partition("\n")
    return torches, page


@pytest.mark.parametrize("place", ["path", "user", "pth"])
def test_torch_of_the_environment(tmp_path: Path, place: str) -> None:
    user = tmp_path / f"lib/python3.{sys.version_info.minor}/site-packages"
    torch = make_torch(user if place == "user" else tmp_path / "elsewhere")
    if place == "pth":
        user.mkdir(parents=True)
        (user / "torch.pth").write_text(f"{torch.parent}\n")
    variables = (
        {"PYTHONPATH": str(torch.parent)} if place == "path" else {"PYTHONUSERBASE": str(tmp_path)}
    )
    assert build(**variables)[0] == f"[{torch!r}]"


def test_torch_that_is_named(tmp_path: Path) -> None:
    torch = make_torch(tmp_path)
    assert build(CGP_TORCH_DIR=str(torch))[0] == f"[{torch!r}]"
    assert build(CGP_TORCH_DIR="")[0] == "[]"


def test_page_on_pypi_has_links_and_pictures_that_work_there() -> None:
    """PyPI shows the README without the files beside it, and GitHub a page around a blob."""
    _, page = build(CGP_TORCH_DIR="")
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", page)
    ours = [(kind, link) for kind, link in links if "/main/" in link]
    assert {kind for kind, _ in ours} == {"", "!"}
    assert all(f"/{'raw' if kind else 'blob'}/main/" in link for kind, link in ours)
    assert all(link.startswith("https://") for _, link in links)
