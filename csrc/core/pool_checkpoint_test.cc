// Going back to a checkpoint: who lives then, where, and what the books say. Who may take what was
// let go of is pool_checkpoint_fences_test.cc's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/checkpoint_test_set.h"
#include "core/pool_values.h"
#include "testing/pool_of.h"

namespace cgp {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

class PoolCheckpointTest : public CheckpointTest {
 protected:
  // A graph that leaves its outputs behind: some small, one of several pages, one stitched.
  std::vector<Block> Capture(uint64_t scale, StreamId stream = kA) {
    set_.BeginScope(kId, ScopeKind::kCapture);
    std::vector<Block> outputs = {Allocate(scale * 3 * kGranule, stream)};
    const Block scratch = Allocate(scale * 2 * kPage, stream);
    outputs.push_back(Allocate(kGranule, stream));
    set_.Free(scratch.address);
    outputs.push_back(Allocate(scale * (kPage + 5 * kGranule), stream));
    set_.EndScope(kId);
    return outputs;
  }

  void FreeAll(const std::vector<Block>& blocks) {
    for (const Block& block : blocks) set_.Free(block.address);
  }
};

// --- What lives ---

TEST_F(PoolCheckpointTest, WhatLivedThenLivesAgainAndNothingElse) {
  set_.BeginScope(kId, ScopeKind::kCapture);
  const Block stays = Allocate(3 * kPage);
  const Block dies = Allocate(1000);
  const Block large = Allocate(5 * kPage);
  set_.EndScope(kId);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  const Live live_then = Living();

  set_.Free(dies.address);
  set_.Free(large.address);
  set_.BeginScope(kId, ScopeKind::kCapture);
  for (uint64_t i = 0; i < 20; ++i) Allocate(kPage + i * 700);
  set_.EndScope(kId);

  const RestoreDelta delta = set_.Restore(kId, checkpoint);
  EXPECT_EQ(Living(), live_then);
  EXPECT_THAT(delta.allocated, UnorderedElementsAre(stays, dies, large));
  EXPECT_THAT(delta.freed, SizeIs(21));
  EXPECT_THAT(delta.freed, ::testing::Contains(stays)) << "what lives on stands in both";
  EXPECT_EQ(set_.Usage().all.count.current, 3U);
}

TEST_F(PoolCheckpointTest, NothingLivedThenSoNothingLives) {
  FreeAll(Capture(1));
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  Capture(2);
  const RestoreDelta delta = set_.Restore(kId, checkpoint);
  EXPECT_THAT(delta.allocated, IsEmpty());
  EXPECT_THAT(delta.freed, SizeIs(3));
  EXPECT_THAT(Living(), IsEmpty());
  EXPECT_EQ(set_.Stats(kId).allocated_bytes, 0U);
}

TEST_F(PoolCheckpointTest, RestoredAtOnceItChangesNothing) {
  const std::vector<Block> outputs = Capture(3);
  for (const Block& block : outputs) Fill(block, block.address);
  const Live before = Living();
  const PoolStats stats = set_.Stats(kId);
  const uint64_t calls = watch_.calls();
  const RestoreDelta delta = set_.Restore(kId, set_.Checkpoint(kId));
  EXPECT_THAT(delta.freed, SizeIs(3));
  EXPECT_THAT(delta.allocated, SizeIs(3));
  EXPECT_EQ(Living(), before);
  EXPECT_EQ(set_.Stats(kId).allocations, stats.allocations);
  EXPECT_EQ(set_.Stats(kId).frees, stats.frees);
  EXPECT_EQ(watch_.calls(), calls);
  for (const Block& block : outputs) EXPECT_TRUE(Holds(block, block.address));
}

// A graph writes its outputs to the addresses that it was captured with: they must be the block's.
TEST_F(PoolCheckpointTest, RevivedBlocksHaveTheirBytesAndOthersDoNot) {
  const std::vector<Block> first = Capture(2);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  FreeAll(first);
  const std::vector<Block> second = Capture(5);
  set_.Restore(kId, checkpoint);
  for (const Block& block : first) Fill(block, block.address);
  const std::vector<Block> third = Capture(4);
  for (const Block& block : third) Fill(block, block.address);
  for (const Block& block : first) EXPECT_TRUE(Holds(block, block.address));
  for (const Block& block : third) EXPECT_TRUE(Holds(block, block.address));
}

TEST_F(PoolCheckpointTest, BlocksThatLiveOnKeepWhatTheyHold) {
  const std::vector<Block> first = Capture(2);
  for (const Block& block : first) Fill(block, block.address);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  for (uint64_t scale = 1; scale < 6; ++scale) {
    for (const Block& block : Capture(scale)) Fill(block, 0);
  }
  set_.Restore(kId, checkpoint);
  for (const Block& block : first) EXPECT_TRUE(Holds(block, block.address));
}

// What native's restore failed at with expandable segments (pytorch#161356).
TEST_F(PoolCheckpointTest, ThePoolMayHaveGrown) {
  const std::vector<Block> first = Capture(1);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  const Live live_then = Living();
  const PoolStats small = set_.Stats(kId);
  FreeAll(first);
  std::vector<Block> others;
  for (uint64_t scale = 2; scale < 30; scale += 3) {
    for (const Block& block : Capture(scale)) others.push_back(block);
    if (scale % 2 == 0) set_.Free(others[others.size() - 3].address);
  }
  const PoolStats grown = set_.Stats(kId);
  ASSERT_GT(grown.pages, small.pages);
  ASSERT_GT(grown.ranges, small.ranges);
  ASSERT_GT(grown.page_mappings, watch_.handles()) << "pages stand in several ranges";
  const uint64_t calls = watch_.calls();
  set_.Restore(kId, checkpoint);
  EXPECT_EQ(Living(), live_then);
  EXPECT_EQ(watch_.calls(), calls) << "what is mapped stays";
  const PoolStats stats = set_.Stats(kId);
  EXPECT_EQ(stats.pages, grown.pages);
  EXPECT_EQ(stats.page_mappings, grown.page_mappings);
}

// Which of the checkpoints comes next is nobody's to predict: a walk through a tree whose branches
// are captured as it goes.
TEST_F(PoolCheckpointTest, BackAndForthBetweenTheBranchesOfATree) {
  struct Node {
    PoolCheckpoint checkpoint;
    Live live;
  };
  std::mt19937_64 random(5);
  set_.Retain(kId);
  std::vector<Node> tree = {{set_.Checkpoint(kId), Living()}};
  for (int step = 0; step < 400; ++step) {
    const Node& node = tree[random() % tree.size()];
    set_.Restore(kId, node.checkpoint);
    ASSERT_EQ(Living(), node.live) << "in step " << step;
    if (step % 8 != 0) continue;
    // Some of what the node holds dies before the branch is captured.
    for (const auto& [address, block] : node.live) {
      if (random() % 3 == 0) set_.Free(address);
    }
    Capture(1 + random() % 7, random() % 4 == 0 ? kB : kA);
    tree.push_back({set_.Checkpoint(kId), Living()});
    set_.Check();
  }
}

TEST_F(PoolCheckpointTest, AThousandRestoresAddNothing) {
  const std::vector<Block> root = Capture(2);
  const PoolCheckpoint before = set_.Checkpoint(kId);
  PoolCheckpoint behind = before;
  PoolStats stats;
  size_t events = 0;
  for (int round = 0; round < 500; ++round) {
    set_.Restore(kId, before);
    set_.Free(root[1].address);
    Capture(3);
    // Graph trees warm up in the pool.
    const Block eager = AllocateIn(ScopeKind::kEager, 3 * kPage, kB);
    watch_.Submit(kB);
    if (round % 2 == 0) set_.Free(eager.address);
    behind = set_.Checkpoint(kId);
    set_.Restore(kId, before);
    set_.Restore(kId, behind);
    watch_.FinishAll();
    if (round == 10) {
      stats = set_.Stats(kId);
      events = watch_.events();
    }
  }
  const PoolStats end = set_.Stats(kId);
  EXPECT_EQ(end.pages, stats.pages);
  EXPECT_EQ(end.ranges, stats.ranges);
  EXPECT_EQ(end.page_mappings, stats.page_mappings);
  EXPECT_EQ(end.peak_allocated_bytes, stats.peak_allocated_bytes);
  EXPECT_LE(watch_.events(), events + 2);
  EXPECT_EQ(watch_.handles(), end.pages);
}

TEST_F(PoolCheckpointTest, ACheckpointIsOfThatMoment) {
  const std::vector<Block> outputs = Capture(1);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  const Live live_then = Living();
  {
    // A copy is as good, and the pool keeps nothing of either.
    const PoolCheckpoint copy = checkpoint;
    FreeAll(outputs);
    set_.Restore(kId, copy);
  }
  EXPECT_EQ(Living(), live_then);
  FreeAll(outputs);
  EXPECT_THAT(Living(), IsEmpty());
  set_.Restore(kId, checkpoint);
  EXPECT_EQ(Living(), live_then);
}

// Between the scopes of the pool, others may be open.
TEST_F(PoolCheckpointTest, OtherPoolsAreLeftAlone) {
  constexpr PoolId kOther{0, 2};
  Capture(1);
  set_.BeginScope(kOther, ScopeKind::kCapture);
  const Block other = set_.Allocate(kOther, 3 * kPage, kA);
  Fill(other, 7);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  Capture(2);
  set_.Restore(kId, checkpoint);
  EXPECT_EQ(PoolOf(set_, other.address), kOther);
  EXPECT_TRUE(Holds(other, 7));
  set_.Free(other.address);
  set_.EndScope(kOther);
}

// --- What comes after ---

TEST_F(PoolCheckpointTest, RevivedBlocksAreFreedOnceAndDroppedOnesNeverMore) {
  const Block revived = AllocateIn(ScopeKind::kCapture, 2 * kPage);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  set_.Free(revived.address);
  const Block like_it = AllocateIn(ScopeKind::kCapture, 2 * kPage, kB);
  ASSERT_EQ(like_it.address, revived.address);
  const Block dropped = AllocateIn(ScopeKind::kCapture, 9 * kPage);
  set_.Restore(kId, checkpoint);

  EXPECT_EQ(PoolOf(set_, revived.address), kId);
  EXPECT_EQ(set_.At(revived.address)->block, revived);
  EXPECT_EQ(set_.Find(revived.address + kPage), revived);
  EXPECT_EQ(PoolOf(set_, dropped.address), std::nullopt);
  EXPECT_EQ(set_.TryFree(dropped.address), std::nullopt);
  EXPECT_FALSE(set_.TryRecordUse(dropped.address, kB));
  EXPECT_EQ(set_.TryFree(revived.address), revived);
  EXPECT_THROW(set_.Free(revived.address), UsageError);
}

TEST_F(PoolCheckpointTest, CapturesGoOnAsIfNothingElseHadEverLived) {
  const std::vector<Block> root = Capture(4);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  FreeAll(Capture(9));
  const uint64_t pages = set_.Stats(kId).pages;
  for (uint64_t scale = 1; scale <= 9; ++scale) {
    set_.Restore(kId, checkpoint);
    Capture(scale);
    set_.Check();
  }
  EXPECT_EQ(set_.Stats(kId).pages, pages) << "what the restores let go of is taken again";
  // And without the root's blocks there is as much room as there ever was.
  set_.Restore(kId, checkpoint);
  FreeAll(root);
  AllocateIn(ScopeKind::kCapture, pages * kPage, kC);
  EXPECT_EQ(set_.Stats(kId).pages, pages);
}

// What lives at the end of a scope lives on, so small blocks are put beside it; what a restore
// brings back is no other. Beside a large block's end they would fit better.
TEST_F(PoolCheckpointTest, SmallBlocksGatherBesideRevivedOnes) {
  set_.BeginScope(kId, ScopeKind::kEager);
  const Block large = Allocate(kPage + 12 * kGranule);
  const Block filling = Allocate(4 * kGranule);
  const Block small = Allocate(6 * kGranule);
  set_.Free(filling.address);
  set_.EndScope(kId);
  const PageId home = set_.Pieces(small.address).front().page;
  ASSERT_FALSE(Overlap(set_.Pieces(large.address), {{home, 0, kPage}}));
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  set_.Free(small.address);
  set_.BeginScope(kId, ScopeKind::kEager);
  set_.EndScope(kId);
  set_.Restore(kId, checkpoint);
  const Block next = AllocateIn(ScopeKind::kEager, 3 * kGranule);
  EXPECT_EQ(set_.Pieces(next.address).front().page, home);
}

TEST_F(PoolCheckpointTest, AllIsGivenBackInTheEnd) {
  const std::vector<Block> outputs = Capture(2);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  FreeAll(outputs);
  Capture(5);
  set_.Restore(kId, checkpoint);
  while (set_.UseCount(kId) > 0) set_.Release(kId);
  FreeAll(outputs);
  EXPECT_GT(set_.Trim(), 0U);
  EXPECT_THAT(set_.ids(), IsEmpty());
  EXPECT_EQ(watch_.handles() + watch_.mappings() + watch_.reservations() + watch_.events(), 0U);
}

// --- The books ---

TEST_F(PoolCheckpointTest, StatsCountWhatChanged) {
  const std::vector<Block> first = Capture(2);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  const PoolStats then = set_.Stats(kId);
  set_.Free(first[0].address);
  Capture(1);
  const PoolStats before = set_.Stats(kId);
  set_.Restore(kId, checkpoint);
  const PoolStats stats = set_.Stats(kId);
  EXPECT_EQ(stats.live_blocks, 3U);
  EXPECT_EQ(stats.allocated_bytes, then.allocated_bytes);
  EXPECT_EQ(stats.requested_bytes, then.requested_bytes);
  EXPECT_EQ(stats.allocations, before.allocations + 1);
  EXPECT_EQ(stats.frees, before.frees + 3);
}

// What is freed and what is allocated never live together.
TEST_F(PoolCheckpointTest, PeaksAreWhatThereWasAtOnce) {
  const Block first = AllocateIn(ScopeKind::kCapture, 5 * kPage);
  const PoolCheckpoint five = set_.Checkpoint(kId);
  set_.Free(first.address);
  AllocateIn(ScopeKind::kCapture, 4 * kPage - 100, kB);
  const PoolCheckpoint four = set_.Checkpoint(kId);
  set_.ResetPeaks();
  set_.TakeNewPeak();
  set_.Restore(kId, five);
  EXPECT_TRUE(set_.TakeNewPeak());
  EXPECT_EQ(set_.Usage().all.bytes.peak, 5 * kPage);
  EXPECT_EQ(set_.Usage().all.requested_bytes.peak, 5 * kPage);
  EXPECT_EQ(set_.Usage().all.count.peak, 1U);
  set_.ResetPeaks();
  set_.Restore(kId, four);
  EXPECT_FALSE(set_.TakeNewPeak());
  EXPECT_EQ(set_.Usage().all.bytes.peak, 5 * kPage);
  EXPECT_EQ(set_.Usage().all.bytes.current, 4 * kPage);
  EXPECT_EQ(set_.Usage().all.requested_bytes.current, 4 * kPage - 100);
  EXPECT_EQ(set_.Stats(kId).peak_allocated_bytes, 5 * kPage);
}

// As native has it: all that lived is freed, all that lives is allocated.
TEST_F(PoolCheckpointTest, TrafficCountsAllBlocks) {
  Capture(1);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  AllocateIn(ScopeKind::kCapture, kPage);
  set_.ResetTraffic();
  set_.Restore(kId, checkpoint);
  EXPECT_EQ(set_.Usage().all.count.removed, 4U);
  EXPECT_EQ(set_.Usage().all.count.added, 3U);
  EXPECT_EQ(set_.Usage().reserved_bytes.added, 0U);
}

// --- What is refused ---

class PoolCheckpointErrorTest : public PoolCheckpointTest {
 protected:
  void ExpectRefused(const std::function<void()>& call, const std::string& reason) {
    const Live before = set_.Contains(kId) ? Living() : Live{};
    try {
      call();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr(reason));
    }
    if (set_.Contains(kId)) {
      EXPECT_EQ(Living(), before);
    }
    set_.Check();
  }
};

TEST_F(PoolCheckpointErrorTest, UnknownPools) {
  Capture(1);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  ExpectRefused([&] { set_.Checkpoint({0, 9}); }, "(0, 9)");
  ExpectRefused([&] { set_.Restore({0, 9}, checkpoint); }, "(0, 9)");
}

TEST_F(PoolCheckpointErrorTest, OfAnotherPool) {
  Capture(1);
  set_.Retain({0, 2});
  const PoolCheckpoint other = set_.Checkpoint({0, 2});
  ExpectRefused([&] { set_.Restore(kId, other); }, "another pool");
  const PoolCheckpoint own = set_.Checkpoint(kId);
  ExpectRefused([&] { set_.Restore({0, 2}, own); }, "another pool");
  ExpectRefused([&] { set_.Restore(kId, PoolCheckpoint{}); }, "another pool");
}

TEST_F(PoolCheckpointErrorTest, OfAPoolThatWasMadeAnewUnderItsId) {
  FreeAll(Capture(1));
  PoolCheckpoint gone = set_.Checkpoint(kId);
  while (set_.UseCount(kId) > 0) set_.Release(kId);
  set_.Trim();
  ExpectRefused([&] { set_.Restore(kId, gone); }, "there is no pool");
  Capture(1);
  ExpectRefused([&] { set_.Restore(kId, gone); }, "given back since");
}

TEST_F(PoolCheckpointErrorTest, WithinAScope) {
  Capture(1);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  for (const ScopeKind kind : {ScopeKind::kCapture, ScopeKind::kEager}) {
    set_.BeginScope(kId, kind);
    Allocate(kPage);
    ExpectRefused([&] { set_.Checkpoint(kId); }, "is being allocated to");
    ExpectRefused([&] { set_.Restore(kId, checkpoint); }, "is being allocated to");
    set_.EndScope(kId);
  }
  set_.Restore(kId, checkpoint);
}

// Three eager blocks are dropped, and an earlier one's end is asked for, which fails once.
TEST_F(PoolCheckpointErrorTest, ADriverErrorLeavesEverythingAsItWas) {
  const std::vector<Block> outputs = Capture(2);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  FreeAll(outputs);
  set_.BeginScope(kId, ScopeKind::kEager);
  Allocate(3 * kPage, kA);
  set_.RecordUse(Allocate(5 * kGranule, kA).address, kB);
  Allocate(2 * kPage, kB);
  const Block freed = Allocate(kPage, kC);
  watch_.Submit(kA);
  watch_.Submit(kC);
  set_.Free(freed.address);
  set_.EndScope(kId);

  const PoolStats stats = set_.Stats(kId);
  const Live before = Living();
  faulty_.Arm({.only = DriverCall::kEventDone});
  EXPECT_THROW(set_.Restore(kId, checkpoint), DriverError);
  EXPECT_EQ(faulty_.failures(), 1U);
  faulty_.Disarm();
  EXPECT_EQ(Living(), before);
  EXPECT_EQ(set_.Stats(kId).allocations, stats.allocations);
  EXPECT_EQ(set_.Stats(kId).frees, stats.frees);
  EXPECT_EQ(set_.Usage().all.count.removed, outputs.size() + 2);
  set_.Check();
  const RestoreDelta delta = set_.Restore(kId, checkpoint);
  EXPECT_THAT(delta.freed, SizeIs(3));
  EXPECT_THAT(delta.allocated, SizeIs(3));
}

}  // namespace
}  // namespace cgp
