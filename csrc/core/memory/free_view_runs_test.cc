#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "core/base/error.h"
#include "core/memory/free_view.h"
#include "testing/host_driver.h"

namespace cgp {
namespace {

constexpr PageId kNew = MappingPlan::kNewPage;

// Pages, a view of them, and a bool for each page beside them.
class FreeViewRunsTest : public ::testing::Test {
 protected:
  void TearDown() override { Check(); }

  void Check() const {
    ASSERT_NO_THROW(view_.Check());
    for (uint32_t p = 0; p < free_.size(); ++p) ASSERT_EQ(view_.IsWhole(PageId{p}), free_[p]);
  }

  SlotId Map(const MappingPlan& plan) {
    const auto old_pages = static_cast<uint32_t>(free_.size());
    const SlotId first = table_.Map(plan);
    while (space_.page_count() < table_.page_count()) space_.AddPage();
    free_.resize(space_.page_count(), true);
    nodes_.resize(space_.page_count());
    view_.IndexMapping(first, table_.PagesOf(plan), old_pages);
    return first;
  }
  SlotId MapNew(uint32_t pages) {
    return Map({.range = {}, .handles = std::vector<PageId>(pages, kNew)});
  }

  void SetFree(PageId page, bool free) { SetFree(page, PageId{Index(page) + 1}, free); }
  void SetFree(PageId begin, PageId end, bool free) {
    if (!free) view_.UnindexPages(begin, end);
    for (PageId page = begin; page < end; ++page) {
      if (free_[Index(page)] == free) continue;
      free_[Index(page)] = free;
      NodeId& node = nodes_[Index(page)];
      if (free) {
        space_.Give(node, FenceId::kOpen);
      } else {
        node = space_.Take(space_.first(page), page, Granules(0), space_.page_size());
      }
    }
    if (free) view_.IndexPages(begin, end);
  }

  RangeId newest() const { return RangeId{table_.range_count()}; }

  bool IsFree(uint32_t slot) const { return free_[Index(table_.page_at(SlotId{slot}))]; }

  std::vector<std::pair<uint32_t, uint32_t>> BruteRuns(uint32_t r) const {
    std::vector<std::pair<uint32_t, uint32_t>> runs;  // begin and length
    const RangeTable::Range& range = table_.range(RangeId{r});
    for (uint32_t s = Index(range.begin()); s < Index(range.end()); ++s) {
      if (!IsFree(s)) continue;
      if (!runs.empty() && runs.back().first + runs.back().second == s) {
        ++runs.back().second;
      } else {
        runs.emplace_back(s, 1);
      }
    }
    return runs;
  }

  uint32_t LongestRun(uint32_t r) const {
    uint32_t longest = 0;
    for (const auto& [begin, length] : BruteRuns(r)) longest = std::max(longest, length);
    return longest;
  }

  std::vector<std::pair<uint32_t, uint32_t>> Runs(uint32_t r) {
    std::vector<std::pair<uint32_t, uint32_t>> runs;
    for (const FreeRun& run : view_.Runs(RangeId{r})) {
      runs.emplace_back(Index(run.begin), run.length);
      EXPECT_EQ(Index(run.end()), Index(run.begin) + run.length);
    }
    return runs;
  }

  void ExpectEndsAsBruteForce(uint32_t r) {
    const RangeTable::Range& range = table_.range(RangeId{r});
    uint32_t front = 0;
    while (front < range.mapped() && IsFree(Index(range.begin()) + front)) ++front;
    uint32_t back = 0;
    while (back < range.mapped() && IsFree(Index(range.end()) - 1 - back)) ++back;
    ASSERT_EQ(view_.FreeAtEnd(RangeId{r}, /*at_front=*/true), front);
    ASSERT_EQ(view_.FreeAtEnd(RangeId{r}, /*at_front=*/false), back);
  }

  // From one slot of the range on, so many.
  void ExpectAllFreeAsBruteForce(uint32_t r, uint32_t from, uint32_t count) const {
    const RangeTable::Range& range = table_.range(RangeId{r});
    const uint32_t begin = Index(range.begin()) + from % range.mapped();
    const uint32_t end = std::min(begin + count, Index(range.end()));
    bool all = true;
    for (uint32_t s = begin; s < end; ++s) all &= IsFree(s);
    ASSERT_EQ(view_.AllFree(SlotId{begin}, SlotId{end}), all);
  }

  // OldestMayHold() passes over no range that holds such a run; with exact bounds it finds the
  // oldest that does.
  void ExpectOldest(uint32_t pages, uint32_t from, bool exact) {
    const auto found = view_.OldestMayHold(pages, RangeId{from});
    const uint32_t behind = found ? Index(*found) : table_.range_count();
    ASSERT_LE(behind, table_.range_count());
    for (uint32_t r = from; r < behind; ++r) {
      ASSERT_LT(LongestRun(r), pages) << "range " << r << " is older than what was found";
    }
    if (found) {
      ASSERT_GE(behind, from);
      if (exact) {
        ASSERT_GE(LongestRun(behind), pages);
      }
    }
  }

  HostDriver driver_{{.granularity = 2048, .map_memory = false}};
  RangeTable table_{driver_, Granules(4)};
  PageSpace space_{Granules(4)};
  FreeView view_{space_, table_, StreamId{1}, FenceId{1}};
  std::vector<bool> free_;
  std::vector<NodeId> nodes_;  // of used pages
};

TEST_F(FreeViewRunsTest, WithoutRangesFindsNothing) {
  EXPECT_EQ(view_.OldestMayHold(1, RangeId{0}), std::nullopt);
  view_.Rebuild();
  EXPECT_EQ(view_.OldestMayHold(1, RangeId{0}), std::nullopt);
}

TEST_F(FreeViewRunsTest, RunsAreMaximalAndInTheOrderOfAddresses) {
  const uint32_t first = Index(MapNew(6));
  SetFree(PageId{0}, false);
  SetFree(PageId{3}, false);
  EXPECT_EQ(Runs(0), (std::vector<std::pair<uint32_t, uint32_t>>{{first + 1, 2}, {first + 4, 2}}));
  EXPECT_EQ(view_.FreeAtEnd(RangeId{0}, /*at_front=*/true), 0u);
  EXPECT_EQ(view_.FreeAtEnd(RangeId{0}, /*at_front=*/false), 2u);
}

TEST_F(FreeViewRunsTest, RunsReachAcrossWords) {
  MapNew(200);
  EXPECT_EQ(Runs(0).size(), 1u);
  EXPECT_EQ(view_.FreeAtEnd(RangeId{0}, /*at_front=*/true), 200u);
  EXPECT_EQ(view_.FreeAtEnd(RangeId{0}, /*at_front=*/false), 200u);
  for (uint32_t taken = 0; taken < 200; ++taken) {
    SetFree(PageId{taken}, false);
    ASSERT_EQ(Runs(0), BruteRuns(0));
    ExpectEndsAsBruteForce(0);
    SetFree(PageId{taken}, true);
  }
}

TEST_F(FreeViewRunsTest, APageIsFreeOrTakenInEveryRangeThatShowsIt) {
  MapNew(2);
  Map({.range = {}, .handles = {PageId{1}, PageId{0}}});
  SetFree(PageId{1}, false);
  EXPECT_EQ(view_.FreeAtEnd(RangeId{0}, /*at_front=*/true), 1u);
  EXPECT_EQ(view_.FreeAtEnd(RangeId{0}, /*at_front=*/false), 0u);
  EXPECT_EQ(view_.FreeAtEnd(RangeId{1}, /*at_front=*/true), 0u);
  EXPECT_EQ(view_.FreeAtEnd(RangeId{1}, /*at_front=*/false), 1u);
}

// The bound's life: taking leaves it, looking makes it exact, freeing raises it to the whole range.
TEST_F(FreeViewRunsTest, BoundsAreWorkedOutOnlyWhenLookedAt) {
  MapNew(4);
  SetFree(PageId{1}, false);
  EXPECT_EQ(view_.OldestMayHold(4, RangeId{0}), RangeId{0}) << "not looked at yet";
  view_.Runs(RangeId{0});
  EXPECT_EQ(view_.OldestMayHold(3, RangeId{0}), std::nullopt);
  EXPECT_EQ(view_.OldestMayHold(2, RangeId{0}), RangeId{0});
  SetFree(PageId{3}, false);
  SetFree(PageId{3}, true);
  EXPECT_EQ(view_.OldestMayHold(3, RangeId{0}), std::nullopt) << "nobody has looked meanwhile";
  SetFree(PageId{3}, false);
  view_.Runs(RangeId{0});
  SetFree(PageId{3}, true);
  EXPECT_EQ(view_.OldestMayHold(4, RangeId{0}), RangeId{0}) << "what it has become is not known";
  EXPECT_EQ(view_.OldestMayHold(5, RangeId{0}), std::nullopt) << "it has no more pages than this";
}

TEST_F(FreeViewRunsTest, AnExtendedRangeMayHoldMore) {
  MapNew(2);
  EXPECT_EQ(view_.OldestMayHold(3, RangeId{0}), std::nullopt);
  Map({.range = RangeId{0}, .at_front = true, .handles = {kNew}});
  EXPECT_EQ(view_.OldestMayHold(3, RangeId{0}), RangeId{0});
  EXPECT_EQ(Runs(0), BruteRuns(0));
}

// Slots follow their pages when a search asks; a page that is mapped before that has them all then.
TEST_F(FreeViewRunsTest, SlotsThatAreMappedBetweenTwoSearches) {
  MapNew(3);
  EXPECT_EQ(Runs(0), BruteRuns(0));
  SetFree(PageId{1}, false);
  Map({.range = {}, .handles = {PageId{0}, PageId{1}}});
  SetFree(PageId{1}, true);
  EXPECT_EQ(Runs(1), BruteRuns(1));
  SetFree(PageId{0}, false);
  SetFree(PageId{1}, false);
  SetFree(PageId{1}, true);
  Map({.range = RangeId{1}, .handles = {PageId{2}}});
  EXPECT_EQ(Runs(0), BruteRuns(0));
  EXPECT_EQ(Runs(1), BruteRuns(1));
  Check();
}

TEST_F(FreeViewRunsTest, NewestOfManyRanges) {
  for (uint32_t count = 1; count <= 9; ++count) {
    MapNew(count % 3 + 1);
    for (uint32_t before = 0; before <= count; ++before) {
      for (uint32_t pages = 1; pages <= 4; ++pages) {
        ExpectOldest(pages, before, /*exact=*/true);
        if (HasFatalFailure()) FAIL() << count << " ranges, before " << before;
      }
    }
  }
}

TEST_F(FreeViewRunsTest, RebuildForgetsWhatIsNoLongerSo) {
  MapNew(3);
  MapNew(70);
  for (uint32_t page = 0; page < 73; ++page) {
    nodes_[page] = space_.Take(space_.first(PageId{page}), PageId{page}, Granules(0), Granules(4));
  }
  std::fill(free_.begin(), free_.end(), false);
  view_.Rebuild();
  EXPECT_EQ(view_.OldestMayHold(1, RangeId{0}), std::nullopt);
  EXPECT_EQ(view_.FreeAtEnd(RangeId{1}, /*at_front=*/true), 0u);
  SetFree(PageId{5}, true);
  EXPECT_EQ(Runs(1), BruteRuns(1));
}

TEST_F(FreeViewRunsTest, AgainstBruteForce) {
  std::mt19937 random(5);
  const auto below = [&](std::size_t limit) { return static_cast<uint32_t>(random() % limit); };
  for (int step = 0; step < 3000; ++step) {
    if (table_.range_count() < 24 && below(40) == 0) {
      MapNew(below(6) == 0 ? 60 + below(80) : 1 + below(6));
    } else if (!free_.empty() && below(30) == 0) {
      // Some pages again, in a new range or at the end of an old one.
      MappingPlan plan{.range = {}, .at_front = below(2) == 0, .handles = {}};
      if (table_.range_count() == 24 || below(3) != 0) plan.range = RangeId{below(Index(newest()))};
      const auto page = PageId{below(free_.size())};
      const bool shown = plan.range && table_.Shows(*plan.range, page);
      plan.handles = {shown ? kNew : page};
      if (plan.range) {
        const RangeTable::Range& range = table_.range(*plan.range);
        if ((plan.at_front ? range.mapped_begin : range.capacity - range.mapped_end) == 0) continue;
      } else {
        plan.at_front = false;
      }
      Map(plan);
    } else if (!free_.empty()) {
      const PageId begin{below(free_.size())};
      const auto left = static_cast<uint32_t>(free_.size()) - Index(begin);
      const uint32_t count = below(4) == 0 ? 1 + below(left) : 1;
      SetFree(begin, PageId{Index(begin) + count}, !free_[Index(begin)]);
    } else {
      continue;
    }
    Check();
    if (step % 50 != 0 && below(3) != 0) continue;  // searches come after several changes
    ExpectOldest(1 + below(8), below(Index(newest()) + 1), /*exact=*/false);
    if (table_.range_count() > 0) {
      const uint32_t r = below(Index(newest()));
      ExpectEndsAsBruteForce(r);
      ExpectAllFreeAsBruteForce(r, below(70), below(70));
      if (below(2) == 0) {
        ASSERT_EQ(Runs(r), BruteRuns(r));
      }
    }
    Check();
    if (step % 50 == 0) {
      for (uint32_t r = 0; r < table_.range_count(); ++r) ASSERT_EQ(Runs(r), BruteRuns(r));
      for (uint32_t pages = 1; pages < 10; ++pages) ExpectOldest(pages, 0, true);
    }
    if (HasFatalFailure()) FAIL() << "at step " << step;
  }
  EXPECT_EQ(table_.range_count(), 24u);
}

}  // namespace
}  // namespace cgp
