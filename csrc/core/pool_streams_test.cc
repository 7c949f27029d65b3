// What pool.h says of streams: who may take freed memory when.
#include <gtest/gtest.h>

#include <vector>

#include "core/pool.h"
#include "core/pool_test_pool.h"

namespace cgp {
namespace {

class PoolStreamsTest : public PoolTest {};

TEST_F(PoolStreamsTest, InACaptureTheSameStreamTakesFreedMemoryAtOnce) {
  pool_.BeginScope(ScopeKind::kCapture);
  const auto freed = AllocateAndFree(3 * kPage, kA);
  EXPECT_TRUE(GetsBytesOf(freed, 3 * kPage, kA));
  EXPECT_EQ(pool_.Stats().pages, 3U);
}

TEST_F(PoolStreamsTest, InACaptureAnotherStreamHasToWaitForItsEnd) {
  pool_.BeginScope(ScopeKind::kCapture);
  const auto freed = AllocateAndFree(3 * kPage, kA);
  EXPECT_FALSE(GetsBytesOf(freed, 3 * kPage, kB));
  EXPECT_EQ(pool_.Stats().pages, 6U);
  pool_.EndScope();
  pool_.BeginScope(ScopeKind::kCapture);
  Allocate(6 * kPage, kC);  // all of it: the three of A and the three of B
  EXPECT_EQ(pool_.Stats().pages, 6U);
}

TEST_F(PoolStreamsTest, AForeignUseKeepsMemoryFromAllStreamsUntilTheCaptureEnds) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block block = Allocate(kPage, kA);
  const auto pieces = pool_.Pieces(block.address);
  pool_.RecordUse(block.address, kB);
  pool_.Free(block.address);
  EXPECT_FALSE(GetsBytesOf(pieces, kPage, kA));
  EXPECT_FALSE(GetsBytesOf(pieces, kPage, kB));
  pool_.EndScope();
  pool_.BeginScope(ScopeKind::kCapture);
  Allocate(3 * kPage, kC);
  EXPECT_EQ(pool_.Stats().pages, 3U);
}

TEST_F(PoolStreamsTest, AUseByTheOwnStreamChangesNothing) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block block = Allocate(kPage, kA);
  const auto pieces = pool_.Pieces(block.address);
  pool_.RecordUse(block.address, kA);
  pool_.Free(block.address);
  EXPECT_TRUE(GetsBytesOf(pieces, kPage, kA));
}

TEST_F(PoolStreamsTest, NeighboursThatTheStreamMayTakeCountAsOne) {
  pool_.BeginScope(ScopeKind::kCapture);
  std::vector<Block> blocks;
  for (int i = 0; i < 16; ++i) blocks.push_back(Allocate(kGranule, i % 2 == 0 ? kA : kB));
  for (const Block& block : blocks) pool_.Free(block.address);
  pool_.EndScope();
  pool_.BeginScope(ScopeKind::kCapture);
  Allocate(kPage, kC);
  EXPECT_EQ(pool_.Stats().pages, 1U);
}

TEST_F(PoolStreamsTest, AGraphsOutputFreedBetweenCapturesIsFreeToAll) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block output = Allocate(2 * kPage, kA);
  pool_.EndScope();
  watch_.Submit(kA);
  pool_.Free(output.address);
  EXPECT_EQ(watch_.events(), 0U);
  pool_.BeginScope(ScopeKind::kCapture);
  Allocate(2 * kPage, kB);
  EXPECT_EQ(pool_.Stats().pages, 2U);
}

TEST_F(PoolStreamsTest, AnOutputThatAnotherStreamUsedWaitsForThatStream) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block output = Allocate(2 * kPage, kA);
  pool_.EndScope();
  pool_.RecordUse(output.address, kB);
  watch_.Submit(kB);
  const auto pieces = pool_.Pieces(output.address);
  pool_.Free(output.address);
  pool_.BeginScope(ScopeKind::kCapture);
  EXPECT_FALSE(GetsBytesOf(pieces, 2 * kPage, kA));
  EXPECT_FALSE(GetsBytesOf(pieces, 2 * kPage, kC));
  pool_.EndScope();
  watch_.FinishAll();
  pool_.BeginScope(ScopeKind::kCapture);
  Allocate(6 * kPage, kA);
  EXPECT_EQ(pool_.Stats().pages, 6U);
}

// A later capture frees it: that this capture has ended says nothing of what B does eagerly.
TEST_F(PoolStreamsTest, AnOutputThatAnotherStreamUsedIsNotFreeAtTheEndOfTheCaptureThatFreesIt) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block output = Allocate(2 * kPage, kA);
  pool_.EndScope();
  pool_.RecordUse(output.address, kB);
  watch_.Submit(kB);
  const auto pieces = pool_.Pieces(output.address);
  pool_.BeginScope(ScopeKind::kCapture);
  pool_.Free(output.address);
  pool_.EndScope();
  pool_.BeginScope(ScopeKind::kCapture);
  EXPECT_FALSE(GetsBytesOf(pieces, 2 * kPage, kA));
  EXPECT_FALSE(GetsBytesOf(pieces, 2 * kPage, kC));
  pool_.EndScope();
  watch_.FinishAll();
  pool_.BeginScope(ScopeKind::kCapture);
  Allocate(6 * kPage, kA);
  EXPECT_EQ(pool_.Stats().pages, 6U);
}

TEST_F(PoolStreamsTest, InEagerWorkTheSameStreamTakesAtOnceAndOthersAfterItsEvents) {
  pool_.BeginScope(ScopeKind::kEager);
  const Block block = Allocate(2 * kPage, kA);
  watch_.Submit(kA);
  const auto pieces = pool_.Pieces(block.address);
  pool_.Free(block.address);
  EXPECT_TRUE(GetsBytesOf(pieces, 2 * kPage, kA));
  pool_.EndScope();
  pool_.BeginScope(ScopeKind::kEager);
  EXPECT_TRUE(GetsBytesOf(pieces, 2 * kPage, kA)) << "the stream still orders its own work";
  EXPECT_EQ(pool_.Stats().pages, 2U);
  EXPECT_FALSE(GetsBytesOf(pieces, 2 * kPage, kB)) << "A has not done its work yet";
  EXPECT_EQ(pool_.Stats().pages, 4U);
  pool_.EndScope();
  watch_.FinishAll();
  pool_.BeginScope(ScopeKind::kEager);
  Allocate(4 * kPage, kB);
  EXPECT_EQ(pool_.Stats().pages, 4U);
}

TEST_F(PoolStreamsTest, ACaptureDoesNotTakeWhatEagerWorkHasNotDoneWith) {
  pool_.BeginScope(ScopeKind::kEager);
  const Block block = Allocate(2 * kPage, kA);
  watch_.Submit(kA);
  const auto pieces = pool_.Pieces(block.address);
  pool_.Free(block.address);
  pool_.EndScope();
  pool_.BeginScope(ScopeKind::kCapture);
  // The graph will be replayed on whatever stream, so not even A may take it now.
  EXPECT_FALSE(GetsBytesOf(pieces, 2 * kPage, kA));
  watch_.FinishAll();
  EXPECT_TRUE(GetsBytesOf(pieces, 4 * kPage, kA)) << "done now, and found out at once";
}

TEST_F(PoolStreamsTest, ASmallBlockAsksWhatIsDoneBeforeThePoolGrows) {
  pool_.BeginScope(ScopeKind::kEager);
  const Block most = Allocate(15 * kGranule, kA);
  const Block rest = Allocate(kGranule, kA);
  watch_.Submit(kA);
  pool_.Free(most.address);
  pool_.Free(rest.address);
  pool_.EndScope();
  pool_.BeginScope(ScopeKind::kCapture);
  watch_.FinishAll();
  Allocate(kGranule, kB);
  EXPECT_EQ(pool_.Stats().pages, 1U);
}

TEST_F(PoolStreamsTest, AnEagerBlockWithAForeignUseWaitsForBothStreams) {
  pool_.BeginScope(ScopeKind::kEager);
  const Block block = Allocate(2 * kPage, kA);
  watch_.Submit(kA);
  pool_.RecordUse(block.address, kB);
  const uint64_t use = watch_.Submit(kB);
  const auto pieces = pool_.Pieces(block.address);
  pool_.Free(block.address);
  EXPECT_FALSE(GetsBytesOf(pieces, 2 * kPage, kA));
  pool_.EndScope();
  watch_.Progress(kA, 100);
  pool_.BeginScope(ScopeKind::kCapture);
  EXPECT_FALSE(GetsBytesOf(pieces, 2 * kPage, kA));
  watch_.Finish(kB, use);
  watch_.FinishAll();
  EXPECT_TRUE(GetsBytesOf(pieces, 2 * kPage, kA) || GetsBytesOf(pieces, 4 * kPage, kA));
}

TEST_F(PoolStreamsTest, EventsAreNotKeptForLongerThanNeeded) {
  for (int i = 0; i < 50; ++i) {
    pool_.BeginScope(ScopeKind::kEager);
    AllocateAndFree(kPage, kA);
    AllocateAndFree(kPage, kB);
    pool_.EndScope();
    watch_.FinishAll();
  }
  EXPECT_LE(watch_.events(), 4U);
}

}  // namespace
}  // namespace cgp
