#include "core/memory/ring.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "testing/host_driver.h"

namespace cgp {
namespace {

constexpr Granules kPageSize{8};

class RingTest : public ::testing::Test {
 protected:
  // A block of so many granules.
  Site Place(uint64_t length, bool first_of_kind = false) {
    if (const uint64_t pages = ring_.Seek(Granules(length), first_of_kind); pages > 0) {
      const MappingPlan plan{
          .range = ring_.part(), .room = 64, .handles = std::vector(pages, MappingPlan::kNewPage)};
      ring_.Grow(bytes_.Map(plan), pages);
    }
    Site site = ring_.Take(Granules(length));
    bytes_.Take(site, Granules(length));
    bytes_.Check();
    return site;
  }
  void Free(const Site& site, uint64_t length) {
    ring_.ReserveAdd(1);
    ring_.Add(site, Granules(length));
    bytes_.Check();
  }
  uint64_t At(const Site& site) const {
    const uint32_t first = Index(ranges_.range(RangeId{0}).begin());
    return (Index(site.slot) - first) * kPageSize.count() + site.offset;
  }
  std::vector<std::pair<uint64_t, uint64_t>> Free() const {
    std::vector<std::pair<uint64_t, uint64_t>> free;
    ring_.ForEachExtent([&](const Site& site, Granules length) {
      free.emplace_back(At(site), At(site) + length.count());
    });
    return free;
  }
  using Extents = std::vector<std::pair<uint64_t, uint64_t>>;

  HostDriver driver_{{.granularity = kPageSize.bytes(), .map_memory = false}};
  RangeTable ranges_{driver_, kPageSize};
  SharedSpace bytes_{kPageSize, ranges_};
  Ring ring_{ranges_, bytes_};
};

TEST_F(RingTest, TheFirstOfItsKindBringsRoomForOneCaptureTwice) {
  EXPECT_TRUE(ring_.empty());
  const Site site = Place(12, /*first_of_kind=*/true);
  EXPECT_FALSE(ring_.empty());
  EXPECT_EQ(At(site), 0U);
  EXPECT_EQ(Free(), Extents({{12, 40}}));  // 12, with 12 of the capture and a block beside
}

TEST_F(RingTest, BlocksGoBehindOneAnotherAndAround) {
  const Site first = Place(12, /*first_of_kind=*/true);
  EXPECT_EQ(At(Place(12)), 12U);
  EXPECT_EQ(At(Place(12)), 24U);
  Free(first, 12);
  EXPECT_EQ(Free(), Extents({{0, 12}, {36, 40}}));
  EXPECT_EQ(At(Place(12)), 0U) << "there is no room behind the last one";
  EXPECT_EQ(At(Place(4)), 36U);
  EXPECT_EQ(bytes_.space().page_count(), 5U);
}

TEST_F(RingTest, WhatIsFreeAndAdjoinsIsOne) {
  const Site a = Place(12, /*first_of_kind=*/true);
  const Site b = Place(12);
  const Site c = Place(12);
  Free(a, 12);
  Free(c, 12);
  EXPECT_EQ(Free(), Extents({{0, 12}, {24, 40}}));
  Free(b, 12);
  EXPECT_EQ(Free(), Extents({{0, 40}}));
  EXPECT_EQ(At(Place(40)), 0U);
}

TEST_F(RingTest, WhatDoesNotFitMakesTheEndLonger) {
  Place(12, /*first_of_kind=*/true);
  EXPECT_EQ(At(Place(40)), 12U);
  EXPECT_EQ(bytes_.space().page_count(), 7U);
  EXPECT_EQ(Free(), Extents({{52, 56}}));
}

TEST_F(RingTest, DissolvedItHasNothingAndAllIsOpen) {
  const Site site = Place(12, /*first_of_kind=*/true);
  EXPECT_EQ(bytes_.space().free(), Granules(0)) << "of what others may take";
  ring_.Dissolve();
  bytes_.Check();
  EXPECT_TRUE(ring_.empty() && ring_.has_lost() && Free().empty());
  EXPECT_EQ(bytes_.space().free(), Granules(28));
  bytes_.Give(site, Granules(12), FenceId::kOpen);
  EXPECT_EQ(bytes_.space().free_extents(), 1U);
}

}  // namespace
}  // namespace cgp
