"""A graph-aware memory pool for PyTorch CUDA graphs.

N graphs cost what the largest one needs, in any capture order, on any streams, and nobody changes
their model::

    import cudagraph_pool as cgp

    cgp.enable()

From then on ``torch.cuda.graph`` and ``torch.cuda.make_graphed_callables`` capture into pools of
this package; everything else stays with PyTorch's own allocator. Importing the package imports
neither torch nor CUDA, nor anything of its own before that is asked for: ``import torch`` imports
it (see ``_autoload``), which must cost nothing.
"""

import os
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import sizes
    from ._allocator import (
        allocator,
        disable,
        enable,
        enabled,
        is_enabled,
        library_path,
        pluggable_allocator,
    )
    from ._core import __version__ as __version__
    from ._forecast import Forecast, forecast
    from ._graphs import GraphPool, graph, use_pool
    from ._guard import guard
    from ._pool_report import PoolReport, report
    from ._stats import stats
    from .runner import GraphRunner

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

# Where names are that do not come from ._allocator.
_HOMES = {
    "__version__": "._core",
    "Forecast": "._forecast",
    "GraphPool": "._graphs",
    "GraphRunner": ".runner",
    "PoolReport": "._pool_report",
    "forecast": "._forecast",
    "graph": "._graphs",
    "guard": "._guard",
    "report": "._pool_report",
    "stats": "._stats",
    "use_pool": "._graphs",
}


def __getattr__(name: str) -> Any:
    if name not in __all__ and name not in ("__version__", "_core"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name in ("sizes", "_core"):
            return import_module(f".{name}", __name__)
        value = getattr(import_module(_HOMES.get(name, "._allocator"), __name__), name)
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}._core":
            raise
        raise ImportError(_not_installed()) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def _not_installed() -> str:
    return (
        f"{__path__[0]} holds the sources of cudagraph_pool, which is not installed: "
        "pip install . in that clone"
    )


def _built(folders: Iterable[str]) -> bool:
    return PathFinder.find_spec("cudagraph_pool._core", list(folders)) is not None


def _use_installed() -> None:
    """Lets the next copy on the path that has been built take this one's place."""
    for entry in sys.path[1:]:
        spec = PathFinder.find_spec("cudagraph_pool", [entry])
        if spec and spec.loader and _built(spec.submodule_search_locations or ()):
            if spec.origin != __file__:  # else it is this one that was installed, to be edited
                installed = sys.modules[__name__] = module_from_spec(spec)
                spec.loader.exec_module(installed)
            return


def _is_where_python_began() -> bool:
    """Whether this was found in the folder of the program, which stands first on the path."""
    first = None if sys.flags.safe_path else sys.path[0]
    return first is not None and os.path.abspath(first) == os.path.dirname(__path__[0])


# The sources in a clone, or what was built there for another environment, stand before what was
# installed.
if not _built(__path__) or _is_where_python_began():
    from importlib.util import module_from_spec

    _use_installed()
