#include "core/memory/range_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "driver/faulty_driver.h"
#include "testing/host_driver.h"

namespace cgp {
namespace {

using ::testing::ElementsAre;

constexpr PageId kNew = MappingPlan::kNewPage;
constexpr PageId kNewPair = MappingPlan::NewHandle(2);
constexpr PageId kNewFour = MappingPlan::NewHandle(4);
constexpr Granules kPageSize(4);
constexpr uint64_t kPageBytes = 2048;

MappingPlan InNewRange(std::vector<PageId> pages) { return {.range = {}, .handles = pages}; }
MappingPlan Behind(uint32_t range, std::vector<PageId> pages) {
  return {.range = RangeId{range}, .at_front = false, .handles = pages};
}
MappingPlan Before(uint32_t range, std::vector<PageId> pages) {
  return {.range = RangeId{range}, .at_front = true, .handles = pages};
}

std::vector<PageId> PagesOf(const RangeTable& table, uint32_t range) {
  std::vector<PageId> pages;
  const RangeTable::Range& here = table.range(RangeId{range});
  for (uint32_t s = Index(here.begin()); s < Index(here.end()); ++s) {
    pages.push_back(table.page_at(SlotId{s}));
  }
  return pages;
}

// Everything that can be seen of a table.
struct View {
  uint64_t mappings;
  uint32_t slot_limit;
  std::vector<std::vector<PageId>> ranges;
  std::vector<std::pair<Address, uint32_t>> mapped_from;
  std::vector<std::vector<SlotId>> pages;
  bool operator==(const View&) const = default;
};

View See(const RangeTable& table) {
  View view{table.mapping_count(), table.slot_limit(), {}, {}, {}};
  for (uint32_t r = 0; r < table.range_count(); ++r) {
    view.ranges.push_back(PagesOf(table, r));
    const RangeTable::Range& range = table.range(RangeId{r});
    view.mapped_from.emplace_back(range.address, range.mapped_begin);
  }
  for (uint32_t p = 0; p < table.page_count(); ++p) view.pages.push_back(table.slots_of(PageId{p}));
  return view;
}

class RangeTableTest : public ::testing::Test {
 protected:
  void TearDown() override {
    if (table_) table_->Check();
    table_.reset();
    EXPECT_EQ(host_.usage(), HostUsage{}) << "the destructor left something behind";
  }

  SlotId Map(const MappingPlan& plan) { return table_->Map(plan); }
  RangeTable& table() { return *table_; }

  HostDriver host_{{.granularity = kPageBytes, .map_memory = false}};
  FaultyDriver driver_{host_};
  std::unique_ptr<RangeTable> table_ = std::make_unique<RangeTable>(driver_, kPageSize);
};

TEST_F(RangeTableTest, IsEmptyAtFirst) {
  EXPECT_EQ(table().page_count(), 0u);
  EXPECT_EQ(table().range_count(), 0u);
  EXPECT_EQ(table().slot_limit(), 0u);
  EXPECT_EQ(table().mapping_count(), 0u);
  EXPECT_EQ(host_.calls().total(), 0u);
}

TEST_F(RangeTableTest, NewPagesAreNumberedInThePlansOrder) {
  const SlotId first = Map(InNewRange({kNew, kNew, kNew}));
  EXPECT_EQ(first, table().range(RangeId{0}).begin());
  EXPECT_THAT(PagesOf(table(), 0), ElementsAre(PageId{0}, PageId{1}, PageId{2}));
  EXPECT_EQ(host_.usage().handles, 3u);
  EXPECT_EQ(host_.usage().mappings, 3u);
}

TEST_F(RangeTableTest, APageMayStandInSeveralRangesInAnyOrder) {
  const SlotId in_first = Map(InNewRange({kNew, kNew}));
  const SlotId in_second = Map(InNewRange({PageId{1}, kNew, PageId{0}}));
  EXPECT_THAT(PagesOf(table(), 1), ElementsAre(PageId{1}, PageId{2}, PageId{0}));
  EXPECT_THAT(table().slots_of(PageId{1}), ElementsAre(SlotId{Index(in_first) + 1}, in_second))
      << "oldest first";
  EXPECT_EQ(table().mapping_count(), 5u);
  EXPECT_EQ(host_.usage().handles, 3u);
  EXPECT_EQ(host_.usage().mappings, 5u);
}

TEST_F(RangeTableTest, AHandleOfSeveralPagesIsMadeAndMappedAsOne) {
  const SlotId first = Map(InNewRange({kNewFour, kNew, kNewPair}));
  EXPECT_THAT(PagesOf(table(), 0), ElementsAre(PageId{0}, PageId{1}, PageId{2}, PageId{3},
                                               PageId{4}, PageId{5}, PageId{6}));
  EXPECT_EQ(host_.usage().handles, 3u);
  EXPECT_EQ(host_.usage().mappings, 3u);
  EXPECT_EQ(host_.usage().mapped_bytes, 7 * kPageBytes);
  EXPECT_EQ(table().mapping_count(), 3u);
  EXPECT_EQ(table().page_count(), 7u);
  EXPECT_EQ(table().handle_count(), 3u);
  EXPECT_TRUE(host_.CanAccess(table().AddressOf({first}), 7 * kPageBytes, host_.device()));

  EXPECT_EQ(table().handle_begin(PageId{3}), PageId{0});
  EXPECT_EQ(table().handle_end(PageId{3}), PageId{4});
  EXPECT_EQ(table().handle_pages(PageId{4}), 1u);
  EXPECT_EQ(table().handle_begin(PageId{5}), PageId{5});
  EXPECT_EQ(table().handle_end(PageId{6}), PageId{7});
}

TEST_F(RangeTableTest, AHandleOfSeveralPagesStandsWholeAndInOrder) {
  Map(InNewRange({kNewPair, kNewFour}));
  const SlotId second = Map(InNewRange({PageId{2}, kNew, PageId{0}}));
  EXPECT_THAT(PagesOf(table(), 1), ElementsAre(PageId{2}, PageId{3}, PageId{4}, PageId{5},
                                               PageId{6}, PageId{0}, PageId{1}));
  EXPECT_EQ(table().slots_of(PageId{1}).back(), SlotId{Index(second) + 6});
  EXPECT_EQ(table().mapping_count(), 5u);
  EXPECT_EQ(host_.usage().mappings, 5u);
  const SlotId front = Map(Before(1, {kNewPair}));
  EXPECT_EQ(Index(front), Index(second) - 2);
  EXPECT_THROW(Map(InNewRange({PageId{3}})), InternalError) << "not the first page of a handle";
}

TEST_F(RangeTableTest, ShowsSaysWhetherARangeHasAPage) {
  Map(InNewRange({kNew}));
  Map(InNewRange({kNew}));
  EXPECT_TRUE(table().Shows(RangeId{0}, PageId{0}));
  EXPECT_FALSE(table().Shows(RangeId{0}, PageId{1}));
  Map(Behind(0, {PageId{1}}));
  EXPECT_TRUE(table().Shows(RangeId{0}, PageId{1}));
}

TEST_F(RangeTableTest, GrowsAtBothEndsAndReturnsTheFirstSlot) {
  const SlotId middle = Map(InNewRange({kNew}));
  const SlotId back = Map(Behind(0, {kNew, kNew}));
  const SlotId front = Map(Before(0, {kNew, kNew}));
  EXPECT_EQ(Index(back), Index(middle) + 1);
  EXPECT_EQ(Index(front), Index(middle) - 2);
  EXPECT_THAT(PagesOf(table(), 0),
              ElementsAre(PageId{3}, PageId{4}, PageId{0}, PageId{1}, PageId{2}));
  EXPECT_EQ(table().range_count(), 1u);
}

TEST_F(RangeTableTest, AddressesFollowTheSlots) {
  const SlotId first = Map(InNewRange({kNew, kNew}));
  Map(InNewRange({kNew}));
  const Address start = table().AddressOf({first});
  EXPECT_EQ(table().AddressOf({first, 3}), start + 3 * kGranuleBytes);
  EXPECT_EQ(table().AddressOf({SlotId{Index(first) + 1}}), start + kPageBytes);
  EXPECT_TRUE(host_.CanAccess(start, 2 * kPageBytes, host_.device()));
  EXPECT_FALSE(host_.CanAccess(start, 2 * kPageBytes + 1, host_.device()));
  EXPECT_FALSE(host_.CanAccess(start - 1, 1, host_.device()));
}

TEST_F(RangeTableTest, ARangeMayAtLeastDoubleAtEachEnd) {
  for (const uint32_t pages : {1u, 2u, 63u, 64u, 65u, 200u}) {
    Map(InNewRange(std::vector(pages, kNew)));
    const RangeTable::Range& range = table().range(RangeId{table().range_count() - 1});
    EXPECT_EQ(range.mapped(), pages);
    EXPECT_GE(range.mapped_begin, pages / 2);
    EXPECT_GE(range.capacity - range.mapped_end, pages / 2);
    EXPECT_GE(range.capacity, 2 * pages);
  }
}

TEST_F(RangeTableTest, TheFirstRangeHasRoomForAPool) {
  Map(InNewRange({kNew}));
  EXPECT_GE(table().range(RangeId{0}).room_back, RangeTable::kRoomOfFirst);
  Map(InNewRange({kNew}));
  EXPECT_LT(table().range(RangeId{1}).room_back, RangeTable::kRoomOfFirst);
}

TEST_F(RangeTableTest, GrowsUntilTheReservationIsUsedUpAndRefusesMore) {
  Map(InNewRange({kNew}));
  const RangeTable::Range& range = table().range(RangeId{0});
  while (range.mapped_begin > 0) Map(Before(0, {kNew}));
  while (range.capacity - range.mapped_end > 1) Map(Behind(0, {kNew}));
  const View full_but_one = See(table());
  const HostUsage usage = host_.usage();
  EXPECT_THROW(Map(Before(0, {kNew})), InternalError);
  EXPECT_THROW(Map(Behind(0, {kNew, kNew})), InternalError);
  EXPECT_EQ(See(table()), full_but_one);
  EXPECT_EQ(host_.usage(), usage);
  Map(Behind(0, {kNew}));
  EXPECT_EQ(range.mapped(), range.capacity);
  EXPECT_EQ(host_.usage().mapped_bytes, host_.usage().reserved_bytes);
}

TEST_F(RangeTableTest, APlanOfNoPagesIsRefused) {
  EXPECT_THROW(Map(InNewRange({})), InternalError);
  EXPECT_EQ(host_.usage(), HostUsage{});
}

TEST_F(RangeTableTest, RefreshAccessReachesEveryMapping) {
  Map(InNewRange({kNew, kNew}));
  Map(InNewRange({kNew, PageId{0}}));
  Map(Before(1, {PageId{1}}));
  constexpr int kPeer = 5;
  host_.AddPeer(kPeer);
  const auto peer_reaches = [&](uint32_t r) {
    const RangeTable::Range& range = table().range(RangeId{r});
    return host_.CanAccess(table().AddressOf({range.begin()}), range.mapped() * kPageBytes, kPeer);
  };
  EXPECT_FALSE(peer_reaches(0));
  table().RefreshAccess();
  EXPECT_TRUE(peer_reaches(0));
  EXPECT_TRUE(peer_reaches(1));
}

// Each driver call of a plan fails, for each n: what came before is undone, also during a capture,
// and the plan succeeds when tried again.
class RangeTableFaults : public RangeTableTest, public ::testing::WithParamInterface<bool> {
 protected:
  void FailEachCallOf(const MappingPlan& plan) {
    const View before = See(table());
    const HostUsage usage = host_.usage();
    const CaptureId capture = GetParam() ? host_.graphs().Begin(StreamId{1}) : kNoCapture;
    for (uint64_t n = 1;; ++n) {
      driver_.Arm({.call_number = n, .status = DriverStatus::kOutOfMemory});
      try {
        Map(plan);
        ASSERT_GT(n, plan.handles.size()) << "a plan has a call for each page at least";
        break;
      } catch (const DriverError& error) {
        EXPECT_EQ(error.status(), DriverStatus::kOutOfMemory);
        const auto calls = driver_.calls();
        EXPECT_EQ(error.call(), Name(calls[n - 1])) << "not the first error";
        EXPECT_EQ(std::count(calls.begin(), calls.begin() + static_cast<ptrdiff_t>(n) - 1,
                             DriverCall::kSetAccess),
                  0)
            << "what is undone may be in use";
      }
      ASSERT_EQ(See(table()), before) << "call " << n;
      ASSERT_EQ(host_.usage(), usage) << "call " << n;
      ASSERT_NO_THROW(table().Check());
    }
    driver_.Disarm();
    if (GetParam()) host_.graphs().End(capture);
  }
};

TEST_P(RangeTableFaults, FirstRange) { FailEachCallOf(InNewRange({kNew})); }

TEST_P(RangeTableFaults, NewRangeOfOldAndNewPages) {
  Map(InNewRange({kNew, kNew}));
  FailEachCallOf(InNewRange({PageId{1}, kNew, kNew, PageId{0}}));
}

TEST_P(RangeTableFaults, GrowthAtTheBack) {
  Map(InNewRange({kNew, kNew}));
  Map(InNewRange({kNew}));
  FailEachCallOf(Behind(0, {PageId{2}, kNew, kNew}));
}

TEST_P(RangeTableFaults, GrowthAtTheFront) {
  Map(InNewRange({kNew, kNew}));
  Map(InNewRange({kNew}));
  FailEachCallOf(Before(1, {kNew, PageId{1}, kNew}));
}

TEST_P(RangeTableFaults, NewRangeOfHandlesOfSeveralPages) {
  Map(InNewRange({kNew, kNewPair}));
  FailEachCallOf(InNewRange({PageId{1}, kNewFour, kNew, kNewPair, PageId{0}}));
}

TEST_P(RangeTableFaults, GrowthByHandlesOfSeveralPages) {
  Map(InNewRange({kNewFour, kNew}));
  Map(InNewRange({kNewPair}));
  FailEachCallOf(Behind(0, {PageId{5}, kNewFour, kNewPair}));
  FailEachCallOf(Before(1, {kNewPair, PageId{0}, kNew}));
}

INSTANTIATE_TEST_SUITE_P(InCaptureOrNot, RangeTableFaults, ::testing::Bool(),
                         [](const auto& capture) {
                           return std::string(capture.param ? "DuringCapture" : "Outside");
                         });

// A driver that has failed for good cannot undo either: the table forgets what it could not finish,
// and reports the error that came first.
TEST_F(RangeTableTest, ADriverThatFailsForGoodLeavesTheTableAsItWas) {
  HostDriver host({.granularity = kPageBytes, .map_memory = false});
  FaultyDriver driver(host);
  RangeTable table(driver, kPageSize);
  table.Map(InNewRange({kNew}));
  const View before = See(table);
  constexpr DriverCall kCalls[] = {DriverCall::kCreate,   DriverCall::kCreate, DriverCall::kReserve,
                                   DriverCall::kMap,      DriverCall::kMap,    DriverCall::kMap,
                                   DriverCall::kSetAccess};
  for (uint64_t n = 1; n <= std::size(kCalls); ++n) {
    driver.Arm({.call_number = n, .for_good = true});
    try {
      table.Map(InNewRange({kNew, PageId{0}, kNew}));
      FAIL() << "call " << n << " was to fail";
    } catch (const DriverError& error) {
      EXPECT_EQ(error.call(), Name(kCalls[n - 1]));
    }
    const auto count = [&](DriverCall call) { return std::ranges::count(driver.calls(), call); };
    EXPECT_EQ(count(DriverCall::kFreeAddresses), n > 3 && count(DriverCall::kUnmap) == 0 ? 1 : 0)
        << "addresses are not freed while something is mapped there";
    EXPECT_EQ(See(table), before);
    EXPECT_NO_THROW(table.Check());
  }
  driver.Disarm();
  EXPECT_NO_THROW(table.Map(InNewRange({kNew, PageId{0}, kNew})));
  EXPECT_NO_THROW(table.Check());
}

// Room that was asked for is that one's alone; what a range has anyway is anybody's.
TEST_F(RangeTableTest, RoomThatWasAskedForIsLeftToWhoAsked) {
  table().Map(InNewRange({kNew}));
  EXPECT_EQ(table().NewestWithRoom(1), RangeId{0});
  table().Map({.range = {}, .room = 1000, .handles = {kNew}});
  EXPECT_GE(table().range(RangeId{1}).room_back, 1000u);
  EXPECT_EQ(table().NewestWithRoom(1), std::nullopt);
}

TEST_F(RangeTableTest, TheDestructorGoesOnAfterAFailure) {
  for (uint64_t n = 1; n <= 7; ++n) {
    HostDriver host({.granularity = kPageBytes, .map_memory = false});
    FaultyDriver driver(host);
    {
      RangeTable table(driver, kPageSize);
      table.Map(InNewRange({kNew, kNew}));
      table.Map(InNewRange({PageId{0}}));
      driver.Arm({.call_number = n});
    }
    // Neither addresses nor handles are tried that are mapped still.
    const uint64_t left = driver.calls()[n - 1] == DriverCall::kUnmap ? 2 : 0;
    EXPECT_EQ(driver.call_count() + left, 7u) << "three mappings, two reservations, two pages";
    EXPECT_EQ(driver.failures(), 1u);
    EXPECT_LE(host.usage().mappings, 1u);
    EXPECT_LE(host.usage().reservations, 1u);
    EXPECT_LE(host.usage().handles, 1u);
  }
}

TEST_F(RangeTableTest, TheDestructorGoesOnAfterAFailureWithHandlesOfSeveralPages) {
  for (uint64_t n = 1; n <= 9; ++n) {
    HostDriver host({.granularity = kPageBytes, .map_memory = false});
    FaultyDriver driver(host);
    {
      RangeTable table(driver, kPageSize);
      table.Map(InNewRange({kNewFour, kNew, kNewPair}));
      table.Map(InNewRange({PageId{0}}));
      driver.Arm({.call_number = n});
    }
    // Neither addresses nor handles are tried that are mapped still.
    const uint64_t left = driver.calls()[n - 1] == DriverCall::kUnmap ? 2 : 0;
    EXPECT_EQ(driver.call_count() + left, 9u) << "four mappings, two reservations, three handles";
    EXPECT_EQ(driver.failures(), 1u);
    EXPECT_LE(host.usage().mappings, 1u);
    EXPECT_LE(host.usage().reservations, 1u);
    EXPECT_LE(host.usage().handles, 1u);
  }
}

TEST_F(RangeTableTest, PhysicalMemoryThatRunsOutHalfWayIsGivenBack) {
  HostDriver host(
      {.granularity = kPageBytes, .physical_limit_bytes = 3 * kPageBytes, .map_memory = false});
  RangeTable table(host, kPageSize);
  table.Map(InNewRange({kNew}));
  const HostUsage usage = host.usage();
  EXPECT_THROW(table.Map(InNewRange({kNew, kNew, kNew})), DriverError);
  EXPECT_EQ(host.usage(), usage);
  EXPECT_EQ(table.page_count(), 1u);
  table.Map(InNewRange({kNew, kNew}));
  EXPECT_EQ(table.page_count(), 3u);
}

// With real memory: one physical byte at the addresses of all ranges that show its page.
TEST(RangeTableMemory, APageIsTheSameMemoryInEveryRange) {
  constexpr uint64_t kBytes = 4096;
  HostDriver host({.granularity = kBytes});
  RangeTable table(host, Granules(kBytes / kGranuleBytes));
  const SlotId first = table.Map(InNewRange({kNew, kNew, kNew}));
  const SlotId second = table.Map(InNewRange({PageId{2}, PageId{0}}));
  const auto bytes_at = [&](SlotId slot) {
    return reinterpret_cast<char*>(table.AddressOf({slot}));
  };
  for (uint64_t i = 0; i < 3 * kBytes; ++i) bytes_at(first)[i] = static_cast<char>(i / kBytes + 1);
  EXPECT_EQ(bytes_at(second)[0], 3);
  EXPECT_EQ(bytes_at(second)[kBytes - 1], 3);
  EXPECT_EQ(bytes_at(second)[kBytes], 1);
  bytes_at(second)[2 * kBytes - 1] = 9;
  EXPECT_EQ(bytes_at(first)[kBytes - 1], 9);
}

// Random plans against lists of pages.
TEST_F(RangeTableTest, AgainstListsOfPages) {
  std::mt19937 random(4);
  const auto below = [&](std::size_t limit) { return static_cast<uint32_t>(random() % limit); };
  std::vector<std::deque<PageId>> model;
  std::vector<std::pair<PageId, uint32_t>> handles;  // first page and size
  uint32_t pages = 0;
  uint64_t mappings = 0;
  for (int step = 0; step < 400; ++step) {
    std::optional<uint32_t> range;
    if (!model.empty() && below(4) != 0) range = below(model.size());
    std::deque<PageId> none;
    std::deque<PageId>& here = range ? model[*range] : none;
    MappingPlan plan{.range = {}, .at_front = range && below(2) == 0, .handles = {}};
    if (range) plan.range = RangeId{*range};

    std::vector<PageId> mapped;
    uint32_t created = 0;
    std::vector<std::pair<PageId, uint32_t>> new_handles;
    for (uint32_t n = 1 + below(5); n > 0; --n) {
      if (handles.empty() || below(3) == 0) {
        const uint32_t size = 1 + below(5);
        plan.handles.push_back(MappingPlan::NewHandle(size));
        new_handles.push_back({PageId{pages + created}, size});
        for (uint32_t i = 0; i < size; ++i) mapped.push_back(PageId{pages + created++});
        continue;
      }
      const auto [first, size] = handles[below(handles.size())];
      if (std::ranges::count(here, first) + std::ranges::count(mapped, first) > 0) continue;
      plan.handles.push_back(first);
      for (uint32_t i = 0; i < size; ++i) mapped.push_back(PageId{Index(first) + i});
    }
    if (plan.handles.empty()) continue;
    if (range) {
      const RangeTable::Range& room = table().range(RangeId{*range});
      const uint32_t slots = plan.at_front ? room.mapped_begin : room.capacity - room.mapped_end;
      if (slots < mapped.size()) continue;
    }
    const SlotId first = Map(plan);
    pages += created;
    mappings += plan.handles.size();
    handles.insert(handles.end(), new_handles.begin(), new_handles.end());
    here.insert(plan.at_front ? here.begin() : here.end(), mapped.begin(), mapped.end());
    if (!range) model.push_back(here);

    for (uint32_t i = 0; i < mapped.size(); ++i) {
      const SlotId slot{Index(first) + i};
      ASSERT_EQ(table().page_at(slot), mapped[i]);
      ASSERT_EQ(table().range_of(slot), RangeId{range.value_or(table().range_count() - 1)});
      EXPECT_EQ(std::ranges::count(table().slots_of(mapped[i]), slot), 1);
    }
    ASSERT_NO_THROW(table().Check());
    ASSERT_EQ(table().page_count(), pages);
    ASSERT_EQ(table().mapping_count(), mappings);
    ASSERT_EQ(table().range_count(), model.size());
    ASSERT_EQ(host_.usage().mappings, mappings);
    for (uint32_t r = 0; r < model.size(); ++r) {
      ASSERT_EQ(PagesOf(table(), r), std::vector<PageId>(model[r].begin(), model[r].end()));
    }
  }
  EXPECT_GT(model.size(), 20u);
}

}  // namespace
}  // namespace cgp
