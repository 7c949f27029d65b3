#include "core/placement/ring.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "testing/host_driver.h"

namespace cgp {
namespace {

constexpr uint64_t kPages = 5000;  // that the driver has

class RingTest : public ::testing::Test {
 protected:
  static constexpr Granules kPageSize{8};

  using Extents = std::vector<std::pair<uint64_t, uint64_t>>;

  // A block of so many granules; returns where it lies.
  uint64_t Place(uint64_t length, bool is_first = false) {
    LiveBlock live;
    live.block = {.bytes = length * kGranuleBytes, .stream = StreamId{1}};
    if (!memory_.scope()) memory_.BeginScope(ScopeKind::kCapture, true, IndexSet());
    FreeList& list = memory_.BeginTake(live, {});
    const Placement place = ring_.Place(list, Granules(length), is_first);
    live.site = {place};
    EXPECT_TRUE(ring_.Holds(place.vpage));
    memory_.bytes().Take(live.site, live.length());
    live.block.address = ranges_.AddressOf(place);
    const uint64_t at = At(place.vpage, place.offset);
    blocks_.Reserve(blocks_.size() + 1);
    blocks_.Insert(live.block.address, std::move(live));
    memory_.Check();
    return at;
  }
  void Free(uint64_t at) {
    const RangeTable::Range& range = ranges_.range(RangeId{0});
    const uint64_t granule = Index(range.begin()) * kPageSize.count() + at;
    const auto place = Placement::OfGranule(granule, kPageSize);
    const Address address = ranges_.AddressOf(place);
    memory_.Free(*blocks_.Find(address), ring_.Holds(place.vpage));
    blocks_.Erase(address);
    memory_.Check();
  }
  void EndCapture() {
    memory_.EndScope(true);
    ring_.BeginCapture();
    memory_.Check();
  }
  // What is free of the ring, page by page.
  Extents FreeOfRing() const {
    Extents free;
    space().ForEachBehind(FenceId::kRing, [&](NodeId id) {
      const PageSpace::Node& node = space().node(id);
      const uint64_t begin = At(ranges_.vpages_of(node.page).front(), node.offset);
      free.emplace_back(begin, begin + node.length);
    });
    std::ranges::sort(free);
    return free;
  }
  uint64_t At(VirtualPage vpage, uint64_t offset) const {
    const uint32_t first = Index(ranges_.range(RangeId{0}).begin());
    return (Index(vpage) - first) * kPageSize.count() + offset;
  }
  const PageSpace& space() const { return memory_.bytes().space(); }

  HostDriver driver_{{.granularity = kPageSize.bytes(),
                      .physical_limit_bytes = kPages * kPageSize.bytes(),
                      .map_memory = false}};
  RangeTable ranges_{driver_, kPageSize};
  LiveBlocks blocks_;
  StreamMemory memory_{driver_, ranges_, blocks_};
  Ring ring_{ranges_, memory_};
};

// What waits for another stream too must not go on waiting for its own alone.
TEST_F(RingTest, WhatWaitsForAnotherStreamDoesSoWhenTheRingIsGone) {
  driver_.graphs().Begin(StreamId{1});
  driver_.graphs().Wait(StreamId{2}, driver_.graphs().Record(StreamId{1}));
  Place(8, /*is_first=*/true);
  Place(8);
  blocks_.ForEach([&](Address, LiveBlock& live) {
    if (live.site.vpage == ranges_.range(RangeId{0}).begin()) live.AddUse(StreamId{2});
  });
  Free(0);
  Free(8);
  memory_.DissolveRing();
  LiveBlock live;
  live.block.stream = StreamId{1};
  const FreeList& list = memory_.BeginTake(live, {});
  const auto page = [&](uint32_t vpage) {
    return ranges_.page_at(ranges_.range(RangeId{0}).begin() + vpage);
  };
  EXPECT_FALSE(list.IsWhole(page(0)));
  EXPECT_TRUE(list.IsWhole(page(1)));
}

// Captures of one block each; from the third on, the oldest is dropped behind each.
TEST_F(RingTest, ABlockLiesAcrossTheEnd) {
  std::vector<uint64_t> kept;
  for (int capture = 0; capture < 40; ++capture) {
    kept.push_back(Place(12, /*is_first=*/capture < 2));
    EndCapture();
    if (kept.size() < 3) continue;
    Free(kept.front());
    kept.erase(kept.begin());
    ring_.Reclaim();
  }
  EXPECT_EQ(ranges_.page_count(), 5U) << "as many as three blocks fill";
  EXPECT_EQ(ranges_.range_count(), 2U) << "the ring and the seam";
  EXPECT_EQ(ranges_.mapping_count(), 5U + 4U) << "the seam shows two pages of both ends";
}

TEST_F(RingTest, TheSeamWaitsForPagesThatAreAway) {
  Place(12, /*is_first=*/true);
  EndCapture();
  Place(12);
  EndCapture();
  Free(0);
  ring_.Reclaim();
  EXPECT_EQ(Place(1), 0U);
  const PageId page = ranges_.page_at(ranges_.range(RangeId{0}).begin());
  ASSERT_TRUE(ranges_.Evict(page, nullptr));
  Place(1);
  EXPECT_EQ(ranges_.range_count(), 1U);
  ranges_.BringBack(page);
  Place(1);
  EXPECT_EQ(ranges_.range_count(), 2U);
}

TEST_F(RingTest, AFullRangeMakesWayForAnother) {
  Place(8);
  const uint32_t room = ranges_.range(RangeId{0}).room_back;
  const uint64_t at = Place((uint64_t{room} + 1) * kPageSize.count());
  EXPECT_EQ(at, At(ranges_.range(RangeId{1}).begin(), 0));
  EndCapture();
  Free(0);
  EXPECT_EQ(FreeOfRing(), Extents()) << "it is no ring's any more";
}

TEST_F(RingTest, AFailureChangesNothing) {
  Place(12, /*is_first=*/true);
  const Extents before = FreeOfRing();
  memory_.bytes().Map({.range = {}, .handles = {MappingPlan::NewHandle(kPages - 100)}});
  EXPECT_THROW(Place(kPageSize.count() * 200), DriverError);
  EXPECT_EQ(FreeOfRing(), before);
  EXPECT_EQ(Place(12), 12U);
}

}  // namespace
}  // namespace cgp
