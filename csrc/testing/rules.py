"""The rules of prediction and of placement, each with what takes it out."""

from __future__ import annotations

from mutants.mutant import Mutant

RULES = [
    Mutant(
        "guided-place",
        "foresight.cc",
        "a block goes where its like lay in the largest capture",
        "if (like != nullptr && !plan_ && no_larger &&",
        "if (false && like != nullptr && !plan_ && no_larger &&",
    ),
    Mutant(
        "plan",
        "foresight.cc",
        "a capture that is larger, or finds a place taken, is packed beforehand",
        "if (planned_ || live_blocks > kMostLiveBlocks) return false;",
        "if (planned_ || live_blocks + 1 > 0) return false;",
    ),
    Mutant(
        "plan-limit",
        "foresight.cc",
        "a plan makes no page that what lives does not need",
        "return std::max<uint64_t>(space_.page_count(), needed);",
        "return std::max<uint64_t>(~uint64_t{0}, needed);",
    ),
    Mutant(
        "packing-limit",
        "capture_plan.cc",
        "a plan packs each block into the pages that there are or must be by then",
        "item.limit = std::min(most, std::max<uint64_t>(ranges.page_count(), needed)) * page_;",
        "item.limit = (most + 0 * needed) * page_;",
    ),
    Mutant(
        "lives-at-peak",
        "foresight.cc",
        "what is foretold to live at the peak is placed without slack",
        "advice.lives_at_peak = like != nullptr && like->lives_at_peak;",
        "advice.lives_at_peak = false;",
    ),
    Mutant(
        "near-peak",
        "placer.cc",
        "what brings a pool near its peak is placed without slack",
        "constexpr uint64_t kPartOfPeak = 4;",
        "constexpr uint64_t kPartOfPeak = 1'000'000'000;",
    ),
    Mutant(
        "small-apart",
        "free_view.cc",
        "small blocks gather in pages where no large one lies",
        "(space_.holds_large(page) ? static_cast<uint32_t>(space_.page_size().count()) : 0);",
        "(space_.holds_large(page) ? 0 : 0);",
    ),
    Mutant(
        "large-handles",
        "placement.cc",
        "new pages come in handles of up to a 192nd of the pool",
        "const uint64_t most = std::min(pool_pages / kPartOfPool, kMostHandlePages);",
        "const uint64_t most = std::min(pool_pages / kPartOfPool, 0 * kMostHandlePages);",
    ),
    Mutant(
        "idle-handles",
        "placement.cc",
        "handles are a quarter as large while pages idle",
        "idle > pool_pages / kMuchIdle ? most / kLessWhenIdle : most",
        "idle > pool_pages / kMuchIdle ? most + 0 * kLessWhenIdle : most",
    ),
    Mutant(
        "extend-back",
        "placement.cc",
        "a range is extended behind its end",
        "      ConsiderExtending(RangeId{r}, /*at_front=*/false);\n",
        "",
    ),
    Mutant(
        "extend-front",
        "placement.cc",
        "a range is extended before its start",
        "      ConsiderExtending(RangeId{r}, /*at_front=*/true);\n",
        "",
    ),
]
