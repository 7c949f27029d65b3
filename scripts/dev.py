#!/usr/bin/env python3
"""Sets up what a bare clone needs, then runs the demo or the tests.

    python3 scripts/dev.py demo     # build, install, run `cudagraph-pool demo`
    python3 scripts/dev.py test     # build, install, pass the Python and the C++ tests
    python3 scripts/dev.py setup    # build and install only

Needs Python 3.11 or newer, a C++20 compiler, and PyPI. Everything is installed into the virtual
environment that is active, else into ./.venv; torch only where there is a GPU to use it. What only
the system's packages bring (GoogleTest; on Debian and Ubuntu also Python's headers and venv) is
installed with apt-get where that may be done; without GoogleTest the C++ unit tests are skipped,
and the last line says so.
"""

# Nothing here is newer than Python 3.6, so that an old `python3` can still look for a newer one.

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LEAST_PYTHON = (3, 11)
CXX_PROBE = (
    "#if __cplusplus < 202002L && !defined(__cpp_concepts)\n#error\n#endif\n#include <span>\n"
)


def main() -> None:
    command = sys.argv[1] if len(sys.argv) == 2 else ""
    if command in ("-h", "--help"):
        print(__doc__)
        return
    if command not in ("demo", "test", "setup"):
        sys.exit(__doc__)
    if sys.version_info < LEAST_PYTHON:
        use_newer_python()
    need_compiler()
    need_python_headers()
    python = environment()
    install(python)
    if command == "demo":
        run(str(python.parent / "cudagraph-pool"), "demo")
    elif command == "test":
        install_groups(python, "test")
        test(python)
    else:
        install_groups(python, "test", "lint")


def test(python: Path) -> None:
    """Both test suites. Without GoogleTest there is only the fuzzer of the C++ one."""
    # Side by side, but not on a GPU: some tests count its memory.
    workers = [] if has_gpu() else ["-n", "auto", "--dist", "loadfile"]
    report = ROOT / "build" / "tests.xml"
    seconds = run(str(python), "-P", "-m", "pytest", "-q", f"--junitxml={report}", *workers)
    if not has_header("gmock/gmock.h"):
        apt_install("libgtest-dev", "libgmock-dev")
    pip(python, "cmake>=3.24", "ninja")
    ninja = "-DCMAKE_MAKE_PROGRAM=" + str(python.parent / "ninja")
    run(str(python.parent / "cmake"), "--preset", "release", ninja)
    run(str(python.parent / "cmake"), "--build", "--preset", "release")
    cxx_seconds = run(str(python.parent / "ctest"), "--preset", "release")
    skipped = skipped_tests(report)
    if not has_header("gmock/gmock.h"):
        skipped += ", and all C++ unit tests (no GoogleTest, and apt-get cannot be used here)"
    say(
        f"dev.py: passed: Python tests in {seconds:.0f} s, C++ tests in {cxx_seconds:.0f} s; "
        f"skipped: {skipped}"
    )


def skipped_tests(report: Path) -> str:
    """How many, and what they need, by what they say."""
    needs = Counter()  # type: Any
    for test in ElementTree.parse(str(report)).iter("skipped"):
        said = test.get("message", "") + (test.text or "")
        found = re.search(r"torch|CUDA|GPU|matplotlib|rich|jinja2", said)
        needs[found.group() if found else "something else"] += 1
    parts = [f"{count} need {what}" for what, count in needs.most_common()]
    return f"{sum(needs.values())} tests" + (f" ({', '.join(parts)})" if parts else "")


def environment() -> Path:
    """The Python of the environment to install into."""
    in_conda = os.environ.get("CONDA_PREFIX") == sys.prefix
    if sys.prefix != sys.base_prefix or in_conda:
        say("installing into the active environment " + sys.prefix)
        return Path(sys.executable)
    python = VENV / "bin" / "python"
    if not python.exists() or not succeeds(str(python), "-m", "pip", "--version"):
        shutil.rmtree(str(VENV), ignore_errors=True)
        if not succeeds(sys.executable, "-c", "import ensurepip, venv"):
            apt_install("python3-venv", "python{}.{}-venv".format(*sys.version_info[:2]))
        if not succeeds(sys.executable, "-c", "import ensurepip, venv"):
            sys.exit(
                "dev.py: this Python has no venv: install python3-venv, or activate an environment"
            )
        # A torch that the system has, as in containers made for it, is not fetched again.
        shared = ["--system-site-packages"] if torch_of(sys.executable) else []
        run(sys.executable, "-m", "venv", *shared, str(VENV))
    return python


def install(python: Path) -> None:
    """The package, editable; again only once something that is built into it has changed."""
    if has_gpu() and not torch_of(str(python)):
        pip(python, *pyproject()["project"]["optional-dependencies"]["torch"])
    note = python.parent / "cudagraph_pool_built_from"
    built_from = f"{sources()}; torch {torch_of(str(python))}"
    works = succeeds(str(python.parent / "cudagraph-pool"), "--version")
    if not works or not note.exists() or note.read_text() != built_from:
        say("building the C++ core: a minute or two")
        pip(python, "--editable", ".")
        note.write_text(built_from)


def sources() -> str:
    """Differs once one of the files that a build reads is another one."""
    names = ("CMakeLists.txt", "pyproject.toml", "setup.py")
    files = [file for file in (ROOT / "csrc").rglob("*.*") if file.suffix != ".pyc"]
    files += [ROOT / name for name in names]
    newest = max(file.stat().st_mtime_ns for file in files)
    return f"{len(files)} files in {ROOT}, the newest of {newest}"


def install_groups(python: Path, *groups: str) -> None:
    """By name, since pip before 25.1 knows no dependency groups."""
    listed = pyproject()["dependency-groups"]
    pip(python, *[package for group in groups for package in listed[group]])


def pyproject() -> Any:
    import tomllib  # new in 3.11

    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pip(python: Path, *arguments: str) -> None:
    """Installs; quiet unless that fails."""
    run(str(python), "-m", "pip", "install", *arguments, is_quiet=True)


def has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/dev/nvidia0").exists()


def torch_of(python: str) -> str:
    """The version; empty if there is none."""
    probe = "import importlib.metadata as m; print(m.version('torch'))"
    done = subprocess.run([python, "-c", probe], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return done.stdout.decode().strip()


def need_compiler() -> None:
    if compiles(CXX_PROBE):
        return
    apt_install("g++")
    if not compiles(CXX_PROBE):
        sys.exit("dev.py: no C++20 compiler: install g++ 11 or newer, or set CXX to one")


def need_python_headers() -> None:
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        apt_install("python3-dev", "python{}.{}-dev".format(*sys.version_info[:2]))
    if not header.exists():
        sys.exit(f"dev.py: {header} is missing: install Python's development package")


def has_header(name: str) -> bool:
    return compiles(f"#include <{name}>\n")


def compiles(source: str) -> bool:
    options = ["-std=c++20", "-x", "c++", "-fsyntax-only", "-"]
    return succeeds(os.environ.get("CXX") or "c++", *options, given=source)


def apt_install(*packages: str) -> None:
    """Installs those of the packages that exist, where this user may; otherwise does nothing."""
    if not shutil.which("apt-get"):
        return
    prefix = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if prefix and not succeeds(*prefix, "true"):
        return
    say("installing " + " ".join(packages) + " with apt-get")
    environ = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    subprocess.call([*prefix, "apt-get", "update", "-qq"], env=environ)
    for package in packages:
        quiet = [*prefix, "apt-get", "install", "-y", "-qq", "--no-install-recommends", package]
        subprocess.call(quiet, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def use_newer_python() -> None:
    for path in os.environ.get("PATH", "").split(os.pathsep):
        for candidate in sorted(Path(path).glob("python3.*"), reverse=True) if path else []:
            minor = re.match(r"python3\.(\d+)$", candidate.name)
            if (
                minor
                and (3, int(minor.group(1))) >= LEAST_PYTHON
                and succeeds(str(candidate), "-V")
            ):
                os.execv(str(candidate), [str(candidate), *sys.argv])
    sys.exit("dev.py: Python 3.11 or newer is needed; this is {}.{}".format(*sys.version_info[:2]))


def succeeds(*command: str, given: str = "") -> bool:
    nowhere = subprocess.DEVNULL
    try:
        done = subprocess.run(command, input=given.encode(), stdout=nowhere, stderr=nowhere)
        return done.returncode == 0
    except OSError:
        return False


def run(*command: str, is_quiet: bool = False) -> float:
    """Returns the seconds that it took. What is quiet says something only if it fails."""
    say("+ " + " ".join(command))
    start = time.monotonic()
    output = subprocess.PIPE if is_quiet else None
    done = subprocess.run(command, cwd=str(ROOT), stdout=output, stderr=subprocess.STDOUT)
    seconds = time.monotonic() - start
    code = done.returncode
    if code:
        say((done.stdout or b"").decode(errors="replace"))
        say(f"dev.py: FAILED after {seconds:.0f} s with exit code {code}: {' '.join(command)}")
        sys.exit(code if code > 0 else 128 - code)
    say(f"  took {seconds:.1f} s")
    return seconds


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("dev.py: stopped")
        sys.exit(130)
