#include "core/memory/shared_space.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "core/base/error.h"
#include "core/memory/free_list.h"
#include "testing/host_driver.h"

namespace cgp {
namespace {

constexpr Granules kPageSize{8};
constexpr StreamId kA{1};
constexpr StreamId kB{2};
constexpr FenceId kFenceA{1};
constexpr FenceId kFenceB{2};

class SharedSpaceTest : public ::testing::Test {
 protected:
  SharedSpaceTest() {
    bytes_.Map({.range = {}, .handles = std::vector(4, MappingPlan::kNewPage)});
    for (const FenceId fence : {kFenceA, kFenceB}) bytes_.ReserveFence(fence);
  }

  Site Take(uint32_t vpage, Granules length) {
    bytes_.ReserveTake();
    Site site{{VirtualPage{vpage}}};
    bytes_.Take(site, length);
    return site;
  }
  // Frees it behind the fence.
  void TakeAndGive(uint32_t vpage, Granules length, FenceId fence) {
    bytes_.Give(Take(vpage, length), length, fence);
    bytes_.Check();
  }
  // How many streams may take all of the page.
  uint32_t CountWhole(PageId page) const {
    return bytes_.CountStreams([&](const FreeList& list) { return list.IsWhole(page); });
  }
  void RemoveStreams() {
    bytes_.ReserveOpening(3);
    bytes_.RemoveStreams();
    bytes_.Check();
  }

  HostDriver driver_{{.granularity = kPageSize.bytes(), .map_memory = false}};
  RangeTable ranges_{driver_, kPageSize};
  SharedSpace bytes_{ranges_};
};

// Views that rest see what is open; who takes one over sees what it passes, and nobody else's.
TEST_F(SharedSpaceTest, ViewsThatRestAreTakenOver) {
  const uint32_t first = Index(ranges_.range(RangeId{0}).begin());
  EXPECT_EQ(bytes_.stream_count(), 0u);
  bytes_.AddFreeList(kA, kFenceA);
  const FreeList* const second = &bytes_.AddFreeList(kB, kFenceB);
  TakeAndGive(first, kPageSize, kFenceA);
  TakeAndGive(first + 1, Granules(3), kFenceB);
  TakeAndGive(first + 2, kPageSize * 2, kFenceB);
  RemoveStreams();
  EXPECT_EQ(bytes_.stream_count(), 0u);
  EXPECT_EQ(second->whole_page_count(), 0u);
  std::vector<NodeId> best;
  second->ForEachFit(kPageSize - Granules(3), [&](NodeId hole) {
    best.push_back(hole);
    return false;
  });
  EXPECT_EQ(best, std::vector{bytes_.space().last(PageId{1})});

  TakeAndGive(first + 1, kPageSize - Granules(1), FenceId::kOpen);  // while they rest
  EXPECT_EQ(bytes_.AddFreeList(kB, kFenceB).whole_page_count(), 3u);
  EXPECT_EQ(&bytes_.AddFreeList(kA, kFenceA), second) << "the lists are anyone's";
  EXPECT_EQ(second->stream(), kA);
  EXPECT_EQ(second->whole_page_count(), 2u);
  bytes_.Check();
  EXPECT_EQ(CountWhole(PageId{0}), 1u);
  EXPECT_EQ(CountWhole(PageId{1}), 2u);
  RemoveStreams();
  EXPECT_EQ(CountWhole(PageId{1}), 0u) << "no stream is left";
}

}  // namespace
}  // namespace cgp
