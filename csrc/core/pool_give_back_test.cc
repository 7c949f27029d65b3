// What a pool gives back of what it has mapped, and when.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "core/base/error.h"
#include "core/pool_set.h"
#include "core/pool_values.h"
#include "driver/faulty_driver.h"
#include "testing/driver_watch.h"
#include "testing/host_driver.h"
#include "testing/test_names.h"

namespace cgp {
namespace {

constexpr uint64_t kAny = std::numeric_limits<uint64_t>::max();
// What is stale is unmapped by the next allocation once so much is mapped.
constexpr uint64_t kStale = 513;

class GiveBackTest : public ::testing::Test {
 protected:
  static constexpr PoolId kId{1, 0};
  static constexpr uint64_t kPage = 8192;

  void TearDown() override {
    EXPECT_NO_THROW(set_.Check());
    watch_.Quiesce();
    EXPECT_THAT(watch_.violations(), ::testing::IsEmpty());
  }

  Block Allocate(uint64_t bytes, StreamId stream = kA) {
    const Block block = set_.Allocate(kId, bytes, stream);
    watch_.MarkUsed();
    return block;
  }
  // In a newer mapping of pages that others show too.
  Block AllocateMappedTwice() {
    const Block front = Allocate(10 * kPage);
    Allocate(kPage);
    const Block behind = Allocate(10 * kPage);
    set_.Free(front.address);
    set_.Free(behind.address);
    return Allocate(20 * kPage);
  }
  // While eager work churns until stale mappings are unmapped.
  void ExpectStaysMapped(const Block& block) {
    set_.BeginScope(kId, ScopeKind::kEager);
    Churn(4'000, 40, 2);
    set_.EndScope(kId);
    EXPECT_GT(watch_.quiesce_calls(), 0U);
    EXPECT_TRUE(watch_.Accessible(block.address, block.bytes));
  }
  // Blocks of mixed sizes come and go, as many as fit `pages`, until so much is mapped.
  void Churn(int allocations, uint64_t pages, uint32_t seed, uint64_t mappings = kAny) {
    std::mt19937 random(seed);
    std::vector<Block> live;
    uint64_t held = 0;
    for (int i = 0; i < allocations && set_.Stats(kId).page_mappings < mappings; ++i) {
      const uint64_t bytes = kGranule * (1 + random() % (16 * pages / 8));
      while (held + bytes > pages * kPage) {
        std::swap(live[random() % live.size()], live.back());
        held -= live.back().bytes;
        set_.Free(live.back().address);
        live.pop_back();
      }
      live.push_back(Allocate(bytes));
      held += bytes;
      most_mappings_ = std::max(most_mappings_, set_.Stats(kId).page_mappings);
    }
    for (const Block& block : live) set_.Free(block.address);
  }

  HostDriver host_{{.granularity = 4096}};
  DriverWatch watch_{host_};
  FaultyDriver faulty_{watch_};
  PoolSet set_{faulty_, {.page_bytes = kPage}};
  uint64_t most_mappings_ = 0;
};

TEST_F(GiveBackTest, WhatAnUndoFailedToGiveBackIsCounted) {
  bool failed = true;
  for (uint64_t number = 1; failed; ++number) {
    set_.BeginScope(kId, ScopeKind::kCapture);
    const Block block = Allocate(2 * kPage + kGranule);
    faulty_.Arm({.call_number = number, .for_good = true});
    try {
      set_.Free(Allocate(30 * kPage).address);
    } catch (const DriverError&) {
    }
    failed = faulty_.failures() > 0;
    faulty_.Disarm();
    set_.Check();
    EXPECT_EQ(set_.Usage().reserved_bytes.current, watch_.handle_bytes()) << number;
    set_.EndScope(kId);
    set_.Free(block.address);
    set_.Release(kId);
    faulty_.Arm({.call_number = 1, .only = DriverCall::kUnmap});  // the same one
    EXPECT_THROW(set_.Trim(), DriverError);
    faulty_.Disarm();
    EXPECT_EQ(set_.Usage().reserved_bytes.current, watch_.handle_bytes()) << number;
    set_.Trim();
    EXPECT_EQ(watch_.handles() + watch_.mappings() + watch_.reservations(), 0U) << number;
  }
}

// Recorded: 428 pages and 100,000 allocations came to 9,972 mappings.
TEST_F(GiveBackTest, EagerWorkThatChurnsDoesNotGatherMappings) {
  set_.BeginScope(kId, ScopeKind::kEager);
  Churn(20'000, 64, 1);
  const uint64_t pages = set_.Stats(kId).pages;
  EXPECT_LE(most_mappings_, std::max<uint64_t>(512, 8 * pages) + pages);
  EXPECT_GT(watch_.quiesce_calls(), 2U);
  EXPECT_LT(watch_.quiesce_calls(), 20'000U / 50) << "the price of one is that of many mappings";
  set_.EndScope(kId);
}

TEST_F(GiveBackTest, NothingIsUnmappedWhileSomethingCaptures) {
  set_.BeginScope(kId, ScopeKind::kEager);
  const CaptureId capture = host_.graphs().Begin(kB);
  Churn(3'000, 64, 3);
  EXPECT_EQ(watch_.quiesce_calls(), 0U);
  EXPECT_GT(set_.Stats(kId).page_mappings, 512U);
  host_.graphs().End(capture);
  Allocate(kPage);
  EXPECT_EQ(watch_.quiesce_calls(), 1U);
  set_.EndScope(kId);
}

// `capturing`: a stream is capturing that neither the set nor its driver knows of.
TEST_F(GiveBackTest, NothingIsWaitedForWhereTheScopeWasToldOfACapture) {
  set_.BeginScope(kId, ScopeKind::kEager, /*capturing=*/true);
  Churn(4'000, 64, 1, kStale);
  Allocate(kPage);
  EXPECT_EQ(watch_.quiesce_calls(), 0U) << "it breaks the capture";
  set_.EndScope(kId, /*may_ask_device=*/false);
}

// A graph uses what lives when its capture ends, too, such as a workspace that its warm-up made in
// the pool (torch clears cuBLAS's of a stream when one of that stream's graphs is reset): freed
// afterwards, its addresses are still in the graph. Memory of a stock private pool stays mapped.
TEST_F(GiveBackTest, WhatLivedInACaptureStaysMapped) {
  set_.BeginScope(kId, ScopeKind::kEager);
  const Block workspace = AllocateMappedTwice();
  set_.EndScope(kId);
  set_.BeginScope(kId, ScopeKind::kCapture);
  set_.Free(Allocate(kPage).address);  // and a kernel that uses the workspace
  set_.EndScope(kId);
  set_.Free(workspace.address);
  ExpectStaysMapped(workspace);
}

}  // namespace
}  // namespace cgp
