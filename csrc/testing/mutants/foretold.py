"""What is known of a capture beforehand, what is planned from it and which advice is followed.

Where it says "(advice)" the fault costs memory or mappings only: unit tests of what gives the
advice are to notice it.
"""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "guide-unchecked",
        "foresight.cc",
        "the guide is believed without a look",
        "      FitsAt(view, ranges_, space_.page_size(), like->start, length)) {",
        "      true) {",
    ),
    Mutant(
        "guide-missed",
        "capture_guide.cc",
        "what answers to nothing is not counted: a capture unlike the guide is planned (advice)",
        "    ++match.missed;\n",
        "",
    ),
    Mutant(
        "guide-window",
        "capture_guide.cc",
        "no step may be left out (advice)",
        "tells ? std::min(kWindow * (1 + match.missed_in_a_row), kWidestWindow) : 1;",
        "1;",
    ),
    Mutant(
        "guide-granules",
        "capture_guide.cc",
        "a block of a granule answers to any that follows (advice)",
        "  const bool tells = bytes > kGranuleBytes;\n",
        "  const bool tells = bytes > 0;\n",
    ),
    Mutant(
        "guide-not-largest",
        "capture_guide.cc",
        "the last capture is the guide, not the largest (advice)",
        "  if (peak_ >= largest_peak_) {",
        "  if (peak_ >= Granules(0)) {",
    ),
    Mutant(
        "guide-late-frees",
        "capture_guide.cc",
        "a free after the capture counts as one during it",
        "  // What is freed from now on was not freed during the capture.\n  ++capture_;\n",
        "",
    ),
    Mutant(
        "guide-scale",
        "capture_guide.cc",
        "one block alone sets another scale (advice)",
        "if (Answer(bytes, tried) && tried.evidence > best.evidence) best = tried;",
        "if (Answer(bytes, tried)) best = tried;",
    ),
    Mutant(
        "layout-gap-meets",
        "layout.cc",
        "a gap ends where another item begins, not before it (advice)",
        "    if (other.low >= position + length) break;\n",
        "    if (other.low > position) break;\n",
    ),
    Mutant(
        "layout-gap-lifetime",
        "layout.cc",
        "items that never live together may not share bytes (advice)",
        "other.high & (uint64_t{0} - meets)",
        "other.high & (uint64_t{0} - (meets | 1))",
    ),
    Mutant(
        "layout-alignment",
        "layout.cc",
        "the alignment is dropped behind another item (advice)",
        "    if (alignment > 1) position =",
        "    if (alignment > 1 && false) position =",
    ),
    Mutant(
        "layout-limit",
        "layout.cc",
        "an item may end behind the limit (advice)",
        "    if (item.position + item.length <= limit) {",
        "    if (item.position <= limit) {",
    ),
    Mutant(
        "layout-peak",
        "layout.cc",
        "what ends with a step still counts when the next block comes (advice)",
        "  std::sort(changes.begin(), changes.end());",
        "  std::sort(changes.begin(), changes.end(), [](auto a, auto b) {\n"
        "    return std::pair(a.first, b.second) < std::pair(b.first, a.second);\n"
        "  });",
    ),
    Mutant(
        "layout-erase",
        "layout.cc",
        "any item at the position is taken out (advice)",
        "    if (it->begin != begin) continue;\n",
        "    if (it->begin != begin && false) continue;\n",
    ),
    Mutant(
        "plan-taken",
        "capture_plan.cc",
        "a place of the plan is taken without a look whether it is free",
        "    return low >= high || view.IsFree(id, Granules(low - place * page_), "
        "Granules(high - low));",
        "    return low >= high || view.IsFree(id, Granules(0), Granules(0)) || true;",
    ),
    Mutant(
        "plan-last-granule",
        "capture_plan.cc",
        "the last granule of a page need not be free",
        "Granules(low - place * page_), Granules(high - low));",
        "Granules(low - place * page_), Granules(high - low - 1));",
    ),
    Mutant(
        "plan-places",
        "capture_plan.cc",
        "the page that a block ends in is not mapped",
        "  const uint64_t places = (end + page_ - 1) / page_;",
        "  const uint64_t places = end / page_;",
    ),
    Mutant(
        "plan-shows",
        "capture_plan.cc",
        "a handle is mapped where the home shows it already",
        "    if (home_ && ranges.Shows(*home_, handle)) continue;\n",
        "",
    ),
    Mutant(
        "plan-room",
        "capture_plan.cc",
        "the home grows beyond its addresses",
        "  if (home_ && reached - mapped > ranges.range(*home_).room_back) return std::nullopt;\n",
        "",
    ),
    Mutant(
        "plan-most-pages",
        "capture_plan.cc",
        "the limit for new pages is not kept",
        "    if (pages + (places - reached) > most_pages) return std::nullopt;\n",
        "",
    ),
    Mutant(
        "plan-base",
        "capture_plan.cc",
        "a new home's first slot is not remembered",
        "    home_ = ranges.range_of(start.slot);\n"
        "    base_ = Index(ranges.range(*home_).begin());\n",
        "    home_ = ranges.range_of(start.slot);\n",
    ),
    Mutant(
        "plan-insert",
        "capture_plan.cc",
        "a taken gap counts as free (advice)",
        "  layout_.Insert(spot.item);\n",
        "  (void)spot;\n",
    ),
    Mutant(
        "plan-fixed",
        "capture_plan.cc",
        "what lives when the plan is made is not in the way (advice)",
        "    if (at == kNotShown) continue;\n",
        "    if (at != kNotShown || at == kNotShown) continue;\n",
    ),
    Mutant(
        "plan-handles",
        "capture_plan.cc",
        "a large pool's plan makes handles of one page (advice)",
        "const uint64_t size = std::min(most - made, MostHandlePages(pool_pages + made));",
        "const uint64_t size = std::min(most - made, uint64_t{1} + 0 * pool_pages);",
    ),
    Mutant(
        "foresight-trust",
        "foresight.cc",
        "a plan may have all its pages from the first block on",
        "  if (match.evidence >= kTrusted",
        "  if (true || match.evidence >= kTrusted",
    ),
    Mutant(
        "foresight-trust-missed",
        "foresight.cc",
        "a plan is trusted although most blocks answered to nothing",
        "  if (match.evidence >= kTrusted && match.missed < match.evidence) return after;",
        "  if (match.evidence >= kTrusted) return after;",
    ),
    Mutant(
        "foresight-like",
        "foresight.cc",
        "a block goes where its like lay although a plan is followed (advice)",
        "  if (like != nullptr && !plan_ && match.scale <= 1 &&",
        "  if (like != nullptr && match.scale <= 1 &&",
    ),
    Mutant(
        "foresight-survivors",
        "foresight.cc",
        "a small block that stays does not go beside others (advice)",
        "(like == nullptr || like->freed_at == CaptureGuide::kNever)) {",
        "like == nullptr) {",
    ),
    Mutant(
        "foresight-plans",
        "foresight.cc",
        "a capture is planned as often as its scale is found anew (advice)",
        "  --plans_left_;\n",
        "",
    ),
    Mutant(
        "foresight-home",
        "foresight.cc",
        "a capture no larger than its guide maps a home (advice)",
        "(!plan_->complete() || plan_->missing_handles() * 4 > ranges_.handle_count()))",
        "!plan_->complete())",
    ),
    Mutant(
        "foresight-live",
        "foresight.cc",
        "what the capture's earlier blocks take is taken to stay for good (advice)",
        "const uint32_t end = step ? guide_.steps()[*step].freed_at : LayoutItem::kForever;",
        "const uint32_t end = step ? LayoutItem::kForever : LayoutItem::kForever;",
    ),
    Mutant(
        "foresight-largest-scale",
        "foresight.cc",
        "a scale that is most likely a mistake is planned (advice)",
        "(guide_.learned() && match.scale <= kLargestScale);",
        "guide_.learned();",
    ),
    Mutant(
        "foresight-scale",
        "foresight.cc",
        "a plan stays although the scale is another (advice)",
        "  if (plan_ && plan_->scale() != match.scale) plan_.reset();\n",
        "",
    ),
    Mutant(
        "foresight-incomplete",
        "foresight.cc",
        "a plan is followed that has no place for some (advice)",
        "  if (plan_ && plan_->complete()) {",
        "  if (plan_) {",
    ),
    Mutant(
        "foresight-unlearned",
        "foresight.cc",
        "a larger capture is planned before it is known what grows (advice)",
        "match.scale <= 1 || (guide_.learned() && match.scale <= kLargestScale);",
        "match.scale <= kLargestScale;",
    ),
    Mutant(
        "foresight-old-plan",
        "foresight.cc",
        "a capture goes on with the plan of the one before",
        "  plan_.reset();\n  plans_left_ = kMostPlans;\n",
        "  plans_left_ = kMostPlans;\n",
    ),
    Mutant(
        "foresight-missed",
        "foresight.cc",
        "a capture that the guide knows little of is planned (advice)",
        "  if (plans_left_ == 0 || match.missed > kMostMissed) return false;\n",
        "  if (plans_left_ == 0) return false;\n",
    ),
    Mutant(
        "pool-plan-memory",
        "pool.cc",
        "a plan that there is no memory for fails the allocation",
        "    if (error.status() != DriverStatus::kOutOfMemory &&\n"
        "        error.status() != DriverStatus::kOutOfAddresses)\n"
        "      throw;\n",
        "    throw;\n",
    ),
    Mutant(
        "pool-plan-errors",
        "pool.cc",
        "any error of the driver is taken for a lack of memory",
        "    if (error.status() != DriverStatus::kOutOfMemory &&\n"
        "        error.status() != DriverStatus::kOutOfAddresses)\n"
        "      throw;\n",
        "    (void)error;\n",
    ),
    Mutant(
        "pool-plan-kept",
        "pool.cc",
        "a plan that failed is tried again for the next block (advice)",
        "    foresight.GiveUpPlan();\n",
        "",
    ),
    Mutant(
        "pool-freed",
        "pool.cc",
        "the guide is not told of frees (advice)",
        "  s.foresight.Freed(live.ticket);\n",
        "",
    ),
]
