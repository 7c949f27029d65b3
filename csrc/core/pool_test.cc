// What pool.h says of one pool: shapes, scopes, bad input and failures.
#include "core/pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
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

TEST_F(PoolTest, BlocksAreWholeGranulesWhereTheyAreSaidToBe) {
  pool_.BeginScope(ScopeKind::kCapture);
  for (const uint64_t bytes : {uint64_t{1}, uint64_t{512}, uint64_t{513}, kPage, 3 * kPage + 1}) {
    const Block block = Allocate(bytes, kB);
    EXPECT_EQ(block.bytes, (bytes + 511) / 512 * 512);
    EXPECT_EQ(block.requested_bytes, bytes);
    EXPECT_EQ(block.stream, kB);
    EXPECT_EQ(block.address % 512, 0U);
    uint64_t sum = 0;
    for (const PhysicalPiece& piece : pool_.Pieces(block.address)) {
      const auto place = watch_.At(block.address + sum);
      ASSERT_TRUE(place.has_value());
      EXPECT_TRUE(place->accessible);
      EXPECT_EQ(place->offset_bytes, piece.offset_bytes);
      EXPECT_GE(place->left_bytes, piece.length_bytes);
      sum += piece.length_bytes;
    }
    EXPECT_EQ(sum, block.bytes);
  }
}

TEST_F(PoolTest, FindsTheBlockThatHoldsAnAddress) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block a = Allocate(1024);
  const Block b = Allocate(2 * kPage);
  EXPECT_EQ(pool_.Find(a.address)->address, a.address);
  EXPECT_EQ(pool_.Find(a.address + 1023)->address, a.address);
  EXPECT_EQ(pool_.Find(b.address + kPage)->address, b.address);
  pool_.Free(a.address);
  EXPECT_EQ(pool_.Find(a.address), nullptr);
  EXPECT_EQ(pool_.Find(0), nullptr);
  EXPECT_EQ(pool_.Find(~uint64_t{0}), nullptr);
}

TEST_F(PoolTest, CountsWhatItHolds) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block a = Allocate(1000);
  const Block b = Allocate(2 * kPage);
  PoolStats stats = pool_.Stats();
  EXPECT_EQ(stats.page_bytes, kPage);
  EXPECT_EQ(stats.pages, 3U);
  EXPECT_EQ(stats.reserved_bytes, 3 * kPage);
  EXPECT_EQ(stats.allocated_bytes, 1024 + 2 * kPage);
  EXPECT_EQ(stats.requested_bytes, 1000 + 2 * kPage);
  EXPECT_EQ(stats.live_blocks, 2U);
  pool_.Free(a.address);
  pool_.Free(b.address);
  pool_.EndScope();
  stats = pool_.Stats();
  EXPECT_EQ(stats.allocated_bytes, 0U);
  EXPECT_EQ(stats.requested_bytes, 0U);
  EXPECT_EQ(stats.live_blocks, 0U);
  EXPECT_EQ(stats.reserved_bytes, 3 * kPage);
  EXPECT_EQ(stats.peak_allocated_bytes, 1024 + 2 * kPage);
  EXPECT_EQ(stats.peak_reserved_bytes, 3 * kPage);
  EXPECT_EQ(stats.allocations, 2U);
  EXPECT_EQ(stats.frees, 2U);
  EXPECT_EQ(stats.page_mappings, watch_.mappings());
}

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

TEST_F(PoolTest, SnapshotsBlocksAndRangesInTheOrderOfAddresses) {
  pool_.BeginScope(ScopeKind::kCapture);
  for (const uint64_t bytes : {kPage / 2, 3 * kPage, kPage / 4, 5 * kPage}) Allocate(bytes);
  const PoolSnapshot snapshot = pool_.Snapshot();
  ASSERT_THAT(snapshot.blocks, SizeIs(4));
  for (size_t i = 1; i < snapshot.blocks.size(); ++i) {
    EXPECT_LT(snapshot.blocks[i - 1].block.address, snapshot.blocks[i].block.address);
  }
  uint64_t mapped = 0;
  for (const PoolSnapshot::Range& range : snapshot.ranges) mapped += range.pages.size();
  EXPECT_GE(mapped, snapshot.stats.page_mappings);
  EXPECT_THAT(snapshot.ranges, SizeIs(snapshot.stats.ranges));
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

TEST_F(PoolTest, RefusesAddressesWhereNoLiveBlockStarts) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block block = Allocate(2048);
  const Block freed = Allocate(512);
  pool_.Free(freed.address);
  for (const Address address :
       {freed.address, block.address + 1, block.address + 512, Address{0}, ~Address{0}}) {
    EXPECT_THROW(pool_.Free(address), UsageError) << address;
    EXPECT_THROW(pool_.RecordUse(address, kB), UsageError) << address;
    EXPECT_THROW(pool_.Pieces(address), UsageError) << address;
  }
  EXPECT_EQ(pool_.Stats().live_blocks, 1U);
  pool_.Free(block.address);
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

TEST(PoolLimitTest, SizesBeyondAllMemoryRunOutToo) {
  HostDriver host({.granularity = 4096, .map_memory = false});
  Pool pool(host, {});
  pool.BeginScope(ScopeKind::kCapture);
  const uint64_t most = ~uint64_t{0};
  for (const uint64_t bytes : {most, most - 511, most - 4096, most / 2, most / 512, most / 4096,
                               (most / 4096) << 11, uint64_t{1} << 48, uint64_t{1} << 43}) {
    EXPECT_THROW(pool.Allocate(bytes, kA), OutOfMemoryError) << bytes;
    EXPECT_EQ(pool.Stats().pages, 0U);
    EXPECT_EQ(host.usage(), HostUsage{});
  }
  pool.Allocate(1, kA);
}

TEST_F(PoolTest, RefreshedAccessReachesEveryMapping) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block a = Allocate(3 * kPage);
  Allocate(kGranule);
  pool_.Free(a.address);
  Allocate(3 * kPage + 15 * kGranule);
  watch_.AddPeer(1);
  pool_.RefreshAccess();
  for (const PoolSnapshot::Range& range : pool_.Snapshot().ranges) {
    for (uint64_t i = 0; i < range.pages.size(); ++i) {
      EXPECT_EQ(watch_.At(range.address + i * kPage)->peers, 1);
    }
  }
  const Block later = Allocate(5 * kPage);
  EXPECT_EQ(watch_.At(later.address)->peers, 1);
}

TEST(PoolEndTest, LeavesNothingBehindEvenWithLiveBlocks) {
  HostDriver host({.granularity = 4096, .map_memory = false});
  DriverWatch watch(host);
  {
    Pool pool(watch, {});
    pool.BeginScope(ScopeKind::kEager);
    pool.Free(pool.Allocate(3 * 4096, kA).address);
    pool.Allocate(5 * 4096 + 512, kB);
    pool.EndScope();
    watch.MarkUsed();
    watch.Quiesce();
  }
  EXPECT_EQ(host.usage(), HostUsage{});
  EXPECT_EQ(watch.events(), 0U);
  EXPECT_THAT(watch.violations(), IsEmpty());
}

}  // namespace
}  // namespace cgp
