// What one capture of several streams may take: whatever its graph proves, and nothing else.
// pool_proofs_captures_test.cc has captures beside and after each other.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/pool.h"
#include "core/pool_proofs_test_pool.h"

namespace cgp {
namespace {

TEST_P(PoolScripts, GivesWhatIsProvenAndNothingElse) { Play(GetParam().script); }

std::vector<PoolScript> Scripts() {
  return {
      // --- What one stream alone has worked on ---
      {"AStreamThatWaitsForTheFreeTakesTheBytes",
       "capture A B; a = A; A launches; free a; B grows; B waits A; B reuses"},
      {"BehindAnyNumberOfOtherStreamsToo",
       "capture A B C; b = B 1g (there are several from here on); a = A; A launches; free a;"
       "C waits A; C launches; B waits C; B launches; B reuses"},
      // And the node's second predecessor.
      {"BehindTheSecondOfTwoThatANodeWaitsFor",
       "capture A B; x = A; b = B; B launches; A launches; free b; A waits B; A launches; A "
       "launches;"
       "A reuses"},
      {"TheOwnStreamTakesItsBytesAtOnce",
       "capture A B; a = A; A launches; free a; B grows; A reuses (freed while A was alone);"
       "c = A; A launches; free c; A reuses (and since it is not)"},
      // Later work of the stream has nothing to do with the bytes.
      {"WhatIsFreedIsBehindWhatItsStreamHadCapturedThen",
       "capture A B; a = A; b = B; A launches; e marks A; free a; A launches; B waits e; B reuses"},
      {"AnEventRecordedBeforeTheLastWorkProvesNothing",
       "capture A B; a = A; b = B; A launches; stale marks A; A launches; free a; B waits stale;"
       "B launches; B grows; B waits A; B reuses"},
      {"WhatIsFreedBeforeAnythingIsCapturedIsFreeToAll",
       "capture A B C; a = A 2p; free a; B reuses (freed while A was alone); A reuses;"
       "c = C; free c; B reuses (and since it is not)"},
      // --- The second stream ---
      // Each free noted no frontier then: what A has captured by now is no less.
      {"WhatTheFirstStreamFreedIsBehindWhatItHadWhenTheSecondCame",
       "capture A B; a = A; A launches; then marks A; free a; A launches; second marks A; B grows;"
       "A launches; B waits then; B grows; B waits second; B reuses"},
      {"ARecordedUseIsASecondStreamToo",
       "capture A B; freed used = A; A launches; free freed; use marks A; B uses used; A launches;"
       "B waits use; B reuses (B stands behind all that A had then)"},
      {"AUseByTheOwnStreamIsNoSecondStream",
       "capture A; a = A; A uses a; A launches; free a; A reuses"},
      {"BlocksThatLiveWhenTheSecondStreamComesAreFreedBehindTheirFrontiers",
       "capture A B; small = A 1g; a = A; A launches; b = B; before marks A; A launches; free a "
       "small;"
       "B waits before; B grows; B waits A; B reuses"},
      // Frees of streams that have never allocated in the scope.
      {"AStreamThatOnlyFreesNeedsNoView",
       "capture A B; b = B; a = A; end;"
       "capture A B; B launches; free b; A grows; A waits B; A reuses"},
      // --- What several streams have worked on ---
      {"ABlockThatAnotherStreamUsedIsNotItsOwnStreamsAtOnce",
       "capture A B; a = A; B uses a; A launches; B launches; free a; A grows; A waits B; A "
       "reuses"},
      {"NorIsItTheUsers",
       "capture A B; a = A; B uses a; A launches; B launches; free a; B grows; B waits A; B "
       "reuses"},
      {"ABlockThatTwoOthersUsedIsBehindAllThree",
       "capture A B C D; a = A; B uses a; C uses a; B uses a; A launches; B launches; C launches;"
       "free a; D grows; D waits C; D grows; D waits A; D grows; D waits B; D reuses"},
      // What a stream does between the use that was recorded and the free may be that use.
      {"AUseIsBehindWhatItsStreamHasAtTheFree",
       "capture A B C; a = A; B launches; B uses a; use marks B; B launches; then marks B; free a;"
       "B launches; C waits use; C grows; C waits then; C reuses (and A has captured nothing)"},
      // --- Streams that come late ---
      {"AStreamThatJoinsLateTakesWhatItStandsBehind",
       "capture A B; a = A; b = B; later = A; A launches; B launches; free a b; before marks A;"
       "A launches; free later; C waits before; C reuses; C grows (neither b nor later);"
       "C waits B; C reuses; C grows; C waits A; C reuses"},
      // The graph proves nothing to it any more, and its own order only what it has had since:
      // before, it may have given itself what it had by a proof.
      {"AStreamBehindAProgrammaticLaunchTakesOnlyWhatItHasHadSince",
       "capture A B; a1 = A; b1 = B; a2 = A; b2 = B; a3 = A; b3 = B; A launches; B launches;"
       "free b1 b2; A waits B; A reuses (the first of B's); free a3; A launches early;"
       "A grows (neither the second nor its own); free b3 a1; A launches;"
       "A grows (of before, though freed behind it); own = A; free own; A reuses; B reuses"},
      {"ItsOwnBytesAStreamTakesWhateverItLaunches",
       "capture A B; a = A; b = B; A launches; B launches; free b; B launches early; B reuses"},
      {"WhatTheFirstStreamFreedBeforeAnythingWasCapturedIsAlsoTheirsWhoRested",
       "capture A B; x = A 1g; y = B 1g; free x y; end; capture A B; end; capture A B; z = A 15g;"
       "free z; w = B 2g; w shares z; pages 1; end"},
      // --- Which bytes ---
      {"NeighboursBehindDifferentFencesAreOneToWhomMayTakeBoth",
       "capture A B C; low = A 8g; high = B 8g; A launches; B launches; free low high; C waits A;"
       "C grows 9g; C waits B; C reuses"},
      {"ALargeBlockLiesOverPagesBehindSeveralFences",
       "capture A B C D; a = A; b = B; c = C; A launches; B launches; C launches; free a b c;"
       "D waits A; D waits C; two = D 2p; pages 3; free two; D waits B; D reuses 3p"},
      {"WhatIsLeftOfFreedBytesStaysBehindTheirFence",
       "capture A B; b = B 1g; rest = A 15g; a = A; A launches; free a;"
       "A reuses 4g (the 12 behind it are an extent of their own now);"
       "B grows 12g; B waits A; B reuses 12g"},
      {"BytesTakenAndFreedAgainAreBehindTheLaterFreeOnly",
       "capture A B; b = B; a = A; A launches; early marks A; free a; again = A; A launches; free "
       "again;"
       "B waits early; B grows; B waits A; B reuses"},
      // Of page 0, which both streams may take, and page 1, which only A may.
      {"ASmallBlockBreaksTheWholePageThatTheOthersDoNotWant",
       "capture A B; anyones own = A; b = B; free anyones; A launches; free own; A reuses 1g;"
       "B reuses"},
  };
}

INSTANTIATE_TEST_SUITE_P(OneCapture, PoolScripts, ::testing::ValuesIn(Scripts()),
                         PoolScripts::NameOf);

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

// Of equal places the one that the fewest streams may take: the others are left with more.
TEST_F(PoolProofsTest, ALargeBlockTakesTheLeastWantedOfEqualPlaces) {
  for (const std::size_t mine : {0U, 1U}) {
    const CaptureId capture = Begin({kA, kB});
    Launch(kA);
    Launch(kB);
    Join(kA, kB);
    std::vector<Block> pages;
    for (std::size_t i = 0; i < 2; ++i) pages.push_back(Allocate(kPage, i == mine ? kA : kB));
    Free(pages[mine]);
    Free(pages[1 - mine]);
    EXPECT_EQ(Allocate(kPage, kA).address, pages[mine].address);
    EXPECT_EQ(Allocate(kPage, kA).address, pages[1 - mine].address);
    End(capture);
  }
}

// B waits for A from time to time, and A never for B; both allocate and free at random.
class PoolOneWayTest : public PoolProofsTest {
 protected:
  void AllocateAndFree(int steps, std::mt19937& random) {
    for (int i = 0; i < steps; ++i) {
      const StreamId stream = random() % 2 == 0 ? kA : kB;
      std::vector<Block>& blocks = live_[stream];
      blocks.push_back(Allocate((1 + random() % 16) * kPage / 16, stream));
      Launch(stream);
      std::swap(blocks[random() % blocks.size()], blocks.back());
      if (blocks.size() > 20) {
        Free(blocks.back());
        blocks.pop_back();
      }
      if (i % 3 == 0) Join(kB, kA);
    }
  }
  void FreeAll() {
    for (const auto& [stream, blocks] : std::exchange(live_, {})) {
      for (const Block& block : blocks) Free(block);
    }
  }

 private:
  std::map<StreamId, std::vector<Block>> live_;
};

// A's memory is proven to B, but never B's to A. So what B took of A's would be A's no more, and the
// pool would grow as long as the capture lasts.
TEST_F(PoolOneWayTest, APoolDoesNotGrowWithACapture) {
  std::mt19937 random(1);
  Begin({kA, kB});
  AllocateAndFree(500, random);
  const uint64_t pages = pool_.Stats().pages;
  AllocateAndFree(4000, random);
  EXPECT_LE(pool_.Stats().pages, pages + pages / 4);
}

// A later one begins with pages that are all free. What it takes of them counts as growth, or it
// would lend without end.
TEST_F(PoolOneWayTest, NorWithTheNumberOfCaptures) {
  const auto capture = [&] {
    std::mt19937 random(1);
    const CaptureId id = Begin({kA, kB});
    AllocateAndFree(500, random);
    FreeAll();
    End(id);
  };
  capture();
  const uint64_t pages = pool_.Stats().pages;
  for (int again = 0; again < 4; ++again) capture();
  EXPECT_LE(pool_.Stats().pages, pages + pages / 8);
}

// Of what fits, what the fewest streams may take: B might need what is open to all.
TEST_F(PoolProofsTest, ASmallBlockTakesTheLeastWantedOfTheBestFits) {
  Begin({kA, kB});
  Allocate(kPage, kB);
  const Block open = Allocate(2 * kGranule, kA);
  Allocate(kGranule, kA);
  const Block own = Allocate(3 * kGranule, kA);
  Allocate(kGranule, kA);
  Free(open);  // the capture has nothing yet that could use it
  Launch(kA);
  Free(own);
  EXPECT_EQ(Allocate(2 * kGranule, kA).address, own.address);
  EXPECT_EQ(Allocate(2 * kGranule, kB).address, open.address);
}

// What one stream allocates goes where its like lay, though newer ranges have room.
TEST_F(PoolProofsTest, WhatComesAgainLiesWhereItLayOnSeveralStreamsToo) {
  const CaptureId before = Begin({kA});
  std::vector<Block> halves;
  for (int i = 0; i < 4; ++i) halves.push_back(Allocate(kPage / 2, kA));
  Free(halves[1]);
  Free(halves[2]);
  End(before);
  const auto places = [&](std::initializer_list<StreamId> streams) {
    const CaptureId capture = Begin(streams);
    Free(Allocate(kGranule, streams.size() > 1 ? kB : kA));
    const Block first = Allocate(4 * kPage, kA);
    const Block second = Allocate(5 * kPage + kPage * 3 / 4, kA);  // between the halves, in a range
    Free(first);
    Free(second);
    End(capture);
    return std::pair(first.address, second.address);
  };
  const auto profile = places({kA});
  EXPECT_EQ(places({kA}), profile);
  EXPECT_EQ(places({kA, kB}), profile);
}

// Streams hold free pages back from each other: where the pool is small, one at a time.
TEST_F(PoolProofsTest, ASmallPoolOfSeveralStreamsGrowsPageByPage) {
  Begin({kA, kB});
  Allocate(kGranule, kA);
  Allocate(40 * kPage, kB);
  Allocate(40 * kPage, kA);
  EXPECT_EQ(pool_.handles(), pool_.Stats().pages);
}

TEST_F(PoolProofsTest, EachNodeIsAskedAfterOnceAndForEachStreamOnlyItsFrontier) {
  constexpr uint64_t kRounds = 200;
  Begin({kA, kB});
  Launch(kB);
  Launch(kA);
  Allocate(kGranule, kA);
  Allocate(kGranule, kB);
  const CallCounts before = host_.calls();
  for (uint64_t i = 0; i < kRounds; ++i) {
    const StreamId stream = i % 2 == 0 ? kA : kB;
    const StreamId other = i % 2 == 0 ? kB : kA;
    const Block block = Allocate(kPage, stream);
    Launch(stream);
    Join(other, stream);
    Use(block, other);
    Launch(other);
    Free(block);
    Join(stream, other);
  }
  // 2 nodes a round, and 2 before the first.
  EXPECT_LE(host_.calls()[DriverCall::kDependencies], 2 * kRounds + 2);
  // An allocation asks for one frontier, a free for two.
  EXPECT_LE(host_.calls()[DriverCall::kCapture] - before[DriverCall::kCapture], 3 * kRounds + 2);
  EXPECT_EQ(pool_.Stats().pages, 2U);
}

}  // namespace
}  // namespace cgp
