"""Calls CMake, which describes the build; metadata stands in pyproject.toml.

``_core`` is always built. The adapter is built where the environment to install into has a CUDA
build of a supported torch. torch is no build requirement: a build serves the torch that is there,
and 4 GB of it would be fetched into pip's isolated build environment to no use. It is looked for,
never imported, since under build isolation it cannot be:

1. in ``CGP_TORCH_DIR``, the folder of the torch package, if that is set; empty means not to build
   the adapter, several (with ``:`` between) to build one for each (``scripts/build_wheels.sh``);
2. by the interpreter that runs the build, as it was before pip isolated that: among its own
   packages, the user's, on PYTHONPATH, behind a ``.pth``. pip runs the target environment's own;
3. by those of the environments on ``PATH``: uv builds in an environment of its own, and the active
   one stands there. Where none is active, uv needs ``--no-build-isolation``.

What lacks adapters says so in its name: pip prints it, and no two wheels share one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# The minor releases of torch 2 that the adapter is written for.
(TORCH,) = PYPROJECT["project"]["optional-dependencies"]["torch"]
TORCH_MINORS = range(*map(int, re.findall(r"2\.(\d+)", TORCH)))


def environment_of_pip() -> dict[str, str]:
    """What pip was started with. To isolate a build it hides PYTHONPATH and the user's packages."""
    environment = dict(os.environ)
    hidden = ("PYTHONPATH", "PYTHONNOUSERSITE")
    if environment.get("PYTHONNOUSERSITE") != "1":  # the build is not isolated
        return environment
    for name in hidden:
        environment.pop(name, None)
    with contextlib.suppress(OSError):
        began = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        pairs = (os.fsdecode(pair).partition("=")[::2] for pair in began)
        environment |= {name: value for name, value in pairs if name in hidden}
    return environment


def torch_candidates() -> Iterator[Path]:
    """Where Python finds torch: the one that builds, then those of PATH's environments."""
    program = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s else '')"
    pythons = [sys.executable]
    for entry in os.environ.get("PATH", "").split(os.pathsep):
        if entry and Path(entry).parent.joinpath("pyvenv.cfg").is_file():
            pythons.append(str(Path(entry, "python")))
    environment = environment_of_pip()
    for python in dict.fromkeys(pythons):
        with contextlib.suppress(OSError):
            done = subprocess.run(
                [python, "-P", "-c", program], env=environment, capture_output=True, text=True
            )
            if done.stdout.strip():
                yield Path(done.stdout.strip()).parent


def reason_against(torch: Path) -> str | None:
    """Why the adapter cannot be built for this torch package."""
    if not (torch / "include/c10/cuda/CUDACachingAllocator.h").is_file():
        return "holds no torch with headers"
    if not re.search(r"^cuda\b.* = '\d", (torch / "version.py").read_text(), re.MULTILINE):
        return "is a torch without CUDA"
    if (minor := minor_of(torch)) not in TORCH_MINORS:
        version = f"2.{minor}" if minor else "of another major version"
        return f"is torch {version}; 2.{TORCH_MINORS[0]} to 2.{TORCH_MINORS[-1]} are supported"
    return None


def minor_of(torch: Path) -> int | None:
    """The minor release of this torch 2."""
    found = re.search(r"__version__ = '2\.(\d+)", (torch / "version.py").read_text())
    return int(found[1]) if found else None


def find_torches() -> list[Path]:
    """The folders of the torch packages to build an adapter for."""
    chosen = os.environ.get("CGP_TORCH_DIR")
    if chosen is not None:
        torches = [Path(folder).resolve() for folder in chosen.split(os.pathsep) if folder]
        for torch in torches:
            if reason := reason_against(torch):
                sys.exit(f"cudagraph_pool: CGP_TORCH_DIR={chosen}: {torch} {reason}")
        return torches
    # Only the first is imported, so only the first counts.
    first = next(
        (folder for folder in torch_candidates() if (folder / "version.py").is_file()), None
    )
    if first and (reason := reason_against(first)):
        print(f"cudagraph_pool: not building the adapter: {first} {reason}", file=sys.stderr)
        return []
    return [first] if first else []


def label(minors: list[int]) -> str:
    """What tells a build with these adapters from others; empty if it has all of them."""
    if minors == list(TORCH_MINORS):
        return ""
    return ".".join(["torch2", *map(str, minors)]) if minors else "without.adapter"


def tool(module: str, attribute: str) -> str:
    """A build tool: the one that its PyPI package brings, which need not be on PATH, else the one
    on PATH.
    """
    try:
        return str(Path(getattr(import_module(module), attribute), module))
    except (ImportError, AttributeError):
        found = shutil.which(module)
    if not found:
        sys.exit(
            f"cudagraph_pool: {module} is missing: "
            f"pip install {module}, or build with pip's isolation"
        )
    return found


class CMakeBuild(build_ext):
    """Builds all extension modules in one run of CMake."""

    def run(self) -> None:
        try:
            import pybind11
        except ImportError:
            sys.exit(
                "cudagraph_pool: pybind11 is missing: "
                "pip install pybind11, or build with pip's isolation"
            )
        built_for = ", ".join(map(str, TORCHES)) or "no torch: the core alone"
        print(f"cudagraph_pool: building {VERSION} for {built_for}")
        build = Path(self.build_temp).resolve()
        output = Path(self.get_ext_fullpath("cudagraph_pool._core")).resolve().parent
        for left in output.glob("_*" + sysconfig.get_config_var("EXT_SUFFIX")):
            left.unlink()  # by a build for another torch
        cmake = tool("cmake", "CMAKE_BIN_DIR")
        # --fresh: the last build's isolated environment, and the tools cached from it, are gone.
        configure = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_LIBRARY_OUTPUT_DIRECTORY": output,
            "CMAKE_MAKE_PROGRAM": tool("ninja", "BIN_DIR"),
            "CGP_BUILD_PYTHON": "ON",
            "CGP_BUILD_TESTS": "OFF",
            "CGP_TORCH_DIR": ";".join(map(str, TORCHES)),
            "CGP_VERSION": VERSION,
            "CGP_WARNINGS_AS_ERRORS": "OFF",
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
        }
        settings = [f"-D{name}={value}" for name, value in configure.items()]
        subprocess.run(
            [cmake, "--fresh", "-G", "Ninja", "-S", ROOT, "-B", build, *settings], check=True
        )
        subprocess.run([cmake, "--build", build], check=True)


if not sys.platform.startswith("linux"):
    sys.exit("cudagraph_pool: Linux is the only system that is supported")
if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(
        f"cudagraph_pool: setuptools {setuptools.__version__} is too old: "
        "pip install 'setuptools>=77', or build with pip's isolation"
    )

TORCHES = find_torches()
MINORS = sorted(minor for torch in TORCHES if (minor := minor_of(torch)))
VERSION = PYPROJECT["tool"]["cudagraph_pool"]["version"]
LABEL = label(MINORS)
options = {}
if Path(ROOT, "PKG-INFO").exists():  # an sdist: what comes of it must have its version
    if LABEL:
        options = {"bdist_wheel": {"build_number": f"0{LABEL}"}}
elif LABEL and "sdist" not in sys.argv:
    VERSION += f"+{LABEL}"
# As PyPI shows it: links lead to the repository, and pictures to what it holds.
README = (ROOT / "README.md").read_text()
for link, kind in ((r"(!\[[^]]*\]\()", "raw"), (r"(\]\()", "blob")):
    target = f"{PYPROJECT['project']['urls']['Homepage']}/{kind}/main/"
    README = re.sub(rf"{link}(?!https:)", rf"\1{target}", README)
modules = ["_core", *(f"_torch_2_{minor}" for minor in MINORS)]
setup(
    version=VERSION,
    long_description=README,
    long_description_content_type="text/markdown",
    options=options,
    ext_modules=[Extension(f"cudagraph_pool.{module}", sources=[]) for module in modules],
    cmdclass={"build_ext": CMakeBuild},
)
