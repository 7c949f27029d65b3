"""A graph-aware memory pool for PyTorch CUDA graphs.

N graphs cost what the largest one needs, in any capture order, on any streams, and nobody changes
their model::

    import cudagraph_pool as cgp

    cgp.enable()

From then on ``torch.cuda.graph`` and ``torch.cuda.make_graphed_callables`` capture into pools of
this package; everything else stays with PyTorch's own allocator. Importing the package imports
neither torch nor CUDA, nor anything of its own before that is asked for: ``import torch`` imports
it (see ``integration.autoload``), which must cost nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import sizes
    from ._core import __version__ as __version__
    from ._forecast import Forecast, forecast
    from ._guard import guard
    from .capture import graph
    from .pools import GraphPool, stats, use_pool
    from .runner import GraphRunner
    from .switch import (
        allocator,
        disable,
        enable,
        enabled,
        is_enabled,
        library_path,
        pluggable_allocator,
    )
    from .tools.pool_report import PoolReport, report

__all__ = [
    "Forecast",
    "GraphPool",
    "GraphRunner",
    "PoolReport",
    "allocator",
    "disable",
    "enable",
    "enabled",
    "forecast",
    "graph",
    "guard",
    "is_enabled",
    "library_path",
    "pluggable_allocator",
    "report",
    "sizes",
    "stats",
    "use_pool",
]

# The module that each name comes from.
_HOMES = {
    "Forecast": "_forecast",
    "GraphPool": "pools",
    "GraphRunner": "runner",
    "PoolReport": "tools.pool_report",
    "__version__": "_core",
    "allocator": "switch",
    "disable": "switch",
    "enable": "switch",
    "enabled": "switch",
    "forecast": "_forecast",
    "graph": "capture",
    "guard": "_guard",
    "is_enabled": "switch",
    "library_path": "switch",
    "pluggable_allocator": "switch",
    "report": "tools.pool_report",
    "stats": "pools",
    "use_pool": "pools",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name not in ("_core", "sizes"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f".{_HOMES.get(name, name)}", __name__)
    except ModuleNotFoundError as error:
        if error.name == f"{__name__}._core":
            raise ImportError(_not_installed()) from None
        if error.name == "torch":
            import_module("._adapter", __name__).load_adapter()  # says what to install
        raise
    if name not in _HOMES:
        return module
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    from importlib.util import find_spec

    missing = () if find_spec("torch") else ("GraphRunner", "guard")  # help() would fail at these
    return [*(name for name in __all__ if name not in missing), "__version__"]


def _not_installed() -> str:
    return (
        f"{__path__[0]} holds the sources of cudagraph_pool and stands first on sys.path: run from "
        "another folder, or with python -P; if it is not installed: pip install . in that clone"
    )
