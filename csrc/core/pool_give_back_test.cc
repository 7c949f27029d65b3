// What a pool gives back of what it has mapped, and when.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/base/error.h"
#include "core/pool_set.h"
#include "core/pool_values.h"
#include "driver/faulty_driver.h"
#include "testing/driver_watch.h"
#include "testing/host_driver.h"

namespace cgp {
namespace {

constexpr StreamId kA{1};
constexpr StreamId kB{2};
constexpr PoolId kId{1, 0};
constexpr uint64_t kGranule = kGranuleBytes;
constexpr uint64_t kPage = 8192;
constexpr uint64_t kAny = std::numeric_limits<uint64_t>::max();
// What is stale is unmapped by the next allocation once so much is mapped.
constexpr uint64_t kStale = 513;

class GiveBackTest : public ::testing::Test {
 protected:
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
  static void Write(const Block& block, int value) {
    std::memset(reinterpret_cast<void*>(block.address), value, block.bytes);
  }
  static bool Holds(const Block& block, int value) {
    const auto* const bytes = reinterpret_cast<const char*>(block.address);
    return std::all_of(bytes, bytes + block.bytes,
                       [=](char one) { return one == static_cast<char>(value); });
  }
  // A capture that leaves one small block behind, amid what it freed.
  Block CaptureWithSurvivor() {
    set_.BeginScope(kId, ScopeKind::kCapture);
    const Block before = Allocate(3 * kPage);
    const Block survivor = Allocate(kGranule);
    const Block behind = Allocate(5 * kPage + kGranule);
    Write(survivor, 7);
    set_.Free(before.address);
    set_.Free(behind.address);
    Allocate(7 * kPage);
    set_.EndScope(kId);
    return survivor;
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
  void FreeAllBut(const Block& one) {
    for (const auto& live : set_.Snapshot(kId).blocks) {
      if (live.block.address != one.address) set_.Free(live.block.address);
    }
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

TEST_F(GiveBackTest, APoolThatNoGraphHoldsKeepsOnlyWhatLives) {
  const Block survivor = CaptureWithSurvivor();
  FreeAllBut(survivor);
  EXPECT_EQ(set_.TrimmableBytes(), 0U) << "a graph holds it";
  set_.Release(kId);
  const uint64_t reserved = set_.Stats(kId).reserved_bytes;
  EXPECT_EQ(set_.Trim(), reserved - kPage);
  EXPECT_EQ(watch_.handles(), 1U);
  EXPECT_EQ(watch_.mappings(), 1U);
  EXPECT_EQ(watch_.reservations(), 1U);
  EXPECT_TRUE(Holds(survivor, 7));
  EXPECT_EQ(set_.Stats(kId).peak_reserved_bytes, reserved);
  const uint64_t calls = watch_.calls();
  EXPECT_EQ(set_.Trim(), 0U);
  EXPECT_EQ(watch_.calls(), calls);

  // The pool is as good as new.
  set_.BeginScope(kId, ScopeKind::kCapture);
  const Block next = Allocate(4 * kPage);
  Write(next, 9);
  set_.EndScope(kId);
  EXPECT_TRUE(Holds(survivor, 7));
  EXPECT_LE(set_.Stats(kId).pages, 5U);
  set_.Free(survivor.address);
  set_.Free(next.address);
  set_.Release(kId);
  EXPECT_EQ(set_.Trim(), 5 * kPage);
  EXPECT_FALSE(set_.Contains(kId));
}

TEST_F(GiveBackTest, WhatADriverKeepsGoesWithTheNextTrim) {
  uint64_t failing = 0;
  for (uint64_t number = 1;; ++number) {
    const Block survivor = CaptureWithSurvivor();
    FreeAllBut(survivor);
    set_.Release(kId);
    const uint64_t spare = set_.TrimmableBytes();
    const uint64_t reserved = set_.Stats(kId).reserved_bytes;
    faulty_.Arm({.call_number = number});
    try {
      EXPECT_EQ(set_.Trim(), spare);
    } catch (const DriverError&) {
      ++failing;
    }
    const bool failed = faulty_.failures() > 0;
    faulty_.Disarm();
    set_.Check();
    EXPECT_TRUE(Holds(survivor, 7));
    EXPECT_EQ(set_.Stats(kId).reserved_bytes, watch_.handle_bytes());
    set_.Trim();
    EXPECT_EQ(set_.Stats(kId).reserved_bytes, reserved - spare);
    EXPECT_EQ(watch_.handle_bytes(), reserved - spare);
    set_.Free(survivor.address);
    set_.Trim();
    EXPECT_EQ(watch_.handles() + watch_.mappings() + watch_.reservations(), 0U) << number;
    if (!failed) break;
  }
  EXPECT_GT(failing, 20U) << "each call of the driver";
}

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

TEST_F(GiveBackTest, ACheckpointOfBeforeIsVoid) {
  const Block survivor = CaptureWithSurvivor();
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  FreeAllBut(survivor);
  set_.Release(kId);
  set_.Trim();
  EXPECT_THROW(set_.Restore(kId, checkpoint), UsageError);
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

TEST_F(GiveBackTest, WhatAGraphNeedsStaysMapped) {
  set_.BeginScope(kId, ScopeKind::kCapture);
  const Block captured = Allocate(20 * kPage + kGranule);
  set_.Free(captured.address);
  set_.EndScope(kId);
  ExpectStaysMapped(captured);
}

// The inputs that graph trees record with, and fill before each replay.
TEST_F(GiveBackTest, WhatDiesInACaptureStaysMapped) {
  set_.BeginScope(kId, ScopeKind::kEager);
  const Block input = Allocate(20 * kPage);
  set_.EndScope(kId);
  set_.BeginScope(kId, ScopeKind::kCapture);
  Allocate(kPage);
  set_.Free(input.address);
  set_.EndScope(kId);
  ExpectStaysMapped(input);
}

TEST_F(GiveBackTest, WhatACheckpointComesBackToStaysMapped) {
  set_.BeginScope(kId, ScopeKind::kEager);
  const Block both = AllocateMappedTwice();
  set_.EndScope(kId);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  set_.Free(both.address);
  ExpectStaysMapped(both);
  set_.Restore(kId, checkpoint);
  ASSERT_TRUE(set_.At(both.address).has_value());
  Write(both, 5);
  EXPECT_TRUE(Holds(both, 5));
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

// A handle that the driver kept at the last Trim() goes with what is stale, before the allocation
// itself fails.
TEST_F(GiveBackTest, ASetCountsWhatWasReleasedBeforeAnAllocationFailed) {
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
  Churn(4'000, 64, 1, kStale);
  set_.Check();
  faulty_.Arm({.call_number = 1,
               .status = DriverStatus::kOutOfMemory,
               .for_good = true,
               .only = DriverCall::kCreate});
  EXPECT_THROW(Allocate(1000 * kPage), OutOfMemoryError);
  faulty_.Disarm();
  EXPECT_NO_THROW(set_.Check());
  EXPECT_EQ(set_.Usage().reserved_bytes.current, watch_.handle_bytes());
  set_.EndScope(kId);
  set_.Free(survivor.address);
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
