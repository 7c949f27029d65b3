"""An environment in which this very package counts as installed, whether it is or not."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from cudagraph_pool import _core

_ROOT = Path(__file__).parent.parent
_NO_NUMPY = "ignore:Failed to initialize NumPy"  # torch says so where there is none


def declared() -> dict[str, dict[str, str]]:
    """The entry points that pyproject.toml declares: by group, then by name."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    return {"console_scripts": project["scripts"], **project["entry-points"]}


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Of a process: `folder` gets the metadata that an installation has. Of two distributions of
    one name the first on the path counts.
    """
    info = folder / "site" / f"cudagraph_pool-{_core.__version__}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: cudagraph-pool\nVersion: {_core.__version__}\n"
    )
    lines = []
    for group, points in declared().items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    package = Path(_core.__file__).parents[1]
    paths = [str(info.parent), str(package), os.environ.get("PYTHONPATH", "")]
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CUDAGRAPH_POOL", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    }
    kept |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONWARNINGS": _NO_NUMPY}
    return {**kept, **variables}
