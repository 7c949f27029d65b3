"""What is installed: version, typing, command, and that torch is not needed for any of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
from entry_points import declared

import cudagraph_pool
from cudagraph_pool import _adapter, _core

ROOT = Path(__file__).parent.parent
PACKAGE = Path(_core.__file__).parent


def python(program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_version_stands_in_one_place() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    versions = re.findall(r'^version = "(\d+\.\d+\.\d+\S*)"$', text, re.MULTILINE)
    assert versions == [_core.__version__.partition("+")[0]]
    assert cudagraph_pool.__version__ == _core.__version__


@pytest.fixture
def distribution() -> metadata.Distribution:
    """Not that of the sources: any build in the clone writes an egg-info there."""
    path = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
    found = next(iter(metadata.Distribution.discover(name="cudagraph-pool", path=path)), None)
    if found is None:
        pytest.skip("the package is not installed, only importable")
    return found


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


@pytest.mark.parametrize(
    "name", ["py.typed", "_core.pyi", "tools/report.html", "traces/mlp_asc.json.gz"]
)
def test_data_is_beside_the_modules(name: str) -> None:
    assert (PACKAGE / name).is_file()


def test_supported_releases_of_torch() -> None:
    """The extra, setup.py (which reads it), the package and the script name the same."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    minors = _adapter.MINORS
    assert project["optional-dependencies"]["torch"] == [
        f"torch>=2.{minors[0]},<2.{minors[-1] + 1}"
    ]
    (listed,) = re.findall(
        r"^releases=\((.*)\)$", (ROOT / "scripts/build_wheels.sh").read_text(), re.MULTILINE
    )
    assert [int(release.split(".")[1]) for release in listed.split()] == list(minors)


@pytest.mark.parametrize(
    "use", [["-c", "import cudagraph_pool; cudagraph_pool.__version__"], ["-m", "cudagraph_pool"]]
)
def test_sources_that_stand_first_say_what_to_do(tmp_path: Path, use: list[str]) -> None:
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("*.so"))
    nothing_installed = ["-S", "-E"]
    done = subprocess.run(
        [sys.executable, *nothing_installed, *use], cwd=tmp_path, capture_output=True, text=True
    )
    assert "run from another folder, or with python -P" in done.stderr
    assert done.stderr.endswith("not installed: pip install . in that clone\n")


FAKE_TORCH = "__version__ = {version!r}\nclass version:\n    cuda = {cuda!r}\n"


def reason(folder: Path, version: str | None, cuda: str | None = "13.0") -> str:
    """What load_adapter() says beside such a torch, in a copy that holds the core alone."""
    shutil.copytree(PACKAGE, folder / "cudagraph_pool", ignore=shutil.ignore_patterns("_torch_2*"))
    program = "import sys\n"
    if version is None:
        program += "sys.modules['torch'] = None\n"
    else:
        (folder / "torch").mkdir()
        (folder / "torch/__init__.py").write_text(FAKE_TORCH.format(version=version, cuda=cuda))
    program += (
        "from cudagraph_pool._adapter import load_adapter\n"
        "try:\n    load_adapter()\nexcept ImportError as error:\n    print(error)\n"
    )
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = python(program, cwd=folder, env={**os.environ, "PYTHONPATH": path}, check=True)
    assert done.stdout.count("\n") == 1
    return done.stdout


INSTALL = "pip install --no-deps --force-reinstall ."


@pytest.mark.parametrize(
    ("version", "cuda", "says"),
    [
        (None, None, "there is none: install a CUDA build of torch {all}, then its adapter"),
        ("2.{last}.0", None, "torch 2.{last}.0 is none: install one of torch {all}"),
        ("2.{last}.0", "13.0", f"in a clone of cudagraph_pool, CGP_TORCH_DIR={{torch}} {INSTALL}"),
        ("2.{older}.0", "12.8", "supports torch {all}, and this is torch 2.{older}.0: install one"),
        ("2.{next}.0a0+1", "13.0", "torch 2.{next}.0a0+1: install one of these, or a newer"),
    ],
)
def test_reason_why_nothing_can_be_enabled(
    tmp_path: Path, version: str | None, cuda: str | None, says: str
) -> None:
    first, last = _adapter.MINORS[0], _adapter.MINORS[-1]
    numbers = {"last": last, "older": first - 1, "next": last + 1, "all": _adapter.SUPPORTED}
    said = reason(tmp_path, version and version.format(**numbers), cuda)
    assert says.format(**numbers, torch=tmp_path / "torch") in said


NAMES_RELEASES = ("README.md", "CONTRIBUTING.md", "docs/index.md", "csrc/torch/torch_version.h")


@pytest.mark.parametrize("path", NAMES_RELEASES)
def test_texts_name_the_supported_releases(path: str) -> None:
    """A list in CONTRIBUTING.md says where else a new release goes."""
    if not (ROOT / path).is_file():
        pytest.skip("the documents are not here")
    named = set(re.findall(r"\b2\.\d+ to 2\.\d+\b", (ROOT / path).read_text()))
    assert named == {_adapter.SUPPORTED}


@pytest.mark.parametrize("use", ["cgp.GraphRunner", "cgp.graph", "cgp.guard"])
def test_without_torch_it_says_what_to_install(use: str) -> None:
    program = f"import sys; sys.modules['torch'] = None; import cudagraph_pool as cgp; {use}"
    done = python(program)
    assert done.returncode == 1
    said = "ImportError: cudagraph_pool needs PyTorch to be enabled, and there is none: install"
    assert done.stderr.splitlines()[-1].startswith(said)


def test_help_needs_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; import cudagraph_pool; help(cudagraph_pool)"
    done = python(program)
    assert (done.returncode, done.stderr) == (0, "")
    assert "class GraphPool(" in done.stdout


def test_import_costs_next_to_nothing() -> None:
    """The issue's limit: 30 ms of CPU time, where the loop takes 60: a busy machine slows both."""
    program = (
        "from time import process_time as now; begin = now()\n"
        "import cudagraph_pool; cudagraph_pool.is_enabled; end = now()\n"
        "sum(i * i for i in range(1_000_000)); print((end - begin) / max(0.06, now() - end))"
    )
    assert min(float(python(program).stdout) for _ in range(5)) < 0.5


def test_adapters_are_found_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for minor in (15, 12):
        (tmp_path / f"_torch_2_{minor}{EXTENSION_SUFFIXES[0]}").touch()
    monkeypatch.setattr(cudagraph_pool, "__path__", [*cudagraph_pool.__path__, str(tmp_path)])
    found = _adapter.releases()
    assert found == sorted(found, key=lambda name: int(name[2:]))
    assert {"2.12", "2.15"} <= set(found)


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the documents are not here")
def test_public_names_are_documented() -> None:
    page = (ROOT / "docs/api.md").read_text()
    names = re.findall(r"^\.\. auto\w+:: (?:cudagraph_pool\.)?(\w+)$", page, re.MULTILINE)
    assert sorted(names) == sorted(cudagraph_pool.__all__)


def test_each_figure_of_a_pool_is_documented() -> None:
    names = [name for name in dir(_core.PoolStats) if not name.startswith("_")]
    names += ["execs", "exec_instantiations", "exec_updates", "exec_alone"]
    document = cudagraph_pool.GraphPool.stats.__doc__ or ""
    assert [name for name in names if f"``{name}``" not in document] == []


@pytest.mark.parametrize(("name", "value"), [("allocator", None), ("library_path", "1")])
def test_nccl_registers_nothing_unless_it_is_told_to(name: str, value: str | None) -> None:
    pytest.importorskip("cudagraph_pool._torch", exc_type=ImportError)
    program = (
        "import os, cudagraph_pool\n"
        "before = os.environ.get('NCCL_GRAPH_REGISTER')\n"
        f"cudagraph_pool.{name}()\n"
        "print(before, os.environ['NCCL_GRAPH_REGISTER'])\n"
    )
    environment = {key: of for key, of in os.environ.items() if key != "NCCL_GRAPH_REGISTER"}
    if value is not None:
        environment["NCCL_GRAPH_REGISTER"] = value
    done = python(program, env=environment)
    assert done.stdout.split() == [str(value), value or "0"], done.stderr
