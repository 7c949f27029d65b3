// What capture_plan.h says of places: where the predicted blocks of a capture go, what is mapped
// for them, and what happens where the capture does not do as predicted. Pages have four granules.
#include "core/planning/capture_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/placement/placement_test_pool.h"

namespace cgp {
namespace {

constexpr uint64_t kUnlimited = 1 << 20;  // pages

class CapturePlanTest : public SmallPool {
 protected:
  static constexpr uint32_t kNever = CaptureProfile::kNever;

  // A step of the profile: a block of so many granules, freed when so many steps were done, that
  // lay in the slot counted from the first one.
  struct Step {
    uint64_t granules = 0;
    uint32_t freed_at = kNever;
    uint32_t slot = 0;
    uint64_t offset = 0;
  };

  void TearDown() override { CheckAll(); }

  void CheckAll() const {
    space_.Check();
    ranges_.Check();
    view_.Check();
  }

  void Record(const std::vector<Step>& steps) {
    profile_.BeginCapture();
    const uint32_t first_slot = Index(ranges_.range(RangeId{0}).begin());
    std::vector<Ticket> tickets;
    uint64_t live = 0;
    for (uint32_t i = 0; i <= steps.size(); ++i) {
      for (uint32_t j = 0; j < i; ++j) {
        if (steps[j].freed_at != i) continue;
        profile_.Freed(tickets[j]);
        live -= steps[j].granules;
      }
      if (i == steps.size()) break;
      const Step& step = steps[i];
      live += step.granules;
      tickets.push_back(profile_.Allocated(profile_.Find(Bytes(step.granules)),
                                           {SlotId{first_slot + step.slot}, Granules(step.offset)},
                                           Bytes(step.granules), Granules(live)));
    }
    profile_.EndCapture();
  }

  // The first allocation of the next capture.
  CaptureProfile::Match Begin(uint64_t granules) {
    profile_.BeginCapture();
    return Next(granules);
  }
  CaptureProfile::Match Next(uint64_t granules) const { return profile_.Find(Bytes(granules)); }

  CapturePlan Make(const CaptureProfile::Match& match,
                   const std::vector<CapturePlan::LivePiece>& live = {}) const {
    return {profile_, match, ranges_, kPageSize, live};
  }

  static std::optional<CapturePlan::Spot> Find(const CapturePlan& plan,
                                               const CaptureProfile::Match& match,
                                               uint64_t granules, const FreeView& view,
                                               uint64_t most_pages) {
    if (!match.step) return std::nullopt;
    return plan.Find(*match.step, Granules(granules), view, most_pages);
  }

  // Puts the block where the plan says, which has to be free.
  std::optional<Placement> Follow(const CapturePlan& plan, const CaptureProfile::Match& match,
                                  uint64_t granules, uint64_t most_pages = kUnlimited) {
    const auto spot = Find(plan, match, granules, view_, most_pages);
    if (!spot) {
      profile_.Allocated(match, {}, Bytes(granules), Granules(granules));  // somewhere else
      return std::nullopt;
    }
    Placement start = spot->place;
    if (spot->growth) start = spot->growth->PlacementFrom(Map(spot->growth->mapping), kPageSize);
    EXPECT_LE(ranges_.page_count(), most_pages);
    EXPECT_TRUE(Fits(start, granules)) << "a place that is not free";
    if (!Fits(start, granules)) return std::nullopt;
    TakeBlock(start, granules);
    profile_.Allocated(match, start, Bytes(granules), Granules(granules));
    CheckAll();
    return start;
  }
  std::optional<Placement> FollowNext(const CapturePlan& plan, uint64_t granules,
                                      uint64_t most_pages = kUnlimited) {
    return Follow(plan, Next(granules), granules, most_pages);
  }

  void TakeBlock(Placement start, uint64_t granules) {
    uint32_t offset = static_cast<uint32_t>(start.offset.count());
    for (uint32_t slot = Index(start.slot); granules > 0; ++slot, offset = 0) {
      const auto piece = static_cast<uint32_t>(std::min<uint64_t>(granules, kP - offset));
      Take(ranges_.page_at(SlotId{slot}), offset, piece);
      granules -= piece;
    }
  }

  void FreeBlock(Placement start, uint64_t granules) {
    uint64_t offset = start.offset.count();
    for (uint32_t slot = Index(start.slot); granules > 0; ++slot, offset = 0) {
      const PageId page = ranges_.page_at(SlotId{slot});
      const uint64_t piece = std::min<uint64_t>(granules, kP - offset);
      const auto holds = [&](NodeId id) {
        return space_.node(id).page == page && space_.node(id).offset == offset;
      };
      const auto node = std::ranges::find_if(used_, holds);
      ASSERT_NE(node, used_.end());
      Give(static_cast<std::size_t>(node - used_.begin()));
      granules -= piece;
    }
  }

  uint64_t Position(Placement start) const {
    return uint64_t{Index(start.slot)} * kP + start.offset.count();
  }
  // From the first granule of the first range.
  uint64_t AtHome(Placement start) const { return Position(start) - begin(0); }

  static constexpr uint64_t Bytes(uint64_t granules) { return granules * kGranuleBytes; }

  CaptureProfile profile_;
};

// A lives beside B, C where A was: 24 granules or six pages.
constexpr uint64_t kPeakPages = 6;

class ThreeBlocks : public CapturePlanTest {
 protected:
  void SetUp() override {
    MapNew(std::vector<std::string>(kPeakPages, "...."));
    Record({{.granules = 16, .freed_at = 2},
            {.granules = 8, .freed_at = 3, .slot = 4},
            {.granules = 15, .freed_at = 3}});
  }
};

TEST_F(ThreeBlocks, ACaptureTwiceAsLargeMapsWhatItGrowsByAndNoMore) {
  const auto match = Begin(32);
  const CapturePlan plan = Make(match);
  ASSERT_TRUE(plan.complete());

  const auto a = Follow(plan, match, 32, 8);
  ASSERT_TRUE(a.has_value());
  EXPECT_EQ(ranges_.page_count(), 8U) << "as many as A needs";
  ASSERT_TRUE(FollowNext(plan, 16, 2 * kPeakPages).has_value());
  FreeBlock(*a, 32);
  ASSERT_TRUE(FollowNext(plan, 30, 2 * kPeakPages).has_value());
  EXPECT_EQ(ranges_.page_count(), 2 * kPeakPages);
  EXPECT_EQ(ranges_.mapping_count(), 2 * kPeakPages);
  EXPECT_EQ(ranges_.range_count(), 1U);
}

TEST_F(ThreeBlocks, ASmallerCaptureMapsNothing) {
  const auto match = Begin(4);
  const CapturePlan plan = Make(match);
  ASSERT_TRUE(plan.complete());
  const auto a = Follow(plan, match, 4);
  ASSERT_TRUE(a.has_value());
  ASSERT_TRUE(FollowNext(plan, 2).has_value());
  FreeBlock(*a, 4);
  ASSERT_TRUE(FollowNext(plan, 4).has_value());
  EXPECT_EQ(ranges_.mapping_count(), kPeakPages);
}

// At its birth A has the pages that are there, at C's there are more: what comes late may lie high.
TEST_F(ThreeBlocks, ABlockLiesWithinWhatIsNeededByItsBirth) {
  Record({{.granules = 10, .freed_at = 3},
          {.granules = 20, .freed_at = 3},
          {.granules = 2, .freed_at = 3}});
  const auto match = Begin(10);
  const CapturePlan plan = Make(match);
  ASSERT_TRUE(plan.complete());
  const auto a = Follow(plan, match, 10, kPeakPages);
  ASSERT_TRUE(a.has_value());
  EXPECT_LE(AtHome(*a) + 10, kPeakPages * kP) << "not behind the larger one";
  EXPECT_TRUE(FollowNext(plan, 20, 8).has_value());
  EXPECT_TRUE(FollowNext(plan, 2, 8).has_value());
}

TEST_F(ThreeBlocks, NothingGoesBeyondTheMostPages) {
  const auto match = Begin(32);
  const CapturePlan plan = Make(match);
  EXPECT_FALSE(Find(plan, match, 32, view_, 7).has_value());
  EXPECT_TRUE(Find(plan, match, 32, view_, 8).has_value());
}

TEST_F(CapturePlanTest, WhatStaysGoesToTheBottom) {
  MapNew(std::vector<std::string>(9, "...."));
  Record({{.granules = 8, .freed_at = 3}, {.granules = 5, .slot = 2}, {.granules = 4, .slot = 4}});
  const auto match = Begin(16);
  CapturePlan plan = Make(match);
  ASSERT_TRUE(plan.complete());
  const auto block = Follow(plan, match, 16);
  const auto first = FollowNext(plan, 10);
  const auto second = FollowNext(plan, 8);
  ASSERT_TRUE(block && first && second);
  EXPECT_EQ(AtHome(*first), 0U);
  EXPECT_EQ(AtHome(*second), 10U);
  EXPECT_GE(AtHome(*block), 18U) << "it must not come between those that stay";
}

TEST_F(CapturePlanTest, SmallSurvivorsTakeNoPagesOfTheirOwn) {
  MapNew(std::vector<std::string>(4, "...."));
  Record({{.granules = 8, .freed_at = 5},
          {.granules = 2},
          {.granules = 2},
          {.granules = 2},
          {.granules = 2}});
  EXPECT_TRUE(Make(Begin(8)).complete());
}

// --- Homes ---

TEST_F(CapturePlanTest, WhatDoesNotFitAnywhereIsNotComplete) {
  MapNew({"....", "xxx.", "...."});
  Record({{.granules = 12, .freed_at = 1}});
  const auto match = Begin(12);
  const std::vector<CapturePlan::LivePiece> live{{PageId{1}, Granules(0), Granules(3)}};
  const CapturePlan plan = Make(match, live);
  EXPECT_FALSE(plan.complete()) << "a capture no larger than its profile gets no new page";
}

TEST_F(CapturePlanTest, HandlesOfSeveralPagesAreMappedWholeAndOnce) {
  MapNew(std::vector<std::string>(6, "...."));
  MapNewHandle({"..xx", "....", "....", "xxxx"});
  Record({{.granules = 26, .freed_at = 2}, {.granules = 4, .freed_at = 2}});
  const std::vector<CapturePlan::LivePiece> live{{PageId{6}, Granules(2), Granules(2)},
                                                 {PageId{9}, Granules(0), Granules(4)}};
  const auto match = Begin(26);
  CapturePlan plan = Make(match, live);
  ASSERT_TRUE(plan.complete());
  const uint64_t mappings = ranges_.mapping_count();
  ASSERT_TRUE(Follow(plan, match, 26, 10).has_value());
  const auto small = FollowNext(plan, 4, 10);
  ASSERT_TRUE(small.has_value());
  EXPECT_EQ(ranges_.mapping_count(), mappings + 1);
  EXPECT_EQ(ranges_.range(RangeId{0}).mapped(), 10U);
  EXPECT_EQ(ranges_.page_count(), 10U);
}

// Other placements extend the home while the plan is followed.
class HomeGrowsMeanwhile : public CapturePlanTest {
 protected:
  void SetUp() override {
    MapNew(std::vector<std::string>(6, "...."));
    MapNew(std::vector<std::string>(4, "...."));
    Record({{.granules = 40, .freed_at = 1}});
  }
  const std::vector<PageId> others_{PageId{6}, PageId{7}, PageId{8}, PageId{9}};
};

TEST_F(HomeGrowsMeanwhile, WhatItShowsAlreadyIsNotMappedAgain) {
  const auto match = Begin(40);
  CapturePlan plan = Make(match);
  ASSERT_TRUE(plan.complete());
  Map({.range = RangeId{0}, .handles = {PageId{8}, PageId{6}}});
  const auto block = Follow(plan, match, 40, 10);
  ASSERT_TRUE(block.has_value());
  EXPECT_EQ(AtHome(*block), 0U);
  EXPECT_EQ(ranges_.mapping_count(), 14U);
}

TEST_F(HomeGrowsMeanwhile, PagesInFrontOfItMoveNoPlace) {
  const auto match = Begin(40);
  CapturePlan plan = Make(match);
  ASSERT_TRUE(plan.complete());
  const uint64_t bottom = begin(0);
  Map({.range = RangeId{0}, .at_front = true, .handles = others_});
  EXPECT_FALSE(Find(plan, match, 40, view_, 10).has_value())
      << "no page may stand twice in the home";
  const auto block = Follow(plan, match, 40, 14);
  ASSERT_TRUE(block.has_value());
  EXPECT_EQ(Position(*block), bottom);
  EXPECT_EQ(ranges_.page_count(), 14U);
}

TEST_F(HomeGrowsMeanwhile, PagesInUseBehindItAreSeen) {
  const auto match = Begin(40);
  CapturePlan plan = Make(match);
  Take(PageId{7}, 1, 1);
  EXPECT_FALSE(Find(plan, match, 40, view_, 10).has_value());
  Map({.range = RangeId{0}, .handles = others_});
  EXPECT_FALSE(Find(plan, match, 40, view_, 10).has_value());
}

// --- What lives ---

class OneLives : public CapturePlanTest {
 protected:
  // Two blocks of eight granules at any time; the first lives when the plan is made at the second.
  void SetUp() override {
    MapNew(std::vector<std::string>(4, "...."));
    Record({{.granules = 8, .freed_at = 2},
            {.granules = 8, .freed_at = 3, .slot = 2},
            {.granules = 7, .freed_at = 3}});
    const auto first = Begin(8);
    TakeBlock(start_, 8);
    profile_.Allocated(first, start_, Bytes(8), Granules(8));
  }
  std::vector<CapturePlan::LivePiece> Live(uint32_t end) const {
    return {{PageId{0}, Granules(0), Granules(4), end}, {PageId{1}, Granules(0), Granules(4), end}};
  }
  const Placement start_{SlotId{34}, Granules(0)};
};

TEST_F(OneLives, ItsPlaceIsPlannedWithFromWhenItIsToBeFreed) {
  ASSERT_EQ(ranges_.range(RangeId{0}).begin(), start_.slot);
  const auto match = Next(8);
  CapturePlan plan = Make(match, Live(2));
  ASSERT_TRUE(plan.complete());
  const auto second = Follow(plan, match, 8, 4);
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(AtHome(*second), 8U);
  FreeBlock(start_, 8);
  const auto third = FollowNext(plan, 7, 4);
  ASSERT_TRUE(third.has_value());
  EXPECT_LT(AtHome(*third), 8U);
  EXPECT_EQ(ranges_.mapping_count(), 4U);
}

TEST_F(OneLives, WhatIsNotFreedInTimeKeepsItsPlace) {
  const auto match = Next(8);
  CapturePlan plan = Make(match, Live(2));
  ASSERT_TRUE(Follow(plan, match, 8, 4).has_value());
  EXPECT_FALSE(FollowNext(plan, 7, 4).has_value());
}

TEST_F(ThreeBlocks, WhatTheStreamMayNotTakeIsNotFree) {
  // Page 0 was freed by stream 1, whose fence is 1; the other stream does not see that.
  const FreeView& other = bytes_.AddView(StreamId{2}, FenceId{2});
  Take(PageId{0}, 0, kP);
  bytes_.ReserveFence(FenceId{1});
  bytes_.Give({.node = used_.back()}, kPageSize, FenceId{1});

  const auto match = Begin(16);
  const CapturePlan plan = Make(match);
  EXPECT_TRUE(Find(plan, match, 16, view_, kPeakPages).has_value());
  EXPECT_FALSE(Find(plan, match, 16, other, kPeakPages).has_value());
}

TEST_F(CapturePlanTest, OfVeryManyStepsTheLargestArePredicted) {
  MapNew(std::vector<std::string>(6, "...."));
  constexpr uint32_t kSteps = 1200;
  std::vector<Step> steps(kSteps, {.granules = 2});
  for (uint32_t i = 0; i < kSteps; ++i) steps[i].freed_at = i + 2;
  steps[1100] = {.granules = 18, .freed_at = 1101};
  Record(steps);
  const auto match = Begin(2);
  CapturePlan plan = Make(match);
  ASSERT_TRUE(plan.complete());
  std::optional<Placement> before;
  for (uint32_t i = 0; i < kSteps; ++i) {
    const uint64_t granules = steps[i].granules;
    const auto block = i == 0 ? Follow(plan, match, granules) : FollowNext(plan, granules);
    EXPECT_TRUE(i != 1100 || block.has_value());
    if (before) FreeBlock(*before, 2);
    before = block;
    if (i == 1100) {
      FreeBlock(*before, granules);
      before.reset();
    }
  }
  EXPECT_EQ(ranges_.page_count(), 6U);
}

}  // namespace
}  // namespace cgp
