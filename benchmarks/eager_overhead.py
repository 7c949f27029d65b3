"""What an eager allocate + free costs through the adapter, against PyTorch's own, from C++.

Needs a GPU, g++ and the CUDA headers that torch's wheels bring. Rounds alternate between the two
allocators, so that clocks that drift favour neither; the ratio is the median over the rounds.

    python benchmarks/eager_overhead.py --output eager.json
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cudagraph_pool._table import format_table

SIZES = {"512 B": 512, "1 MiB": 1 << 20, "20 MiB": 20 << 20}


def cuda_include(torch_root: Path) -> Path:
    """The folder with CUDA's headers: that of a toolkit, or that of the wheels beside torch."""
    folders = [Path(os.environ[name]) / "include" for name in ("CUDA_HOME",) if name in os.environ]
    folders += sorted(torch_root.parent.glob("nvidia/*/include"))
    folders.append(Path("/usr/local/cuda/include"))
    for folder in folders:
        if (folder / "cuda_runtime_api.h").is_file():
            return folder
    raise FileNotFoundError(
        f"cuda_runtime_api.h is in none of {', '.join(map(str, folders))}; set CUDA_HOME"
    )


def build(folder: Path) -> Path:
    """Compiles eager_overhead.cc against the torch that runs this; returns the library."""
    root = Path(torch.__file__).parent
    library = folder / "eager_overhead.so"
    command = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC"]
    command += [
        "-Wno-deprecated-declarations",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    command += [f"-I{root / 'include'}", f"-I{cuda_include(root)}"]
    command += [str(Path(__file__).with_suffix(".cc")), "-o", str(library)]
    command += [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-lc10_cuda", "-lc10"]
    subprocess.run(command, check=True)
    return library


class Timer:
    """The functions of eager_overhead.cc."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._time = loaded.NanosecondsPerPair
        self._time.argtypes = [ctypes.c_size_t, ctypes.c_int]
        self._time.restype = ctypes.c_double
        self._current = loaded.CurrentAllocator
        self._current.argtypes = []
        self._current.restype = ctypes.c_void_p

    def nanoseconds_per_pair(self, size: int, pairs: int) -> float:
        nanoseconds = float(self._time(size, pairs))
        if nanoseconds < 0:
            raise RuntimeError(f"allocating {size} bytes failed")
        return nanoseconds

    def allocator(self) -> int:
        """The address of the allocator that is measured."""
        return int(self._current() or 0)


def measure(
    timer: Timer, native_allocator: int, size: int, pairs: int, rounds: int
) -> dict[str, Any]:
    import cudagraph_pool

    native: list[float] = []
    ours: list[float] = []

    def run(enabled: bool) -> None:
        if enabled:
            cudagraph_pool.enable()
        else:
            cudagraph_pool.disable()
        if (timer.allocator() != native_allocator) != enabled:
            raise RuntimeError("the allocator was not switched: there is nothing to compare")
        (ours if enabled else native).append(timer.nanoseconds_per_pair(size, pairs))

    for number in range(rounds):
        for enabled in (False, True) if number % 2 == 0 else (True, False):
            run(enabled)
    return {
        "bytes": size,
        "native_ns": statistics.median(native),
        "ours_ns": statistics.median(ours),
        "ratio": statistics.median(b / a for a, b in zip(native, ours, strict=True)),
        "native_ns_all": native,
        "ours_ns_all": ours,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=200_000, help="in a round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--build-only", action="store_true", help="compile and load, measure nothing"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        timer = Timer(build(Path(folder)))
        if options.build_only:
            print("eager_overhead: built and loaded")
            return 0
        if not torch.cuda.is_available():
            print("eager_overhead.py: no CUDA device (--build-only needs none)", file=sys.stderr)
            return 2
        torch.cuda.init()
        native = timer.allocator()
        rows = [
            {"size": name, **measure(timer, native, size, options.pairs, options.rounds)}
            for name, size in SIZES.items()
        ]
    if options.output:
        report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    cells = [["size", "native, ns", "ours, ns", "ours ÷ native"]]
    cells += [
        [row["size"], f"{row['native_ns']:.1f}", f"{row['ours_ns']:.1f}", f"{row['ratio']:.3f}"]
        for row in rows
    ]
    print(format_table(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
