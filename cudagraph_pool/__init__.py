"""A graph-aware memory pool for PyTorch CUDA graphs.

N graphs cost what the largest one needs, in any capture order, on any streams, and nobody changes
their model::

    import cudagraph_pool as cgp

    cgp.enable()

From then on ``torch.cuda.graph`` and ``torch.cuda.make_graphed_callables`` capture into pools of
this package; everything else stays with PyTorch's own allocator. Importing the package imports
neither torch nor CUDA.
"""

from typing import TYPE_CHECKING, Any

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
from ._graphs import GraphPool, graph, use_pool

if TYPE_CHECKING:
    from ._guard import guard
    from ._runner import GraphRunner

__all__ = [
    "GraphPool",
    "GraphRunner",
    "allocator",
    "disable",
    "enable",
    "enabled",
    "graph",
    "guard",
    "is_enabled",
    "library_path",
    "pluggable_allocator",
    "sizes",
    "use_pool",
]


def __getattr__(name: str) -> Any:
    """What is defined in terms of torch's classes comes when it is asked for."""
    if name == "GraphRunner":
        from ._runner import GraphRunner

        return GraphRunner
    if name == "guard":
        from ._guard import guard

        return guard
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
