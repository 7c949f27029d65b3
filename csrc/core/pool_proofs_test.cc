// What one capture of several streams may take: whatever its graph proves, and nothing else.
// pool_proofs_captures_test.cc has captures beside and after each other.
#include <gtest/gtest.h>

#include <vector>

#include "core/pool.h"
#include "core/pool_proofs_test_pool.h"

namespace cgp {
namespace {

// --- What one stream alone has worked on ---

TEST_F(PoolProofsTest, AStreamThatWaitsForTheFreeTakesTheBytes) {
  Begin({kA, kB});
  const Block block = Allocate(kPage, kA);
  Launch(kA);
  Free(block);
  EXPECT_FALSE(Reuses(kPage, kB));
  Join(kB, kA);
  EXPECT_TRUE(Reuses(kPage, kB));
}

TEST_F(PoolProofsTest, BehindAnyNumberOfOtherStreamsToo) {
  Begin({kA, kB, kC});
  Allocate(kGranule, kB);  // there are several from here on
  const Block block = Allocate(kPage, kA);
  Launch(kA);
  Free(block);
  Join(kC, kA);
  Launch(kC);
  Join(kB, kC);
  Launch(kB);
  EXPECT_TRUE(Reuses(kPage, kB));
}

TEST_F(PoolProofsTest, TheOwnStreamTakesItsBytesAtOnce) {
  Begin({kA, kB});
  const Block first = Allocate(kPage, kA);
  Launch(kA);
  Free(first);
  EXPECT_FALSE(Reuses(kPage, kB));
  EXPECT_TRUE(Reuses(kPage, kA)) << "freed while A was alone";
  const Block second = Allocate(kPage, kA);
  Launch(kA);
  Free(second);
  EXPECT_TRUE(Reuses(kPage, kA)) << "and since it is not";
}

// Later work of the stream has nothing to do with the bytes.
TEST_F(PoolProofsTest, WhatIsFreedIsBehindWhatItsStreamHadCapturedThen) {
  Begin({kA, kB});
  const Block block = Allocate(kPage, kA);
  Allocate(kPage, kB);
  Launch(kA);
  const Frontier at_free = Record(kA);
  Free(block);
  Launch(kA);
  Wait(kB, at_free);
  EXPECT_TRUE(Reuses(kPage, kB));
}

TEST_F(PoolProofsTest, AnEventRecordedBeforeTheLastWorkProvesNothing) {
  Begin({kA, kB});
  const Block block = Allocate(kPage, kA);
  Allocate(kPage, kB);
  Launch(kA);
  const Frontier stale = Record(kA);
  Launch(kA);
  Free(block);
  Wait(kB, stale);
  Launch(kB);
  EXPECT_FALSE(Reuses(kPage, kB));
  Join(kB, kA);
  EXPECT_TRUE(Reuses(kPage, kB));
}

TEST_F(PoolProofsTest, WhatIsFreedBeforeAnythingIsCapturedIsFreeToAll) {
  Begin({kA, kB, kC});
  const Block block = Allocate(2 * kPage, kA);
  Free(block);
  EXPECT_TRUE(Reuses(kPage, kB)) << "freed while A was alone";
  EXPECT_TRUE(Reuses(kPage, kA));
  const Block other = Allocate(kPage, kC);
  Free(other);
  EXPECT_TRUE(Reuses(kPage, kB)) << "and since it is not";
}

// --- The second stream ---

// Each free noted no frontier then: what A has captured by now is no less.
TEST_F(PoolProofsTest, WhatTheFirstStreamFreedIsBehindWhatItHadWhenTheSecondCame) {
  Begin({kA, kB});
  const Block block = Allocate(kPage, kA);
  Launch(kA);
  const Frontier at_free = Record(kA);
  Free(block);
  Launch(kA);
  const Frontier at_second = Record(kA);
  EXPECT_FALSE(Reuses(kPage, kB));
  Launch(kA);
  Wait(kB, at_free);
  EXPECT_FALSE(Reuses(kPage, kB));
  Wait(kB, at_second);
  EXPECT_TRUE(Reuses(kPage, kB));
}

TEST_F(PoolProofsTest, ARecordedUseIsASecondStreamToo) {
  Begin({kA, kB});
  const Block freed = Allocate(kPage, kA);
  const Block used = Allocate(kPage, kA);
  Launch(kA);
  Free(freed);
  const Frontier at_use = Record(kA);
  Use(used, kB);
  Launch(kA);
  Wait(kB, at_use);
  EXPECT_TRUE(Reuses(kPage, kB)) << "B stands behind all that A had then";
}

TEST_F(PoolProofsTest, AUseByTheOwnStreamIsNoSecondStream) {
  Begin({kA});
  const Block block = Allocate(kPage, kA);
  Use(block, kA);
  Launch(kA);
  Free(block);
  EXPECT_TRUE(Reuses(kPage, kA));
}

TEST_F(PoolProofsTest, BlocksThatLiveWhenTheSecondStreamComesAreFreedBehindTheirFrontiers) {
  Begin({kA, kB});
  const Block small = Allocate(kGranule, kA);
  const Block block = Allocate(kPage, kA);
  Launch(kA);
  Allocate(kPage, kB);
  const Frontier before = Record(kA);
  Launch(kA);
  Free(block);
  Free(small);
  Wait(kB, before);
  EXPECT_FALSE(Reuses(kPage, kB));
  Join(kB, kA);
  EXPECT_TRUE(Reuses(kPage, kB));
}

// Frees of streams that have never allocated in the scope.
TEST_F(PoolProofsTest, AStreamThatOnlyFreesNeedsNoView) {
  const CaptureId first = Begin({kA, kB});
  const Block of_b = Allocate(kPage, kB);
  Allocate(kPage, kA);
  End(first);
  Begin({kA, kB});
  Launch(kB);
  Free(of_b);
  EXPECT_FALSE(Reuses(kPage, kA));
  Join(kA, kB);
  EXPECT_TRUE(Reuses(kPage, kA));
}

// --- What several streams have worked on ---

TEST_F(PoolProofsTest, ABlockThatAnotherStreamUsedIsNotItsOwnStreamsAtOnce) {
  Begin({kA, kB});
  const Block block = Allocate(kPage, kA);
  Use(block, kB);
  Launch(kA);
  Launch(kB);
  Free(block);
  EXPECT_FALSE(Reuses(kPage, kA));
  Join(kA, kB);
  EXPECT_TRUE(Reuses(kPage, kA));
}

TEST_F(PoolProofsTest, NorIsItTheUsers) {
  Begin({kA, kB});
  const Block block = Allocate(kPage, kA);
  Use(block, kB);
  Launch(kA);
  Launch(kB);
  Free(block);
  EXPECT_FALSE(Reuses(kPage, kB));
  Join(kB, kA);
  EXPECT_TRUE(Reuses(kPage, kB));
}

TEST_F(PoolProofsTest, ABlockThatTwoOthersUsedIsBehindAllThree) {
  Begin({kA, kB, kC, kD});
  const Block block = Allocate(kPage, kA);
  Use(block, kB);
  Use(block, kC);
  Use(block, kB);
  for (const StreamId stream : {kA, kB, kC}) Launch(stream);
  Free(block);
  for (const StreamId stream : {kC, kA, kB}) {
    EXPECT_FALSE(Reuses(kPage, kD));
    Join(kD, stream);
  }
  EXPECT_TRUE(Reuses(kPage, kD));
}

// What a stream does between the use that was recorded and the free may be that use.
TEST_F(PoolProofsTest, AUseIsBehindWhatItsStreamHasAtTheFree) {
  Begin({kA, kB, kC});
  const Block block = Allocate(kPage, kA);
  Launch(kB);
  Use(block, kB);
  const Frontier at_use = Record(kB);
  Launch(kB);
  const Frontier at_free = Record(kB);
  Free(block);
  Launch(kB);
  Wait(kC, at_use);
  EXPECT_FALSE(Reuses(kPage, kC));
  Wait(kC, at_free);
  EXPECT_TRUE(Reuses(kPage, kC)) << "and A has captured nothing";
}

// --- Streams that come late ---

TEST_F(PoolProofsTest, AStreamThatJoinsLateTakesWhatItStandsBehind) {
  Begin({kA, kB});
  std::vector<Block> blocks{Allocate(kPage, kA), Allocate(kPage, kB), Allocate(kPage, kA)};
  Launch(kA);
  Launch(kB);
  Free(blocks[0]);
  Free(blocks[1]);
  const Frontier before = Record(kA);
  Launch(kA);
  Free(blocks[2]);
  Wait(kC, before);
  EXPECT_TRUE(Reuses(kPage, kC));
  EXPECT_FALSE(Reuses(kPage, kC)) << "neither B's block nor A's second";
  Join(kC, kB);
  EXPECT_TRUE(Reuses(kPage, kC));
  EXPECT_FALSE(Reuses(kPage, kC));
  Join(kC, kA);
  EXPECT_TRUE(Reuses(kPage, kC));
}

TEST_F(PoolProofsTest, FencesOfManyFreesAreEachTakenWhenTheirTurnComes) {
  Begin({kA, kB});
  Allocate(kPage, kB);
  std::vector<Block> blocks;
  for (int i = 0; i < 20; ++i) blocks.push_back(Allocate(kPage, kA));
  std::vector<Frontier> events;
  for (const Block& block : blocks) {
    Launch(kA);
    events.push_back(Record(kA));
    Free(block);
  }
  for (const Frontier& event : events) {
    Wait(kB, event);
    EXPECT_TRUE(Reuses(kPage, kB));
    EXPECT_FALSE(Reuses(kPage, kB));
  }
}

// The graph proves nothing to it any more, and its own order only what it has had since: before, it
// may have given itself what it had by a proof.
TEST_F(PoolProofsTest, AStreamBehindAProgrammaticLaunchTakesOnlyWhatItHasHadSince) {
  Begin({kA, kB});
  std::vector<Block> of_a;
  std::vector<Block> of_b;
  for (int i = 0; i < 3; ++i) {
    of_a.push_back(Allocate(kPage, kA));
    of_b.push_back(Allocate(kPage, kB));
  }
  Launch(kA);
  Launch(kB);
  for (int i = 0; i < 2; ++i) Free(of_b[static_cast<std::size_t>(i)]);
  Join(kA, kB);
  EXPECT_TRUE(Reuses(kPage, kA)) << "the first of B's";
  Free(of_a[2]);
  graphs_.Launch(kA, HostGraphs::LaunchKind::kProgrammatic);
  EXPECT_FALSE(Reuses(kPage, kA)) << "neither the second nor its own";
  Free(of_b[2]);
  Free(of_a[0]);
  Launch(kA);
  EXPECT_FALSE(Reuses(kPage, kA)) << "of before, though freed behind it";
  Free(Allocate(kPage, kA));
  EXPECT_TRUE(Reuses(kPage, kA));
  EXPECT_TRUE(Reuses(kPage, kB));
}

// --- Which bytes ---

TEST_F(PoolProofsTest, NeighboursBehindDifferentFencesAreOneToWhomMayTakeBoth) {
  Begin({kA, kB, kC});
  const Block low = Allocate(kPage / 2, kA);
  const Block high = Allocate(kPage / 2, kB);
  Launch(kA);
  Launch(kB);
  Free(low);
  Free(high);
  Join(kC, kA);
  EXPECT_FALSE(Reuses(9 * kGranule, kC));
  Join(kC, kB);
  EXPECT_TRUE(Reuses(kPage, kC));
}

// A fence each would cut up memory, and fill the tables of a long capture.
TEST_F(PoolProofsTest, WhatIsFreedAtOnePointIsBehindOneFence) {
  Begin({kA, kB});
  Allocate(kPage, kB);
  const Block low = Allocate(kPage / 2, kA);
  const Block high = Allocate(kPage / 2, kA);
  Launch(kA);
  Free(low);
  Free(high);
  EXPECT_EQ(pool_.free_extents(), 1U);
  const Block again = Allocate(kPage / 2, kA);
  Launch(kA);
  Free(again);
  EXPECT_EQ(pool_.free_extents(), 2U) << "this one at another";
}

TEST_F(PoolProofsTest, ALargeBlockLiesOverPagesBehindSeveralFences) {
  Begin({kA, kB, kC, kD});
  std::vector<Block> blocks;
  for (const StreamId stream : {kA, kB, kC}) blocks.push_back(Allocate(kPage, stream));
  for (const StreamId stream : {kA, kB, kC}) Launch(stream);
  for (const Block& block : blocks) Free(block);
  Join(kD, kA);
  Join(kD, kC);
  const Block two = Allocate(2 * kPage, kD);
  EXPECT_EQ(pool_.Stats().pages, 3U);
  Free(two);
  Join(kD, kB);
  Allocate(3 * kPage, kD);
  EXPECT_EQ(pool_.Stats().pages, 3U);
}

TEST_F(PoolProofsTest, WhatIsLeftOfFreedBytesStaysBehindTheirFence) {
  Begin({kA, kB});
  Allocate(kGranule, kB);
  const Block rest = Allocate(kPage - kGranule, kA);
  const Block block = Allocate(kPage, kA);
  Launch(kA);
  Free(block);
  Allocate(4 * kGranule, kA);  // of what A freed: the 12 behind it are an extent of their own now
  EXPECT_EQ(pool_.Stats().pages, 2U);
  EXPECT_FALSE(Reuses(12 * kGranule, kB));
  Join(kB, kA);
  EXPECT_TRUE(Reuses(12 * kGranule, kB));
  EXPECT_EQ(rest.bytes, kPage - kGranule);
}

TEST_F(PoolProofsTest, BytesTakenAndFreedAgainAreBehindTheLaterFreeOnly) {
  Begin({kA, kB});
  Allocate(kPage, kB);
  const Block block = Allocate(kPage, kA);
  Launch(kA);
  const Frontier early = Record(kA);
  Free(block);
  const Block again = Allocate(kPage, kA);
  EXPECT_EQ(pool_.Stats().pages, 2U);
  Launch(kA);
  Free(again);
  Wait(kB, early);
  EXPECT_FALSE(Reuses(kPage, kB));
  Join(kB, kA);
  EXPECT_TRUE(Reuses(kPage, kB));
}

// Of equal places the one that the fewest streams may take: the others are left with more.
TEST_F(PoolProofsTest, ASmallBlockTakesTheLeastWantedOfEqualPlaces) {
  Begin({kA, kB});
  std::vector<Block> blocks;
  for (int i = 0; i < 16; ++i) blocks.push_back(Allocate(kGranule, i % 2 == 0 ? kA : kB));
  Launch(kA);
  Launch(kB);
  Join(kA, kB);
  Free(blocks[4]);  // A's alone
  Free(blocks[9]);  // A's and B's
  EXPECT_EQ(Allocate(kGranule, kA).address, blocks[4].address);
  EXPECT_EQ(Allocate(kGranule, kA).address, blocks[9].address);
  Free(blocks[11]);
  Free(blocks[2]);
  EXPECT_EQ(Allocate(kGranule, kA).address, blocks[2].address) << "whichever is freed first";
  EXPECT_EQ(Allocate(kGranule, kB).address, blocks[11].address);
  EXPECT_EQ(pool_.Stats().pages, 1U);
}

TEST_F(PoolProofsTest, ALargeBlockTakesTheLeastWantedOfEqualPlaces) {
  Begin({kA, kB});
  Launch(kA);
  Launch(kB);
  Join(kA, kB);
  for (const std::size_t mine : {0U, 1U}) {
    std::vector<Block> pages;
    for (std::size_t i = 0; i < 2; ++i) pages.push_back(Allocate(kPage, i == mine ? kA : kB));
    Free(pages[mine]);
    Free(pages[1 - mine]);
    EXPECT_EQ(Allocate(kPage, kA).address, pages[mine].address);
    EXPECT_EQ(Allocate(kPage, kA).address, pages[1 - mine].address);
  }
}

// What one stream allocates goes where its like lay, though newer ranges have room.
TEST_F(PoolProofsTest, ACaptureOfSeveralStreamsGetsNoAdvice) {
  const CaptureId before = Begin({kA});
  Allocate(4 * kGranule, kA);
  const Block hole = Allocate(4 * kGranule, kA);  // B's goes there
  Allocate(8 * kGranule, kA);
  Free(hole);
  End(before);
  const auto places = [&](std::initializer_list<StreamId> streams) {
    const CaptureId capture = Begin(streams);
    if (streams.size() > 1) Allocate(kGranule, kB);
    const Block first = Allocate(4 * kPage, kA);
    const Block second = Allocate(5 * kPage, kA);
    Free(first);
    Free(second);
    End(capture);
    return std::pair(first.address, second.address);
  };
  const auto guide = places({kA});
  EXPECT_EQ(places({kA}), guide);
  EXPECT_NE(places({kA, kB}).first, guide.first);
}

// Streams hold free pages back from each other: where the pool is small, one at a time.
TEST_F(PoolProofsTest, ASmallPoolOfSeveralStreamsGrowsPageByPage) {
  Begin({kA, kB});
  Allocate(kGranule, kA);
  Allocate(40 * kPage, kB);
  Allocate(40 * kPage, kA);
  EXPECT_EQ(pool_.handles(), pool_.Stats().pages);
}

// Page 0 may be taken by both streams, page 1 by A alone.
TEST_F(PoolProofsTest, ASmallBlockBreaksTheWholePageThatTheOthersDoNotWant) {
  Begin({kA, kB});
  const Block anyones = Allocate(kPage, kA);
  const Block own = Allocate(kPage, kA);
  Allocate(kPage, kB);
  Free(anyones);
  Launch(kA);
  Free(own);
  EXPECT_TRUE(Reuses(kGranule, kA));
  EXPECT_TRUE(Reuses(kPage, kB));
}

}  // namespace
}  // namespace cgp
