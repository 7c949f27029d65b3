// What pool.h says of eager scopes in a pool that had captures: behind their replays, on whatever
// stream these run; and that no stream is asked anything that may be gone.
#include <gtest/gtest.h>

#include <vector>

#include "core/base/error.h"
#include "core/pool.h"
#include "core/pool_test_pool.h"

namespace cgp {
namespace {

class PoolReplaysTest : public PoolTest {
 protected:
  // A capture that leaves so many free pages behind.
  std::vector<PhysicalPiece> Capture(uint64_t pages) {
    pool_.BeginScope(ScopeKind::kCapture);
    std::vector<PhysicalPiece> freed = AllocateAndFree(pages * kPage, kA);
    pool_.EndScope();
    return freed;
  }
  // By whom else captures: the device may not be asked.
  bool TakesInEagerScope(const std::vector<PhysicalPiece>& pieces) {
    pool_.BeginScope(ScopeKind::kEager);
    const bool takes = GetsBytesOf(pieces, 2 * kPage, kA);
    pool_.EndScope();
    return takes;
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

// Each scope anew: the graphs may have run in between, over what eager work has freed too.
TEST_F(PoolReplaysTest, ALaterScopeWaitsForLaterReplays) {
  const auto freed = Capture(2);
  EXPECT_TRUE(TakesInEagerScope(freed));
  const uint64_t replay = watch_.Submit(kC);
  EXPECT_TRUE(TakesInEagerScope(freed));
  EXPECT_TRUE(watch_.IsBehind(kA, kC, replay));
}

TEST_F(PoolReplaysTest, WhatOutlivedItsGraphIsStillWaitedFor) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block output = Allocate(2 * kPage, kA);
  pool_.EndScope();
  watch_.Quiesce();
  pool_.PrepareGiveBack();
  pool_.GiveBack();
  const auto freed = pool_.Pieces(output.address);
  const uint64_t reading = watch_.Submit(kA);
  pool_.Free(output.address);
  pool_.BeginScope(ScopeKind::kEager);
  EXPECT_TRUE(GetsBytesOf(freed, 2 * kPage, kB));
  EXPECT_TRUE(watch_.IsBehind(kB, kA, reading));
  pool_.EndScope();
}

TEST_F(PoolReplaysTest, EagerWorkAloneWaitsForNothing) {
  pool_.BeginScope(ScopeKind::kEager);
  AllocateAndFree(2 * kPage, kA);
  pool_.EndScope();
  const uint64_t work = watch_.Submit(kC);
  pool_.BeginScope(ScopeKind::kEager);
  Allocate(2 * kPage, kA);
  pool_.EndScope();
  EXPECT_FALSE(watch_.IsBehind(kA, kC, work));
  EXPECT_EQ(pool_.Stats().pages, 2U);
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

// Marking the device would break the capture of somebody else: the scope gets pages of its own.
TEST_F(PoolReplaysTest, WhereSomethingCapturesWhatWasFreeStaysClosed) {
  const auto freed = Capture(2);
  const Block output = [&] {
    pool_.BeginScope(ScopeKind::kCapture);
    const Block block = Allocate(kPage, kA);
    pool_.EndScope();
    return block;
  }();
  const auto of_output = pool_.Pieces(output.address);
  const CaptureId other = host_.graphs().Begin(kC);
  pool_.BeginScope(ScopeKind::kEager);
  EXPECT_FALSE(GetsBytesOf(freed, 2 * kPage, kA));
  pool_.Free(output.address);
  EXPECT_FALSE(GetsBytesOf(of_output, kPage, kA)) << "the graph may still write it";
  const auto eager = AllocateAndFree(kPage, kA);
  EXPECT_TRUE(GetsBytesOf(eager, kPage, kA));
  const uint64_t pages = pool_.Stats().pages;
  pool_.EndScope();
  host_.graphs().End(other);
  watch_.FinishAll();
  pool_.BeginScope(ScopeKind::kCapture);
  Allocate(pages * kPage, kB);
  EXPECT_EQ(pool_.Stats().pages, pages) << "all is free again once the device could be marked";
  pool_.EndScope();
}

// No graph has pages that eager work has made since the last capture.
TEST_F(PoolReplaysTest, WhereSomethingCapturesEagerScopesTakeTheirPagesAgain) {
  Capture(2);
  const CaptureId other = host_.graphs().Begin(kC);
  for (int scope = 0; scope < 3; ++scope) {
    pool_.BeginScope(ScopeKind::kEager);
    const Block block = Allocate(2 * kPage, kA);
    pool_.EndScope();
    pool_.Free(block.address);
  }
  EXPECT_EQ(pool_.Stats().pages, 4U);
  const auto pieces = Capture(2);
  EXPECT_FALSE(TakesInEagerScope(pieces));
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

// What is freed costs nothing but its bytes: one mark is for all of it.
TEST_F(PoolReplaysTest, FreesBetweenScopesAskNothingOfTheDriver) {
  pool_.BeginScope(ScopeKind::kEager);
  std::vector<Block> blocks;
  for (int i = 0; i < 1000; ++i) {
    blocks.push_back(Allocate(kGranule, i % 2 == 0 ? kA : kB));
    if (i % 3 == 0) pool_.RecordUse(blocks.back().address, kC);
  }
  pool_.EndScope();
  const uint64_t calls = watch_.calls();
  for (const Block& block : blocks) pool_.Free(block.address);
  EXPECT_EQ(watch_.calls(), calls);
  pool_.BeginScope(ScopeKind::kCapture);
  EXPECT_LE(watch_.calls(), calls + 4) << "a mark, and whether it is passed for each fence";
  pool_.EndScope();
}

TEST_F(PoolReplaysTest, AnEagerStreamTakesBackWhatItFreedBetweenScopes) {
  pool_.BeginScope(ScopeKind::kEager);
  const Block block = Allocate(2 * kPage, kA);
  pool_.EndScope();
  watch_.Submit(kA);
  const auto pieces = pool_.Pieces(block.address);
  pool_.Free(block.address);
  pool_.BeginScope(ScopeKind::kEager);
  EXPECT_FALSE(GetsBytesOf(pieces, 2 * kPage, kB));
  EXPECT_TRUE(GetsBytesOf(pieces, 2 * kPage, kA)) << "as it would of its own cache";
  pool_.EndScope();
}

}  // namespace
}  // namespace cgp
