// Many small random pools: whatever placement.h decides is right by brute force over all granules.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "core/memory/free_view_test_fit.h"
#include "core/placement/placement.h"
#include "core/placement/placement_test_pool.h"

namespace cgp {
namespace {

constexpr Slack kSlacks[] = {Slack::kNone, Slack::kOnePage};

// Many small random pools: small blocks come and go, large ones are placed as a pool places them.
class RandomPlacement : public SmallPool, public ::testing::WithParamInterface<uint32_t> {
 protected:
  uint32_t Below(std::size_t limit) { return static_cast<uint32_t>(random_() % limit); }

  // The longest run of whole pages among those that the block touches, with their neighbours.
  uint64_t RunTouched(uint32_t r, uint64_t start, uint64_t length) const {
    uint64_t longest = 0;
    uint64_t run = 0;
    bool touched = false;
    for (uint64_t slot = begin(r) / kP; slot * kP < end(r); ++slot) {
      if (!IsWholePage(ranges_.page_at(SlotId{static_cast<uint32_t>(slot)}))) {
        run = 0;
        touched = false;
        continue;
      }
      ++run;
      touched = touched || (slot * kP < start + length && (slot + 1) * kP > start);
      if (touched) longest = std::max(longest, run);
    }
    return longest;
  }

  // Free granules at the start and the end of a handle.
  uint64_t Head(PageId handle) const {
    const uint32_t size = ranges_.handle_pages(handle) * kP;
    uint32_t g = 0;
    while (g < size && IsFree(PageId{Index(handle) + g / kP}, g % kP)) ++g;
    return g;
  }
  uint64_t Tail(PageId handle) const {
    const uint32_t size = ranges_.handle_pages(handle) * kP;
    uint32_t g = size;
    while (g > 0 && IsFree(PageId{Index(handle) + (g - 1) / kP}, (g - 1) % kP)) --g;
    return size - g;
  }

  std::vector<PageId> Handles() const {
    std::vector<PageId> handles;
    for (PageId handle{0}; Index(handle) < space_.page_count(); handle = ranges_.handle_end(handle))
      handles.push_back(handle);
    return handles;
  }

  // Whether edges of partly used handles hold so many granules side by side: one edge, or a tail
  // and a head of two handles.
  bool EdgesHold(uint64_t length) const {
    if (length == 0) return false;
    for (const PageId a : Handles()) {
      if (IsWholeHandle(a)) continue;
      if (Tail(a) >= length || Head(a) >= length) return true;
      for (const PageId b : Handles()) {
        if (a != b && !IsWholeHandle(b) && Tail(a) + Head(b) >= length) return true;
      }
    }
    return false;
  }

  // How many new pages a new range for the block needs.
  uint64_t NewPagesNeeded(uint64_t length) const {
    uint64_t rest = length;
    for (const PageId handle : Handles()) {
      const uint64_t pages = ranges_.handle_pages(handle);
      if (IsWholeHandle(handle)) rest -= std::min(rest, pages * kP);
    }
    uint64_t needed = 0;
    for (; rest > 0 && !EdgesHold(rest); rest -= std::min<uint64_t>(rest, kP)) ++needed;
    return needed;
  }

  // Seeds beyond the first 40 have handles of several pages.
  bool mixed() const { return GetParam() >= 40; }

  // The plan with some of its new pages in handles of several: any size may be mapped.
  MappingPlan WithLargerHandles(MappingPlan plan) {
    std::vector<PageId> handles;
    for (const PageId handle : plan.handles) {
      const bool joins = mixed() && handle == kNew && !handles.empty() &&
                         MappingPlan::IsNew(handles.back()) &&
                         handles.back() != MappingPlan::NewHandle(4) && Below(4) != 0;
      if (joins) {
        handles.back() = MappingPlan::NewHandle(MappingPlan::NewPages(handles.back()) + 1);
      } else {
        handles.push_back(handle);
      }
    }
    plan.handles = handles;
    return plan;
  }

  uint64_t Ideal(uint64_t length) const {
    return length / kP + (length % kP != 0 && !EdgesHold(length % kP) ? 1 : 0);
  }

  // Of one extension of a range: how many pages it maps, and how many granules lie in slots mapped
  // before.
  struct Extension {
    uint64_t cost;
    uint64_t reused;
  };
  // The best of all extensions that keep the rules, whatever part of a range's free end they use.
  std::optional<Extension> BestExtension(uint64_t length, Slack slack) const;
  std::size_t FreeEnds() const;
  bool Allowed(uint32_t r, bool at_front, uint64_t reused, bool edge, uint64_t length,
               Slack slack) const;

  void ExpectFindAsBruteForce(uint64_t length, Slack slack);
  void ExpectPlanKeepsTheRules(uint64_t length, Slack slack);

  bool FitsInOnePage(uint64_t length) const {
    return length < kP && BestFit(view_, Granules(length));
  }

  void ExpectFitsAsBruteForce(uint64_t length) const {
    for (uint32_t r = 0; r < ranges_.range_count(); ++r) {
      for (uint64_t start = begin(r); start < end(r); ++start) {
        const auto place = Placement::OfGranule(start, kPageSize);
        const auto whole = WholePagesAt(view_, place, Granules(length));
        ASSERT_EQ(whole.has_value(), BruteFits(r, start, length)) << "granule " << start;
        ASSERT_TRUE(!whole || *whole == WholeTouched(start, length)) << "granule " << start;
      }
    }
  }

  void ExpectLeastMappedAsBruteForce() const {
    const auto harm = [&](PageId page) {
      const uint32_t pages = ranges_.handle_pages(page);
      const bool breaks = pages > 1 && IsWholeHandle(ranges_.handle_begin(page));
      return std::pair(breaks ? pages : 0, ranges_.slots_of(page).size());
    };
    std::optional<PageId> best;
    for (uint32_t p = space_.page_count(); p-- > 0;) {
      const PageId page{p};
      if (!IsWholePage(page)) continue;
      if (!best || harm(page) <= harm(*best)) best = page;
    }
    ASSERT_EQ(WholePageToBreak(view_), best);
  }

  void PlaceSmall() {
    const PageId page{Below(space_.page_count())};
    const uint32_t offset = Below(kP);
    uint32_t length = 0;
    for (uint32_t wanted = 1 + Below(3); length < wanted && offset + length < kP; ++length) {
      if (!IsFree(page, offset + length)) break;
    }
    if (length > 0) Take(page, offset, length);
  }

  std::mt19937 random_{GetParam()};
};

void RandomPlacement::ExpectFindAsBruteForce(uint64_t length, Slack slack) {
  const uint64_t most = std::min<uint64_t>(Ideal(length) + static_cast<uint64_t>(slack),
                                           length / kP + (length % kP != 0 ? 1 : 0));
  // The oldest range that has a place, there the fewest whole pages.
  std::optional<uint32_t> range;
  uint64_t least = most;
  for (uint32_t r = 0; r < ranges_.range_count() && !range; ++r) {
    for (uint64_t start = begin(r); start < end(r); ++start) {
      if (!BruteFits(r, start, length)) continue;
      if (RunTouched(r, start, length) < std::max<uint64_t>(1, length / kP)) continue;
      if (WholeTouched(start, length) > least) continue;
      least = WholeTouched(start, length);
      range = r;
    }
  }
  const auto found = Find(length, slack);
  ASSERT_EQ(found.has_value(), range.has_value());
  if (!found) return;
  const uint64_t start = uint64_t{Index(found->slot)} * kP + found->offset;
  ASSERT_LT(found->offset, kP);
  ASSERT_EQ(ranges_.range_of(found->slot), RangeId{*range}) << "not the oldest";
  ASSERT_TRUE(BruteFits(*range, start, length));
  ASSERT_EQ(WholeTouched(start, length), least);
}

bool RandomPlacement::Allowed(uint32_t r, bool at_front, uint64_t reused, bool edge,
                              uint64_t length, Slack slack) const {
  if (!BruteFits(r, at_front ? begin(r) : end(r) - reused, reused)) return false;
  const uint64_t missing = length - reused;
  const uint64_t cost = (missing + kP - 1) / kP;
  const RangeTable::Range& range = ranges_.range(RangeId{r});
  if (cost > (at_front ? range.mapped_begin : range.capacity - range.mapped_end)) return false;
  uint64_t whole = cost;
  if (edge) {
    bool found = false;
    for (uint32_t p = 0; p < space_.page_count(); ++p) {
      const PageId page{p};
      const uint64_t room = at_front ? Tail(page) : Head(page);
      found =
          found || (room >= missing % kP && !IsWholePage(page) && !ranges_.Shows(RangeId{r}, page));
    }
    if (!found || missing % kP == 0) return false;
    --whole;
  }
  uint64_t whole_reused = 0;
  uint64_t available = 0;
  for (uint32_t p = 0; p < space_.page_count(); ++p) {
    if (IsWholePage(PageId{p}) && !ranges_.Shows(RangeId{r}, PageId{p})) ++available;
  }
  if (reused > 0) whole_reused = WholeTouched(at_front ? begin(r) : end(r) - reused, reused);
  if (whole_reused + whole > Ideal(length) + static_cast<uint64_t>(slack)) return false;
  const uint64_t made = whole > available ? whole - available : 0;
  return made <= NewPagesNeeded(length);
}

std::optional<RandomPlacement::Extension> RandomPlacement::BestExtension(uint64_t length,
                                                                         Slack slack) const {
  std::optional<Extension> best;
  for (uint32_t r = 0; r < ranges_.range_count(); ++r) {
    for (const bool at_front : {false, true}) {
      for (uint64_t reused = 1; reused < std::min(length, end(r) - begin(r) + 1); ++reused) {
        if (!Allowed(r, at_front, reused, false, length, slack) &&
            !Allowed(r, at_front, reused, true, length, slack)) {
          continue;
        }
        const uint64_t cost = (length - reused + kP - 1) / kP;
        if (best && (cost > best->cost || (cost == best->cost && reused <= best->reused))) continue;
        best = Extension{cost, reused};
      }
    }
  }
  return best;
}

std::size_t RandomPlacement::FreeEnds() const {
  std::size_t ends = 0;
  for (uint32_t r = 0; r < ranges_.range_count(); ++r) {
    ends += std::size_t{BruteFits(r, begin(r), 1)} + BruteFits(r, end(r) - 1, 1);
  }
  return ends;
}

// pre: FindMapped() found nothing, as in a pool. Carries the plan out.
void RandomPlacement::ExpectPlanKeepsTheRules(uint64_t length, Slack slack) {
  const uint64_t ideal = Ideal(length);
  const uint64_t all_whole = view_.whole_page_count();
  const uint32_t pages_before = space_.page_count();
  const std::optional<Extension> best = mixed() ? std::nullopt : BestExtension(length, slack);
  const uint64_t needed = NewPagesNeeded(length);
  const GrowthPlan plan = Plan(length, slack);

  const MappingPlan mapping = WithLargerHandles(plan.mapping);
  const std::vector<PageId>& pages = plan.mapping.handles;
  std::multiset<PageId> seen(pages.begin(), pages.end());
  for (const PageId page : pages) {
    if (page == kNew) continue;
    ASSERT_EQ(seen.count(page), 1u) << "twice in one range";
    ASSERT_EQ(page, ranges_.handle_begin(page));
    if (plan.mapping.range) {
      ASSERT_FALSE(ranges_.Shows(*plan.mapping.range, page));
    }
  }
  const bool all_are_tried = FreeEnds() <= kEndsTried && ranges_.range_count() <= kRangesLookedAt;
  if (!mixed()) {
    ASSERT_TRUE(best || !plan.mapping.range);
    ASSERT_TRUE(plan.mapping.range || !best || !all_are_tried);
  }
  if (best && plan.mapping.range) {
    ASSERT_GE(pages.size(), best->cost);
  }
  if (best && all_are_tried) {
    ASSERT_EQ(pages.size(), best->cost) << "fewer mappings would do";
    const uint64_t reused = plan.mapping.at_front
                                ? length - (pages.size() * kP - static_cast<uint64_t>(plan.start))
                                : static_cast<uint64_t>(-plan.start);
    ASSERT_EQ(reused, best->reused);
  }
  const uint64_t made = seen.count(kNew);
  ASSERT_EQ(made, plan.mapping.new_pages());
  ASSERT_LE(made, needed) << "new pages that need not be";
  if (!mixed()) {
    ASSERT_LE(needed, ideal > all_whole ? ideal - all_whole : 0);
  }
  const Placement place = plan.PlacementFrom(Map(mapping), kPageSize);
  ASSERT_EQ(space_.page_count(), pages_before + made);
  const uint64_t start = uint64_t{Index(place.slot)} * kP + place.offset;
  const uint32_t r = Index(ranges_.range_of(place.slot));
  ASSERT_TRUE(BruteFits(r, start, length));
  if (mixed()) return;
  ASSERT_LE(WholeTouched(start, length), ideal + static_cast<uint64_t>(slack));
  if (!best) {
    ASSERT_LE(WholeTouched(start, length), ideal);
  }
}

TEST_P(RandomPlacement, KeepsTheRules) {
  if (mixed()) {
    Map({.range = {}, .handles = {MappingPlan::NewHandle(4), kNew, MappingPlan::NewHandle(2)}});
  } else {
    MapNew({"....", "...."});
  }
  for (int step = 0; step < 150; ++step) {
    for (uint32_t n = Below(4); n > 0; --n) PlaceSmall();
    for (uint32_t n = Below(4); n > 0 && !used_.empty(); --n) Give(Below(used_.size()));
    const uint64_t length = 1 + Below(4 * kP);
    const Slack slack = kSlacks[Below(2)];
    ExpectFitsAsBruteForce(length);
    ExpectLeastMappedAsBruteForce();
    if (!FitsInOnePage(length)) {
      ExpectFindAsBruteForce(length, slack);
      const bool small = space_.page_count() < 14 && ranges_.range_count() < 20;
      if (small && !Find(length, slack)) ExpectPlanKeepsTheRules(length, slack);
    }
    ASSERT_NO_THROW(view_.Check());
    if (HasFatalFailure()) FAIL() << "at step " << step << ", length " << length;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomPlacement, ::testing::Range(0u, 80u));

}  // namespace
}  // namespace cgp
