"""How much longer ``import torch`` takes for this package where ``CUDAGRAPH_POOL`` is not set.

Times what torch does for all packages that extend it (its entry points ``torch.backends``), in new
processes in turn with ours and without. Needs torch, but no GPU. Exit code 0 if the difference of
the medians is at most 2 ms.

    python benchmarks/import_cost.py --runs 20
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _command import positive

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from entry_points import environment

LIMIT_MS = 2.0
PROGRAM = """
import time, torch
began = time.perf_counter()
torch._import_device_backends()
print((time.perf_counter() - began) * 1e3)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=positive, default=20, help="of each kind (default: 20)")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        ways = {way: environment(Path(folder, way)) for way in ("without", "with")}
        (metadata,) = Path(folder, "without").rglob("entry_points.txt")
        metadata.unlink()
        took: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(runs + 1):  # the first may compile
            for way, variables in ways.items():
                done = subprocess.run(
                    [sys.executable, "-P", "-c", PROGRAM],
                    env={**variables, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    check=True,
                )
                took[way].append(float(done.stdout))
    medians = {way: statistics.median(times[1:]) for way, times in took.items()}
    for way, times in took.items():
        print(f"{way}: median {medians[way]:.2f} ms, {min(times):.2f} to {max(times[1:]):.2f}")
    more = medians["with"] - medians["without"]
    print(f"import torch takes {more:.2f} ms more")
    return int(more > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
