// What pool.h says of one pool: shapes, scopes, bad input and failures.
#include "core/pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/pool_test_pool.h"
#include "testing/driver_watch.h"
#include "testing/host_driver.h"

namespace cgp {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST_F(PoolTest, SaysWhatEachCaptureTook) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block kept = Allocate(kPage);
  pool_.Free(Allocate(2 * kPage).address);
  EXPECT_THAT(pool_.captures(), IsEmpty()) << "it is under way";
  pool_.EndScope();
  pool_.BeginScope(ScopeKind::kEager);
  Allocate(8 * kPage);
  pool_.EndScope();
  pool_.BeginScope(ScopeKind::kCapture);
  Allocate(kPage / 2);
  pool_.Free(kept.address);
  pool_.EndScope();
  ASSERT_THAT(pool_.captures(), SizeIs(2));
  const auto expect = [&](size_t i, CaptureStats expected) {
    const CaptureStats& took = pool_.captures()[i];
    EXPECT_EQ(took.added_bytes, expected.added_bytes);
    EXPECT_EQ(took.live_before_bytes, expected.live_before_bytes);
    EXPECT_EQ(took.peak_bytes, expected.peak_bytes);
    EXPECT_EQ(took.first_allocation, expected.first_allocation);
    EXPECT_EQ(took.allocations, expected.allocations);
  };
  expect(0, {3 * kPage, 0, 3 * kPage, 0, 2});
  expect(1, {kPage, 9 * kPage, 9 * kPage + kPage / 2, 3, 1});
}

TEST_F(PoolTest, RemembersTheLastCaptures) {
  for (size_t i = 0; i <= Pool::kMaxCaptures; ++i) {
    pool_.BeginScope(ScopeKind::kCapture);
    pool_.Free(Allocate(kGranule).address);
    pool_.EndScope();
  }
  ASSERT_THAT(pool_.captures(), SizeIs(Pool::kMaxCaptures));
  EXPECT_EQ(pool_.captures().front().first_allocation, 1U);
  EXPECT_EQ(pool_.captures().back().first_allocation, Pool::kMaxCaptures);
}

// --- Scopes and bad input ---

TEST_F(PoolTest, OnlyOneScopeAtATime) {
  EXPECT_FALSE(pool_.in_scope());
  EXPECT_THROW(pool_.EndScope(), InternalError);
  pool_.BeginScope(ScopeKind::kEager);
  EXPECT_TRUE(pool_.in_scope());
  EXPECT_THROW(pool_.BeginScope(ScopeKind::kCapture), InternalError);
  EXPECT_TRUE(pool_.in_scope());
  pool_.EndScope();
  EXPECT_FALSE(pool_.in_scope());
  EXPECT_THROW(pool_.EndScope(), InternalError);
}

TEST(PoolOptionsTest, PagesArePowerOfTwoMultiplesOfTheGranularity) {
  HostDriver host({.granularity = 4096, .map_memory = false});
  EXPECT_EQ(Pool(host, {}).Stats().page_bytes, 4096U);
  EXPECT_EQ(Pool(host, {.page_bytes = 32768}).Stats().page_bytes, 32768U);
  for (const uint64_t bytes : {uint64_t{512}, uint64_t{2048}, uint64_t{4095}, uint64_t{12288},
                               uint64_t{4097}, uint64_t{1} << 41, ~uint64_t{0}}) {
    EXPECT_THROW(Pool(host, {.page_bytes = bytes}), UsageError) << bytes;
  }
}

// --- Failure and peers ---

TEST(PoolLimitTest, RunsOutWithNumbersAndGoesOnAfterwards) {
  HostDriver host({.granularity = 4096, .physical_limit_bytes = 10 * 4096, .map_memory = false});
  Pool pool(host, {});
  pool.BeginScope(ScopeKind::kCapture);
  const Block block = pool.Allocate(6 * 4096, kA);
  try {
    pool.Allocate(5 * 4096, kA);
    FAIL() << "there are only ten pages";
  } catch (const OutOfMemoryError& error) {
    EXPECT_THAT(error.what(), HasSubstr("20480"));
  }
  EXPECT_EQ(pool.Stats().pages, 6U);
  EXPECT_EQ(host.usage().handles, 6U);
  pool.Check();
  pool.Allocate(4 * 4096, kA);
  pool.Free(block.address);
  pool.Allocate(6 * 4096, kA);
  EXPECT_EQ(pool.Stats().pages, 10U);
}

// --- Threads ---

// Another thread may be ending the capture, and the driver crashes when it is asked of it meanwhile.
TEST_F(PoolTest, ABlockIsFreedOnceThoughAnotherThreadFreesItAndAsksNothing) {
  pool_.BeginScope(ScopeKind::kCapture);
  const CaptureId capture = host_.graphs().Begin(kA);
  const Block block = Allocate(kPage);
  const auto before = host_.calls();
  std::thread([&] { pool_.Free(block.address); }).join();
  EXPECT_EQ(host_.calls(), before);
  EXPECT_THROW(pool_.Free(block.address), UsageError);
  host_.graphs().End(capture);
  pool_.EndScope();
}

// --- Eager scopes behind replays ---

// A capture that leaves so many free pages behind.
class PoolReplaysTest : public PoolTest {
 protected:
  std::vector<PhysicalPiece> Capture(uint64_t pages) {
    pool_.BeginScope(ScopeKind::kCapture);
    std::vector<PhysicalPiece> freed = AllocateAndFree(pages * kPage, kA);
    pool_.EndScope();
    return freed;
  }
};

TEST_F(PoolReplaysTest, AnEagerScopesStreamsWaitOnTheDeviceForReplaysOfBefore) {
  const auto freed = Capture(2);
  const uint64_t replay = watch_.Submit(kC);
  pool_.BeginScope(ScopeKind::kEager);
  EXPECT_TRUE(GetsBytesOf(freed, 2 * kPage, kA)) << "without a page more";
  EXPECT_TRUE(watch_.IsBehind(kA, kC, replay));
  EXPECT_FALSE(watch_.Done(kC, replay)) << "the host has not waited";
  EXPECT_FALSE(watch_.IsBehind(kB, kC, replay));
  Allocate(kGranule, kB);
  EXPECT_TRUE(watch_.IsBehind(kB, kC, replay));
  pool_.EndScope();
  EXPECT_EQ(watch_.quiesce_calls(), 0U);
}

// A graph of before may have the bytes of an eager block too, and run where nothing could be
// marked.
TEST_F(PoolReplaysTest, WhereSomethingCapturesWhatLivedIsHeldWhenItIsFreed) {
  Capture(2);
  pool_.BeginScope(ScopeKind::kEager);
  const Block eager = Allocate(kPage, kA);
  pool_.EndScope();
  const auto bytes = pool_.Pieces(eager.address);
  const CaptureId other = host_.graphs().Begin(kC);
  pool_.BeginScope(ScopeKind::kEager);
  pool_.Free(eager.address);
  EXPECT_FALSE(GetsBytesOf(bytes, kPage, kA));
  pool_.EndScope();
  host_.graphs().End(other);
}

TEST_F(PoolReplaysTest, AStreamThatCapturesCannotWait) {
  Capture(2);
  pool_.BeginScope(ScopeKind::kEager);
  const CaptureId other = host_.graphs().Begin(kA);
  EXPECT_THROW(pool_.Allocate(kPage, kA), UsageError);
  host_.graphs().End(other);
  Allocate(kPage, kA);
  pool_.EndScope();
}

TEST_F(PoolReplaysTest, AStreamThatIsGoneIsNeverAsked) {
  pool_.BeginScope(ScopeKind::kEager);
  const Block freed_within = Allocate(kPage, kA);
  const Block freed_after = Allocate(kPage, kA);
  const Block used = Allocate(kPage, kB);
  pool_.RecordUse(used.address, kA);
  watch_.DestroyStream(kA);
  pool_.Free(freed_within.address);
  pool_.Free(used.address);
  pool_.EndScope();
  pool_.Free(freed_after.address);
  pool_.BeginScope(ScopeKind::kCapture);
  Allocate(3 * kPage, kC);
  EXPECT_EQ(pool_.Stats().pages, 3U) << "the device has done all of it";
  pool_.EndScope();
}

// --- Where blocks lie ---

// Though the newer page has a shorter rest.
TEST_F(PoolTest, SmallBlocksGatherInTheOlderOfTwoPages) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block older = Allocate(6 * kGranule);
  Allocate(kPage - 6 * kGranule);
  const Block newer = Allocate(4 * kGranule);
  Allocate(kPage - 4 * kGranule);
  ASSERT_EQ(pool_.Stats().pages, 2U);
  const PageId home = pool_.Pieces(older.address).front().page;
  pool_.Free(older.address);
  pool_.Free(newer.address);
  EXPECT_EQ(pool_.Pieces(Allocate(3 * kGranule).address).front().page, home);
}

class PoolRingTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kLarge = uint64_t{2} << 20;

  // One that leaves so many pages alive behind those that it frees.
  Address Capture(uint64_t pages, uint64_t freed = 1) {
    pool_.BeginScope(ScopeKind::kCapture);
    const Address first = pool_.Allocate(freed * kLarge, kA).address;
    const Address output = pool_.Allocate(pages * kLarge, kA).address;
    pool_.Free(first);
    pool_.EndScope();
    pool_.Check();
    return output;
  }

  HostDriver driver_{{.physical_limit_bytes = 24 * kLarge, .map_memory = false}};
  Pool pool_{driver_, {}};
};

TEST_F(PoolRingTest, WhatTheRingHasIsForOthersWhereMemoryRunsOut) {
  Address kept[] = {Capture(2), Capture(3)};
  for (int round = 0; round < 3; ++round) {
    for (const uint64_t pages : {2U, 3U}) {
      const Address output = Capture(pages);
      pool_.Free(std::exchange(kept[pages - 2], output));
    }
  }
  EXPECT_FALSE(pool_.Snapshot().ring.empty());
  EXPECT_NO_THROW(Capture(18));
  EXPECT_TRUE(pool_.Snapshot().ring.empty());
}

TEST_F(PoolRingTest, TheRingHasRoomForOneCaptureMoreThanLives) {
  std::vector<Address> kept;
  uint64_t mappings = 0;
  for (int round = 0; round < 20; ++round) {
    for (std::size_t graph = 0; graph < 3; ++graph) {
      const Address output = Capture(graph + 2, 3);
      if (round == 0) kept.push_back(output);
      if (round > 0) pool_.Free(std::exchange(kept[graph], output));
    }
    if (round == 3) mappings = pool_.Stats().page_mappings;
  }
  EXPECT_EQ(pool_.Stats().page_mappings, mappings);
  EXPECT_LE(pool_.Stats().pages, 2U + 3 + 4 + 4 + 3);
}

// What the layer before leaves is no earlier output of this one, as in vLLM's piecewise graphs.
TEST_F(PoolRingTest, LayersThatAreGraphsOfTheirOwnAlternateWithNothing) {
  Address kept = Capture(2, 8);
  for (int layer = 0; layer < 16; ++layer) {
    const Address output = Capture(2, 8);
    pool_.Free(std::exchange(kept, output));
  }
  EXPECT_TRUE(pool_.Snapshot().ring.empty());
  EXPECT_EQ(pool_.Stats().pages, 12U);
}

}  // namespace
}  // namespace cgp
