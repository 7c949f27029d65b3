#include "core/memory/range_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
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
    pages.push_back(table.page_at(VirtualPage{s}));
  }
  return pages;
}

// Everything that can be seen of a table.
struct View {
  uint64_t mappings;
  uint32_t vpage_limit;
  std::vector<std::vector<PageId>> ranges;
  std::vector<std::pair<Address, uint32_t>> mapped_from;
  std::vector<std::vector<VirtualPage>> pages;
  bool operator==(const View&) const = default;
};

View See(const RangeTable& table) {
  View view{table.mapping_count(), table.vpage_limit(), {}, {}, {}};
  for (uint32_t r = 0; r < table.range_count(); ++r) {
    view.ranges.push_back(PagesOf(table, r));
    const RangeTable::Range& range = table.range(RangeId{r});
    view.mapped_from.emplace_back(range.address, range.mapped_begin);
  }
  for (uint32_t p = 0; p < table.page_count(); ++p)
    view.pages.push_back(table.vpages_of(PageId{p}));
  return view;
}

class RangeTableTest : public ::testing::Test {
 protected:
  void TearDown() override {
    if (table_) table_->Check();
    table_.reset();
    EXPECT_EQ(host_.usage(), HostUsage{}) << "the destructor left something behind";
  }

  VirtualPage Map(const MappingPlan& plan) { return table_->Map(plan); }
  RangeTable& table() { return *table_; }

  HostDriver host_{{.granularity = kPageBytes, .map_memory = false}};
  FaultyDriver driver_{host_};
  std::unique_ptr<RangeTable> table_ = std::make_unique<RangeTable>(driver_, kPageSize);
};

TEST_F(RangeTableTest, AHandleOfSeveralPagesStandsWholeAndInOrder) {
  Map(InNewRange({kNewPair, kNewFour}));
  const VirtualPage second = Map(InNewRange({PageId{2}, kNew, PageId{0}}));
  EXPECT_THAT(PagesOf(table(), 1), ElementsAre(PageId{2}, PageId{3}, PageId{4}, PageId{5},
                                               PageId{6}, PageId{0}, PageId{1}));
  EXPECT_EQ(table().vpages_of(PageId{1}).back(), VirtualPage{Index(second) + 6});
  EXPECT_EQ(table().mapping_count(), 5u);
  EXPECT_EQ(host_.usage().mappings, 5u);
  const VirtualPage front = Map(Before(1, {kNewPair}));
  EXPECT_EQ(Index(front), Index(second) - 2);
  EXPECT_THROW(Map(InNewRange({PageId{3}})), InternalError) << "not the first page of a handle";
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

// Room that was asked for is that one's alone; what a range has anyway is anybody's.
TEST_F(RangeTableTest, RoomThatWasAskedForIsLeftToWhoAsked) {
  table().Map(InNewRange({kNew}));
  EXPECT_EQ(table().NewestWithRoom(1), RangeId{0});
  table().Map({.range = {}, .room = 1000, .handles = {kNew}});
  EXPECT_GE(table().range(RangeId{1}).room_back, 1000u);
  EXPECT_EQ(table().NewestWithRoom(1), std::nullopt);
}

TEST_F(RangeTableTest, ARowEndsWithThePagesThatAreLeft) {
  const VirtualPage gone = Map(InNewRange({kNewFour}));
  Map(InNewRange({kNewPair}));
  std::vector<bool> keep(table().vpage_limit(), true);
  std::fill_n(keep.begin() + Index(gone), 4, false);
  table().Shrink(*table().PrepareShrink(keep));
  EXPECT_EQ(table().page_count(), 2U);
  EXPECT_EQ(table().RowEnd(PageId{0}), PageId{2});
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

}  // namespace
}  // namespace cgp
