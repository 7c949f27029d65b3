"""One callable, captured for many sizes into one pool: :class:`cudagraph_pool.GraphRunner`."""

from .runner import GraphRunner as GraphRunner
