#include "core/memory/range_table.h"

#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "core/base/error.h"
#include "driver/faulty_driver.h"
#include "testing/host_driver.h"

namespace cgp {
namespace {

constexpr PageId kNew = MappingPlan::kNewPage;
constexpr Granules kPageSize(4);

MappingPlan InNewRange(std::vector<PageId> pages) { return {.range = {}, .handles = pages}; }

TEST(RangeTableTest, WhatAPlanCannotMeanIsRefused) {
  HostDriver driver({.granularity = kPageSize.bytes(), .map_memory = false});
  RangeTable table(driver, kPageSize);
  EXPECT_THROW(table.Map(InNewRange({})), InternalError);
  EXPECT_EQ(driver.usage(), HostUsage{});
  table.Map(InNewRange({MappingPlan::NewHandle(2)}));
  EXPECT_THROW(table.Map(InNewRange({PageId{1}})), InternalError) << "amid a handle";
  const RangeTable::Range& range = table.range(RangeId{0});
  const uint32_t room = range.capacity - range.mapped_end;
  EXPECT_THROW(table.Map({.range = RangeId{0}, .handles = std::vector(room + 1, kNew)}),
               InternalError);
  table.Map({.range = RangeId{0}, .handles = std::vector(room, kNew)});
  table.Check();
}

// Room that was asked for is that one's alone; what a range has anyway is anybody's.
TEST(RangeTableTest, RoomThatWasAskedForIsLeftToWhoAsked) {
  HostDriver driver({.granularity = kPageSize.bytes(), .map_memory = false});
  RangeTable table(driver, kPageSize);
  table.Map(InNewRange({kNew}));
  EXPECT_EQ(table.NewestWithRoom(1), RangeId{0});
  table.Map({.range = {}, .room = 1000, .handles = {kNew}});
  EXPECT_GE(table.range(RangeId{1}).room_back, 1000u);
  EXPECT_EQ(table.NewestWithRoom(1), std::nullopt);
}

TEST(RangeTableTest, TheDestructorGoesOnAfterAFailure) {
  for (uint64_t n = 1; n <= 7; ++n) {
    HostDriver host({.granularity = kPageSize.bytes(), .map_memory = false});
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
