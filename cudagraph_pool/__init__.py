"""A graph-aware memory pool for PyTorch CUDA graphs.

N graphs cost what the largest one needs, in any capture order, on any streams; no model changes::

    import cudagraph_pool as cgp

    cgp.enable()

From then on ``torch.cuda.graph`` and ``torch.cuda.make_graphed_callables`` capture into pools of
this package; everything else stays with PyTorch's own allocator. Importing the package imports
neither torch nor CUDA, nor anything of its own before that is asked for: ``import torch`` imports
it (see ``integration.autoload``), which must cost nothing.
"""

from importlib import import_module
from typing import Any

# The module that each name comes from; __init__.pyi has them for type checkers.
_HOMES = {
    "__version__": "_core",
    **dict.fromkeys(("Forecast", "forecast"), "_forecast"),
    **dict.fromkeys(("GraphPool", "lend_on_oom", "sleep", "stats", "use_pool", "wake"), "pools"),
    **dict.fromkeys(("PoolReport", "report"), "tools.pool_report"),
    **dict.fromkeys(("allocator", "disable", "enable", "enabled", "is_enabled"), "switch"),
    **dict.fromkeys(("library_path", "pluggable_allocator"), "switch"),
    "GraphRunner": "runner",
    "Lease": "_leases",
    "graph": "capture",
    "guard": "_guard",
}
__all__ = sorted({*_HOMES, "sizes"} - {"__version__"})


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

    # Without torch help() would fail at these.
    missing = () if find_spec("torch") else ("GraphRunner", "graph", "guard")
    return [*(name for name in __all__ if name not in missing), "__version__"]


def _not_installed() -> str:
    return (
        f"{__path__[0]} holds the sources of cudagraph_pool and stands first on sys.path: run from "
        "another folder, or with python -P; if it is not installed: pip install . in that clone"
    )
