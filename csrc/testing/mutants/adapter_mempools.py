"""torch.cuda.MemPools as pools of ours: csrc/torch."""

from __future__ import annotations

from functools import partial

from mutants.mutant import Mutant

_Mutant = partial(Mutant, folder="torch")

MUTANTS = [
    _Mutant(
        "adapter-route-nested-resumed",
        "routes.cc",
        "another thread goes on with a nested scope",
        "  if (!route.nested && filter(route.origin)) return true;\n",
        "  if (filter(route.origin)) return true;\n",
    ),
    _Mutant(
        "adapter-route-nested-eager",
        "routes.cc",
        "a nested scope takes what is not captured",
        "    if (route.nested && route.ours && !capture) continue;\n",
        "",
    ),
    _Mutant(
        "adapter-mempool-bases",
        "graph_mempools.cc",
        "a MemPool with an allocator of its own becomes ours",
        "  const bool ours = allocator == nullptr && takes",
        "  const bool ours = takes",
    ),
    _Mutant(
        "adapter-mempool-kept",
        "graph_scopes.cc",
        "what is nested in a capture goes with its MemPool",
        "  const bool is_kept = graphs && KeepFor(",
        "  const bool is_kept = false && KeepFor(",
    ),
    _Mutant(
        "adapter-mempool-kept-users",
        "graph_scopes.cc",
        "two pools with memory of each other's graphs keep each other",
        "  if (UsersOf(pools, id) == 0) ReleaseKeptFor(pools, id);\n",
        "  if (pools.set().UseCount(id) == 0) ReleaseKeptFor(pools, id);\n",
    ),
    _Mutant(
        "adapter-mempool-nested-open",
        "graph_scopes.cc",
        "what is nested in a capture goes on when it is over",
        '  for (int attempt = 0; attempt < 2; ++attempt) {\n    WithWarnings("the end of what',
        '  for (int attempt = 0; attempt < 0; ++attempt) {\n    WithWarnings("the end of what',
    ),
    _Mutant(
        "adapter-mempool-lends-graph",
        "graph_mempools.cc",
        "a MemPool lends what its graphs write to",
        "  if (set.UseCount(pool) != 1) return std::nullopt;\n",
        "",
    ),
    _Mutant(
        "adapter-mempool-lends-capture",
        "graph_mempools.cc",
        "a MemPool lends to a capture",
        "  if (IsCapturing(stream)) return std::nullopt;",
        "  if (false) return std::nullopt;",
    ),
    _Mutant(
        "adapter-mempool-capture",
        "graph_mempools.cc",
        "a MemPool gives back its memory while another thread captures",
        "      if (routes_.capturing()) continue;\n",
        "",
    ),
    _Mutant(
        "adapter-mempool-pages",
        "graph_mempools.cc",
        "blocks of a no_split pool share pages",
        "  return (bytes + page - 1) / page * page;\n",
        "  return page > 0 ? bytes : 0;\n",
    ),
]
