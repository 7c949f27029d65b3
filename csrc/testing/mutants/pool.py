"""One pool."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "pool-use-forgotten",
        "pool.cc",
        "RecordUse() records nothing",
        "  live.AddUse(stream);\n",
        "",
    ),
    Mutant(
        "pool-requested",
        "pool.cc",
        "freed bytes still count as requested",
        "  stats.requested_bytes -= live.block.requested_bytes;\n",
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
        "pool_streams.cc",
        "of a block's edges the wrong ends are freed",
        "first ? space.last(page) : space.first(page)",
        "first ? space.first(page) : space.last(page)",
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
        "                          fence_count == 1 && s.views.size() == 1 &&\n",
        "                          s.views.size() == 1 &&\n",
    ),
    Mutant(
        "pool-poll-rebuild",
        "pool_streams.cc",
        "views are not rebuilt when events are done",
        "  for (const auto& view : views) view->Rebuild();\n",
        "",
    ),
    Mutant(
        "pool-take-neighbours",
        "pool_streams.cc",
        "a view forgets only what is taken, and learns its neighbours twice",
        "view->Forget(from, behind == NodeId::kNone ? last : behind);",
        "view->Forget(within, last);",
    ),
    Mutant(
        "pool-no-poll",
        "pool_placing.cc",
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
        "pool-own-use",
        "pool_state.h",
        "a use by the block's own stream counts as another's",
        "    if (stream == block.stream) return;\n",
        "",
    ),
    Mutant(
        "pool-room",
        "pool_placing.cc",
        "a page for small blocks gets a range of its own",
        "Grow({.range = RangeWithRoom(), ",
        "Grow({.range = std::nullopt, ",
    ),
    Mutant(
        "pool-break-takers",
        "pool_placing.cc",
        "a small block is not told which whole page others want (memory only)",
        "WholePageToBreak(view, ranges, Takers());",
        "WholePageToBreak(view, ranges);",
    ),
    Mutant(
        "pool-device",
        "pool_placing.cc",
        "a block larger than the device is planned page by page",
        "  if (!found) CheckAgainstDevice(length);\n",
        "",
    ),
    Mutant(
        "slab-spare",
        "slab_map.h",
        "the place of an erased value is handed out twice",
        "      spare_.pop_back();\n",
        "      if (spare_.size() > 1) spare_.pop_back();\n",
    ),
    Mutant(
        "slab-erased",
        "slab_map.h",
        "an erased value is kept until its place is taken",
        "    slab_[number] = Value{};\n",
        "",
    ),
    Mutant(
        "slab-moves",
        "slab_map.h",
        "places of erased values are not used again",
        "    spare_.push_back(number);\n",
        "",
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
        "pool_streams.cc",
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
