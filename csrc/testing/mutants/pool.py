"""One pool."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "pool-use-forgotten",
        "pool.cc",
        "RecordUse() records nothing",
        "  live.uses.push_back(stream);\n",
        "",
    ),
    Mutant(
        "pool-requested",
        "pool.cc",
        "freed bytes still count as requested",
        "  s.stats.requested_bytes -= block.requested_bytes;\n",
        "",
    ),
    Mutant(
        "pool-peak",
        "pool.cc",
        "the peak is that of the last allocation",
        "  s.stats.peak_allocated_bytes = "
        "std::max(s.stats.peak_allocated_bytes, s.stats.allocated_bytes);\n",
        "  s.stats.peak_allocated_bytes = s.stats.allocated_bytes;\n",
    ),
    Mutant(
        "pool-edges-swapped",
        "pool.cc",
        "of a block's edges the wrong ends are freed",
        "first ? s.space.last(page) : s.space.first(page)",
        "first ? s.space.first(page) : s.space.last(page)",
    ),
    Mutant(
        "pool-no-rebuild",
        "pool.cc",
        "the view is not rebuilt when a scope's fences open",
        "    if (fence_count > 0 && !one_stream) view.Rebuild();\n",
        "    (void)one_stream;\n",
    ),
    Mutant(
        "pool-one-stream",
        "pool.cc",
        "the view is not rebuilt although other fences opened too",
        "*s.scope == ScopeKind::kCapture && fence_count == 1 &&",
        "*s.scope == ScopeKind::kCapture &&",
    ),
    Mutant(
        "pool-poll-rebuild",
        "pool.cc",
        "views are not rebuilt when events are done",
        "  for (const auto& view : views) view->Rebuild();\n",
        "",
    ),
    Mutant(
        "pool-take-neighbours",
        "pool.cc",
        "a view forgets only what is taken, and learns its neighbours twice",
        "view->Forget(from, behind == NodeId::kNone ? last : behind);",
        "view->Forget(within, last);",
    ),
    Mutant(
        "pool-no-poll",
        "pool.cc",
        "a small block does not ask for done events before it grows",
        "  if (!start && PollFences()) start = find();\n",
        "",
    ),
    Mutant(
        "pool-zero-address",
        "address_map.h",
        "address 0 is found in any empty place",
        "      if (places_[i].key == kEmpty) return nullptr;\n"
        "      if (places_[i].key == address) return &places_[i].value;\n",
        "      if (places_[i].key == address) return &places_[i].value;\n"
        "      if (places_[i].key == kEmpty) return nullptr;\n",
    ),
    Mutant(
        "map-erase",
        "address_map.h",
        "an erased place strands entries that stood behind it",
        "(hole < home && home <= i) : (hole < home || home <= i);",
        "(hole <= home && home < i) : (hole < home || home < i);",
    ),
    Mutant(
        "pool-settle",
        "pool.cc",
        "small blocks are not put beside survivors",
        "  s.SettlePages();\n",
        "",
    ),
    Mutant(
        "pool-settle-unlearned",
        "pool.cc",
        "a page that settles stays in the bins of the others",
        "    for (const auto& view : views) view->Forget(space.first(page), space.last(page));\n",
        "",
    ),
    Mutant(
        "pool-largest-block",
        "pool.cc",
        "sizes beyond all memory are tried",
        "  if (bytes > kLargestBlock) s.ThrowOutOfMemory("
        '"No device has so many addresses.", bytes);\n',
        "",
    ),
]
