// What placement.h promises, case by case; placement_random_test.cc has the rules at large.
#include "core/placement/placement.h"

#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/placement/placement_test_pool.h"

namespace cgp {
namespace {

class PlacementTest : public SmallPool {};

// --- WholePagesAt ---

TEST_F(PlacementTest, WholePagesAreCountedWhereAllGranulesAreFree) {
  const SlotId slot = MapNew({"xx..", "....", "..xx"});
  const auto whole = [&](uint32_t slots, uint32_t offset, uint64_t length) {
    return WholePagesAt(view_, {slot + slots, offset}, Granules(length));
  };
  EXPECT_EQ(whole(0, 2, 8), 1u);
  EXPECT_EQ(whole(0, 2, 2), 0u);
  EXPECT_EQ(whole(1, 1, 2), 1u);
  EXPECT_EQ(whole(0, 2, 9), std::nullopt) << "the last page's head is too short";
  EXPECT_EQ(whole(0, 1, 8), std::nullopt) << "the first page's tail is too short";
  EXPECT_EQ(whole(2, 0, 4), std::nullopt);
  const SlotId free = MapNew({"....", "...."});
  EXPECT_EQ(WholePagesAt(view_, {free, 0}, Granules(8)), 2u);
  EXPECT_EQ(WholePagesAt(view_, {free, 0}, Granules(9)), std::nullopt);
  EXPECT_EQ(WholePagesAt(view_, {free, 1}, Granules(8)), std::nullopt);
}

// --- FindMapped ---

TEST_F(PlacementTest, FindsTheOldestRangeThatHasRoom) {
  MapNew({"...."});
  const SlotId older = MapNew({"....", "...."});
  MapNew({"....", "....", "...."});
  const auto found = Find(8, Slack::kNone);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->slot, older);
  EXPECT_EQ(found->offset, 0u);
}

TEST_F(PlacementTest, FindsTheEdgeThatSavesAWholePage) {
  const SlotId slot = MapNew({"....", "....", "xxx.", "....", "x.xx"});
  const auto found = Find(5, Slack::kNone);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->slot, SlotId{Index(slot) + 2});
  EXPECT_EQ(found->offset, 3u);
}

TEST_F(PlacementTest, WithoutSlackAnEdgeElsewhereIsReasonEnoughToRefuse) {
  MapNew({"....", "...."});
  MapNew({"xxx."});
  EXPECT_TRUE(Find(5, Slack::kOnePage));
  EXPECT_FALSE(Find(5, Slack::kNone));
  EXPECT_TRUE(Find(8, Slack::kNone)) << "a block of whole pages needs no edge";
}

TEST_F(PlacementTest, BeginsInAnEdgeOnceThereAreMany) {
  const SlotId slot = MapNew({"xxx.", "....", "....", "xxxx"});
  for (int i = 0; i < 11; ++i) MapNew({"xxx."});
  EXPECT_EQ(Find(7, Slack::kOnePage), (Placement{slot + 1, 0})) << "12 edges";
  MapNew({"xxx."});
  EXPECT_EQ(Find(7, Slack::kOnePage), (Placement{slot, 3}));
}

// More ranges in vain than a search looks at: then a range with a page more will do.
TEST_F(PlacementTest, ALongSearchSettlesForAWholePageMore) {
  for (int i = 0; i < 100; ++i) MapNew({"....", "xxxx"});
  const SlotId exact = MapNew({"xxx.", "....", "xxxx"});
  const SlotId roomy = MapNew({"....", "....", "xxxx"});
  for (uint32_t r = 0; r < ranges_.range_count(); ++r) view_.Runs(RangeId{r});
  const auto found = Find(5, Slack::kOnePage);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->slot, roomy) << "the exact one at slot " << Index(exact) << " is passed over";
  EXPECT_FALSE(Find(5, Slack::kNone));
}

// --- FindMapped where several streams ask: of equal places the least wanted ---

class PlacementTakersTest : public PlacementTest {
 protected:
  // As many streams may take a page as its number here says.
  std::optional<Placement> FindLeastWanted(uint64_t length, std::vector<uint32_t> takers,
                                           Slack slack = Slack::kNone) {
    return FindMapped(view_, Granules(length), slack,
                      [takers](PageId page) { return takers[Index(page)]; });
  }
  static Placement At(SlotId first, uint32_t slot, uint32_t offset = 0) {
    return {SlotId{Index(first) + slot}, offset};
  }
  static void ExpectAt(const std::optional<Placement>& found, const Placement& expected) {
    ASSERT_TRUE(found);
    EXPECT_EQ(found->slot, expected.slot);
    EXPECT_EQ(found->offset, expected.offset);
  }
};

TEST_F(PlacementTakersTest, TakesThePagesThatTheFewestStreamsMayTake) {
  const SlotId slot = MapNew({"....", "....", "....", "....", "...."});
  ExpectAt(FindLeastWanted(4, {1, 3, 3, 3, 3}), At(slot, 0));
  ExpectAt(FindLeastWanted(4, {3, 3, 3, 3, 1}), At(slot, 4));
  ExpectAt(FindLeastWanted(8, {3, 2, 1, 2, 2}), At(slot, 3));  // the sum of both
  ExpectAt(FindLeastWanted(8, {1, 2, 3, 2, 2}), At(slot, 0));
  ExpectAt(FindLeastWanted(20, {1, 2, 3, 2, 1}), At(slot, 0));
}

TEST_F(PlacementTakersTest, LooksThroughOtherRangesForThem) {
  const SlotId older = MapNew({"....", "xxxx"});
  const SlotId newer = MapNew({"....", "xxxx"});
  ExpectAt(FindLeastWanted(4, {1, 1, 2, 1}), At(older, 0));
  ExpectAt(FindLeastWanted(4, {2, 1, 2, 1}), At(older, 0));
  ExpectAt(FindLeastWanted(4, {2, 1, 1, 1}), At(newer, 0));
}

// It is still the fewest whole pages that count first.
TEST_F(PlacementTakersTest, AnEdgeThatSavesAWholePageCountsForMore) {
  const SlotId slot = MapNew({"....", "....", "xxx.", "....", "xxxx"});
  ExpectAt(FindLeastWanted(5, {1, 1, 9, 9, 9}, Slack::kOnePage), At(slot, 2, 3));
  ExpectAt(FindLeastWanted(8, {1, 1, 9, 9, 9}), At(slot, 0));
}

TEST_F(PlacementTakersTest, ARemainderLiesAtEitherEndOfThePagesTaken) {
  const SlotId slot = MapNew({"xxxx", "....", "....", "....", "xxxx"});
  ExpectAt(FindLeastWanted(6, {9, 2, 1, 1, 9}), At(slot, 2, 2));
  ExpectAt(FindLeastWanted(6, {9, 1, 1, 2, 9}), At(slot, 1));
}

// --- PlanGrowth ---

TEST_F(PlacementTest, TheFirstRangeIsOfNewPages) {
  const GrowthPlan plan = Plan(9, Slack::kNone);
  EXPECT_EQ(plan.mapping.range, std::nullopt);
  EXPECT_EQ(plan.mapping.handles, std::vector<PageId>(3, kNew));
  EXPECT_EQ(plan.start, 0);
}

TEST_F(PlacementTest, ExtendsAtTheBackFromTheLastFreeGranule) {
  const SlotId slot = MapNew({"xx..", "...."});
  const GrowthPlan plan = Plan(10, Slack::kNone);
  EXPECT_EQ(plan.mapping.range, RangeId{0});
  EXPECT_FALSE(plan.mapping.at_front);
  EXPECT_EQ(plan.mapping.handles, std::vector{kNew});
  EXPECT_EQ(plan.start, -6);
  const Placement place = plan.PlacementFrom(SlotId{Index(slot) + 2}, kPageSize);
  EXPECT_EQ(place.slot, slot);
  EXPECT_EQ(place.offset, 2u);
}

TEST_F(PlacementTest, ExtendsAtTheFrontUpToTheLastFreeGranule) {
  const SlotId slot = MapNew({"....", "..xx"});
  const GrowthPlan plan = Plan(9, Slack::kNone);
  EXPECT_EQ(plan.mapping.range, RangeId{0});
  EXPECT_TRUE(plan.mapping.at_front);
  EXPECT_EQ(plan.mapping.handles, std::vector{kNew});
  EXPECT_EQ(plan.start, 1);
  const Placement place = plan.PlacementFrom(SlotId{Index(slot) - 1}, kPageSize);
  EXPECT_EQ(place.slot, SlotId{Index(slot) - 1});
  EXPECT_EQ(place.offset, 1u);
}

TEST_F(PlacementTest, ExtendsOnlyWhereAddressesAreLeft) {
  MapNew({"...."});
  const RangeTable::Range& range = ranges_.range(RangeId{0});
  while (range.mapped_end < range.capacity) Map({.range = RangeId{0}, .handles = {kNew}});
  EXPECT_TRUE(Plan((range.mapped() + 1) * kP, Slack::kNone).mapping.at_front);
  while (range.mapped_begin > 0) Map({.range = RangeId{0}, .at_front = true, .handles = {kNew}});
  EXPECT_EQ(Plan((range.mapped() + 1) * kP, Slack::kNone).mapping.range, std::nullopt);
}

TEST_F(PlacementTest, ExtendsTheEndWithMostFreeOfMany) {
  MapNew({"xxxx", "....", "...."});
  for (std::size_t i = 0; i < kEndsTried; ++i) MapNew({"xxxx", "xxx."});
  EXPECT_EQ(Plan(3 * kP, Slack::kNone).mapping.range, RangeId{0});
}

TEST_F(PlacementTest, LooksForFreeEndsInTheNewestRangesOnly) {
  MapNew({"xxxx", "...."});
  for (uint32_t i = 1; i < kRangesLookedAt; ++i) MapNew({"xxxx"});
  EXPECT_EQ(Plan(2 * kP, Slack::kNone).mapping.range, RangeId{0});
  MapNew({"xxxx"});
  EXPECT_EQ(Plan(2 * kP, Slack::kNone).mapping.range, std::nullopt);
}

// The free end is long enough, but takes a whole page for a remainder that an edge can hold: the
// edge is mapped behind what the block takes of it.
TEST_F(PlacementTest, ExtendsALongFreeEndByAnEdgeToSaveAWholePage) {
  MapNew({"....", "....", "...."});
  MapNew({"xxxx", "..xx", "xxxx"});
  ASSERT_FALSE(Find(10, Slack::kNone));
  const GrowthPlan plan = Plan(10, Slack::kNone);
  EXPECT_EQ(plan.mapping.range, RangeId{0});
  EXPECT_EQ(plan.mapping.handles, std::vector{PageId{4}});
  EXPECT_EQ(plan.start, -8);
}

TEST_F(PlacementTest, ANewRangeGoesFromATailOverWholePagesToAHead) {
  MapNew({"xxxx", "....", "xxxx"});  // no range has a free end
  MapNew({"xxxx", "xxx.", "xxxx"});
  MapNew({"xxxx", "..xx", "xxxx"});
  const GrowthPlan plan = Plan(4 + 3, Slack::kNone);
  EXPECT_EQ(plan.mapping.range, std::nullopt);
  EXPECT_EQ(plan.mapping.handles, (std::vector{PageId{4}, PageId{1}, PageId{7}}));
  EXPECT_EQ(plan.start, 3);
}

TEST_F(PlacementTest, OneEdgeThatHoldsTheRemainderIsChosenShortestFirst) {
  MapNew({"x.xx", "....", "x.xx"});
  MapNew({"x...", "x.xx"});
  MapNew({"x.xx", "..xx", "xxxx"});
  const GrowthPlan plan = Plan(4 + 2, Slack::kNone);
  EXPECT_EQ(plan.mapping.handles, (std::vector{PageId{1}, PageId{6}}));
  EXPECT_EQ(plan.start, 0);
}

TEST_F(PlacementTest, APairThatLeavesLessGoesBeforeOneEdge) {
  MapNew({"xxxx", "....", "xxxx"});
  MapNew({"xxxx", "x...", "xxx.", "xxxx"});
  MapNew({"xxxx", ".xxx", "xxxx"});
  const GrowthPlan plan = Plan(4 + 2, Slack::kNone);
  EXPECT_EQ(plan.mapping.handles, (std::vector{PageId{5}, PageId{1}, PageId{8}}));
  EXPECT_EQ(plan.start, 3);
}

TEST_F(PlacementTest, OfATailAllIsTakenAndTheLastPageIsLeftATail) {
  MapNew({"xxxx", "....", "xxxx"});
  MapNew({"xxxx", "x...", "xxxx"});
  const GrowthPlan plan = Plan(4 + 1, Slack::kNone);
  EXPECT_EQ(plan.mapping.handles, (std::vector{PageId{4}, PageId{1}}));
  EXPECT_EQ(plan.start, 1);
}

TEST_F(PlacementTest, OfAHeadAllIsTakenAndTheFirstPageIsLeftAHead) {
  MapNew({"xxxx", "....", "xxxx"});
  MapNew({"xxxx", "...x", "xxxx"});
  const GrowthPlan plan = Plan(4 + 1, Slack::kNone);
  EXPECT_EQ(plan.mapping.handles, (std::vector{PageId{1}, PageId{4}}));
  EXPECT_EQ(plan.start, 2);
}

TEST_F(PlacementTest, ATailAndAHeadOfOnePageAreNotAPair) {
  MapNew({"x.xx", "....", "x.xx"});
  MapNew({".xx.", "xxxx"});
  const GrowthPlan plan = Plan(4 + 2, Slack::kNone);
  EXPECT_EQ(plan.mapping.handles, (std::vector{PageId{1}, kNew}));
}

TEST_F(PlacementTest, NewPagesAreARangeOfTheirOwnWhereNoEndIsFree) {
  MapNew({"xxxx"});
  const GrowthPlan plan = Plan(2 * kP, Slack::kNone);
  EXPECT_EQ(plan.mapping.range, std::nullopt);
  EXPECT_EQ(plan.start, 0);
  EXPECT_EQ(plan.mapping.new_pages(), 2u);
}

TEST_F(PlacementTest, NotWhereAnotherRangeNeedsFewerNewPages) {
  MapNew({"xxxx", "....", "xxxx"});
  const GrowthPlan plan = Plan(2 * kP, Slack::kNone);
  EXPECT_EQ(plan.mapping.range, std::nullopt);
  EXPECT_EQ(plan.mapping.new_pages(), 1u);
}

// --- Handles of several pages ---

TEST_F(PlacementTest, AnEdgeIsThatOfTheHandleAndMayHaveWholePages) {
  MapNew({MappingPlan::NewHandle(4), kNew}, {"xxxx", "xxx.", "....", "....", "xxxx"});
  MapNew({kNew, MappingPlan::NewHandle(2)}, {"xxxx", "....", "..xx"});
  MapNew({"xxxx", "....", "xxxx"});  // no range has a free end
  const GrowthPlan plan = Plan(9 + 4 + 6, Slack::kNone);
  EXPECT_EQ(plan.mapping.range, std::nullopt);
  EXPECT_EQ(plan.mapping.handles, (std::vector{PageId{0}, PageId{9}, PageId{6}}));
  EXPECT_EQ(plan.start, 7);
  EXPECT_EQ(plan.mapping.new_pages(), 0u);
}

TEST_F(PlacementTest, WholeHandlesAreTakenLargestFirstAsTheyFit) {
  MapNew({"....", "xxxx"});
  MapNewHandle({"....", "...."});
  MapNewHandle({"....", "....", "....", "...."});
  MapNewHandle({"....", "....", "....", "....", "....", "....", "....", "...."});
  Take(PageId{15}, 0, 4);
  const GrowthPlan plan = Plan(7 * kP, Slack::kNone);
  EXPECT_EQ(plan.mapping.new_pages(), 0u);
  const Placement place = plan.PlacementFrom(Map(plan.mapping), kPageSize);
  EXPECT_EQ(Leftover(uint64_t{Index(place.slot)} * kP + place.offset, 7 * kP), 0u);
}

TEST_F(PlacementTest, AHandleOfTheBlocksSizeIsTakenBeforeSmallerOnes) {
  MapNew({"xxxx", "....", "xxxx"});
  MapNew({kNew, MappingPlan::NewHandle(3), kNew}, {"xxxx", "....", "....", "....", "xxxx"});
  MapNew({kNew, MappingPlan::NewHandle(2), kNew}, {"xxxx", "....", "....", "xxxx"});
  const GrowthPlan plan = Plan(3 * kP, Slack::kNone);
  EXPECT_EQ(plan.mapping.handles, (std::vector{PageId{4}}));
}

TEST_F(PlacementTest, AHandleIsBrokenOnlyWhereNothingElseHolds) {
  MapNew({kNew, MappingPlan::NewHandle(4), kNew}, {"xxxx", "....", "....", "....", "....", "xxxx"});
  MapNew({"xxxx", "....", "xxxx"});  // no range has a free end
  const GrowthPlan plan = Plan(kP + 1, Slack::kNone);
  EXPECT_EQ(plan.mapping.handles, (std::vector{PageId{7}, PageId{1}}));
}

TEST_F(PlacementTest, NewPagesComeInHandlesAsLargeAsSuitsThePoolAndTheBlock) {
  const auto sizes = [&](uint64_t pages, bool several_streams = false) {
    std::multiset<uint32_t> seen;
    const Granules length(pages * kP);
    const GrowthPlan plan = PlanGrowth(view_, length, Slack::kNone, several_streams);
    for (const PageId handle : plan.mapping.handles) seen.insert(MappingPlan::NewPages(handle));
    return seen;
  };
  EXPECT_EQ(sizes(111).count(1), 111u) << "two pages are more than a 56th of them";
  EXPECT_EQ(sizes(112).count(2), 56u);
  EXPECT_EQ(sizes(395).count(7), 53u) << "all about as large as each other";
  EXPECT_EQ(sizes(395).count(6), 4u);
  EXPECT_EQ(sizes(111, /*several_streams=*/true).count(1), 111u);
  EXPECT_EQ(sizes(112, /*several_streams=*/true).count(2), 56u);
  EXPECT_EQ(sizes(56 * 64).count(64), 56u);
  EXPECT_EQ(sizes(56 * 128).count(64), 112u) << "more are too many for any pool";
  MapNew(std::vector<std::string>(64 * 64, "xxxx"));
  EXPECT_EQ(sizes(64), (std::multiset<uint32_t>{32, 32})) << "half of what is made together";
  EXPECT_EQ(sizes(65), (std::multiset<uint32_t>{32, 33}));
  EXPECT_EQ(sizes(3), (std::multiset<uint32_t>{1, 2})) << "not only powers of two";
}

TEST(Placement, HandlesAreAsLargeAsSuitsThePoolOrTheBlock) {
  EXPECT_EQ(MostHandlePages(100 * 100, 1000), 64u) << "more are too many for any pool";
  EXPECT_EQ(MostHandlePages(112, 1000), 2u) << "a 56th of the pool";
  EXPECT_EQ(MostHandlePages(5000, 9), 5u) << "half of what is made together";
  EXPECT_EQ(MostHandlePages(20, 20), 1u);
}

// --- MappingAhead ---

TEST_F(PlacementTest, PagesAheadBelongToTheLastNewHandle) {
  MapNew(std::vector<std::string>(64 * 192, "xxxx"));
  const GrowthPlan plan = Plan(70 * kP, Slack::kNone);
  ASSERT_EQ(plan.mapping.handles,
            (std::vector{MappingPlan::NewHandle(35), MappingPlan::NewHandle(35)}));
  const auto ahead = plan.MappingAhead(ranges_, 8);
  ASSERT_TRUE(ahead);
  EXPECT_EQ(ahead->handles, (std::vector{MappingPlan::NewHandle(35), MappingPlan::NewHandle(43)}));
  EXPECT_EQ(plan.MappingAhead(ranges_, 1000)->handles.back(), MappingPlan::NewHandle(64))
      << "no larger than suits the pool";
  EXPECT_FALSE(plan.MappingAhead(ranges_, 0));
  EXPECT_FALSE(Plan(128 * kP, Slack::kNone).MappingAhead(ranges_, 8)) << "as large as suits it";
}

TEST_F(PlacementTest, NoPagesAreMadeAheadWhereSomethingElseComesLast) {
  MapNew(std::vector<std::string>(3 * 192, "xxxx"));
  GrowthPlan plan{.mapping = {.range = {}, .handles = {kNew, PageId{1}}}};
  EXPECT_FALSE(plan.MappingAhead(ranges_, 2));
  std::swap(plan.mapping.handles.front(), plan.mapping.handles.back());
  EXPECT_TRUE(plan.MappingAhead(ranges_, 2));
  plan.mapping.at_front = true;
  EXPECT_FALSE(plan.MappingAhead(ranges_, 2)) << "the block comes last";
}

TEST_F(PlacementTest, PagesAheadNeedRoomInTheRange) {
  MapNew(std::vector<std::string>(4 * 192, "xxxx"));
  MapNew({"xxxx"});
  const uint32_t room = ranges_.range(RangeId{1}).room_back;
  const GrowthPlan plan{.mapping = {.range = RangeId{1}, .handles = std::vector(room - 2, kNew)}};
  EXPECT_TRUE(plan.MappingAhead(ranges_, 2));
  EXPECT_FALSE(plan.MappingAhead(ranges_, 3));
  const GrowthPlan anew{.mapping = {.range = {}, .handles = std::vector(room - 2, kNew)}};
  EXPECT_TRUE(anew.MappingAhead(ranges_, 3)) << "a new range gets as much room as it needs";
}

// --- WholePageToBreak ---

TEST_F(PlacementTest, WholePageToBreakSparesWholeHandles) {
  MapNewHandle({"....", "....", "....", "...."});
  MapNewHandle({"....", "...."});
  EXPECT_EQ(WholePageToBreak(view_), PageId{4}) << "the smallest handle";
  Take(PageId{1}, 0, 1);
  EXPECT_EQ(WholePageToBreak(view_), PageId{0}) << "of the one in use already";
}

TEST_F(PlacementTest, WholePageToBreakIsTheFirstOfThoseInTheFewestRanges) {
  EXPECT_EQ(WholePageToBreak(view_), std::nullopt);
  MapNew({"....", "x...", "....", "...."});
  MapOld({PageId{0}, PageId{1}});
  EXPECT_EQ(WholePageToBreak(view_), PageId{2});
  MapOld({PageId{2}, PageId{3}});
  MapOld({PageId{2}});
  EXPECT_EQ(WholePageToBreak(view_), PageId{0});
}

TEST_F(PlacementTest, WholePageToBreakIsTheOneThatTheFewestStreamsMayTake) {
  MapNewHandle({"....", "...."});
  MapNew({"....", "....", "....", "...."});
  MapOld({PageId{3}});
  const auto least = [&](std::vector<uint32_t> takers) {
    return WholePageToBreak(view_, [&](PageId page) { return takers[Index(page)]; });
  };
  EXPECT_EQ(least({1, 1, 3, 2, 2, 2}), PageId{4}) << "in fewer ranges than 3";
  EXPECT_EQ(least({1, 1, 3, 1, 2, 2}), PageId{3}) << "however many ranges show it";
  EXPECT_EQ(least({0, 0, 3, 3, 3, 3}), PageId{2}) << "no whole handle of several pages";
}

}  // namespace
}  // namespace cgp
