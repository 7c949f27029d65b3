// What is unmapped amid eager work: what the set counts then, waits for and keeps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/pool_set.h"
#include "core/pool_values.h"
#include "driver/host_driver.h"
#include "testing/driver_watch.h"
#include "testing/faulty_driver.h"

namespace cgp {
namespace {

constexpr StreamId kA{1};
constexpr PoolId kId{1, 0};
constexpr uint64_t kGranule = kGranuleBytes;
constexpr uint64_t kPage = 8192;

class PoolSetUnmapTest : public ::testing::Test {
 protected:
  Block Allocate(uint64_t bytes, StreamId stream = kA) {
    const Block block = set_.Allocate(kId, bytes, stream);
    watch_.MarkUsed();
    return block;
  }
  // Until so much is mapped that the next allocation unmaps what is stale, if that may be.
  void ChurnUntilStale(uint64_t pages = 64) {
    std::mt19937 random(1);
    std::vector<Block> live;
    uint64_t held = 0;
    while (set_.Stats(kId).page_mappings <= 512) {
      const uint64_t bytes = kGranule * (1 + random() % (2 * pages));
      while (held + bytes > pages * kPage) {
        std::swap(live[random() % live.size()], live.back());
        held -= live.back().bytes;
        set_.Free(live.back().address);
        live.pop_back();
      }
      live.push_back(Allocate(bytes));
      held += bytes;
    }
    for (const Block& block : live) set_.Free(block.address);
  }

  HostDriver host_{{.granularity = 4096, .physical_limit_bytes = 400 * kPage}};
  DriverWatch watch_{host_};
  FaultyDriver faulty_{watch_};
  PoolSet set_{faulty_, {.page_bytes = kPage}};
};

// A handle that the driver kept at the last Trim() goes with UnmapStale(), which PoolSet::Allocate()
// calls; then the allocation itself fails.
TEST_F(PoolSetUnmapTest, ASetCountsWhatWasReleasedBeforeAnAllocationFailed) {
  set_.BeginScope(kId, ScopeKind::kEager);
  const Block survivor = Allocate(kGranule);
  const Block large = Allocate(8 * kPage);
  set_.EndScope(kId);
  set_.Free(large.address);
  set_.Release(kId);
  faulty_.Arm({.call_number = 1, .only = DriverCall::kRelease});
  EXPECT_THROW(set_.Trim(), DriverError);
  faulty_.Disarm();
  set_.Check();

  set_.BeginScope(kId, ScopeKind::kEager);
  ChurnUntilStale();
  set_.Check();
  EXPECT_THROW(Allocate(1000 * kPage), OutOfMemoryError);
  EXPECT_NO_THROW(set_.Check());
  EXPECT_EQ(set_.Usage().reserved_bytes.current, watch_.handle_bytes());
  set_.EndScope(kId);
  set_.Free(survivor.address);
}

// `capturing`: a stream is capturing that neither the set nor its driver knows of.
TEST_F(PoolSetUnmapTest, NothingIsWaitedForWhereTheScopeWasToldOfACapture) {
  set_.BeginScope(kId, ScopeKind::kEager, /*capturing=*/true);
  ChurnUntilStale();
  Allocate(kPage);
  EXPECT_EQ(watch_.quiesce_calls(), 0U) << "it breaks the capture";
  set_.EndScope(kId, /*may_ask_device=*/false);
}

// A graph uses what lives when its capture ends, too, such as a workspace that its warm-up made in
// the pool (torch clears cuBLAS's of a stream when one of that stream's graphs is reset): freed
// afterwards, its addresses are still in the graph. Memory of a stock private pool stays mapped.
TEST_F(PoolSetUnmapTest, WhatLivedInACaptureStaysMapped) {
  set_.BeginScope(kId, ScopeKind::kEager);
  const Block front = Allocate(10 * kPage);
  const Block between = Allocate(kPage);
  const Block behind = Allocate(10 * kPage);
  set_.Free(front.address);
  set_.Free(behind.address);
  const Block workspace = Allocate(20 * kPage);  // a newer mapping of the same pages
  set_.EndScope(kId);
  set_.BeginScope(kId, ScopeKind::kCapture);
  set_.Free(Allocate(kPage).address);  // and a kernel that uses the workspace
  set_.EndScope(kId);
  set_.Free(workspace.address);
  set_.BeginScope(kId, ScopeKind::kEager);
  ChurnUntilStale();
  Allocate(kPage);
  ASSERT_GT(watch_.quiesce_calls(), 0U);
  EXPECT_TRUE(watch_.Accessible(workspace.address, workspace.bytes)) << "a replay would fault";
  set_.EndScope(kId);
  set_.Free(between.address);
}

}  // namespace
}  // namespace cgp
