// What captures of several streams may take of each other, of earlier ones and of what was not
// captured, and that a failing driver changes nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/pool.h"
#include "core/pool_proofs_test_pool.h"
#include "driver/faulty_driver.h"

namespace cgp {
namespace {

using ::testing::ElementsAre;

std::vector<PoolScript> Scripts() {
  return {
      // --- Streams that are not capturing ---
      {"AUseOnAStreamThatIsNotCapturingLastsUntilItsEventAfterTheScope",
       "capture A B; a = A; C uses a; C works; A launches; free a; B waits A; A grows; B grows; "
       "end;"
       "capture A B; A grows (C has not done its work); done; A reuses; end"},
      {"AUseBeforeItsStreamJoinsLastsUntilItsEventAfterTheScope",
       "capture A; a = A; B uses a; B works; B waits A; B launches; free a; A waits B;"
       "A grows (a replay does not wait for what B did before it joined); B grows; end;"
       "capture A B; A grows (nor does the end of the capture); done; A reuses"},
      {"SoDoesOneBetweenTwoCapturesOfItsStream",
       "scope begins; body B C; b = B; c = C; body ends;"
       "body A; a = A; B uses a; B works; B waits A; B launches; free a; end;"
       "capture A; A grows (B is still at work)"},
      {"AUseBeforeTheCaptureLastsUntilItsEventThoughItsStreamCapturesNow",
       "capture A; output = A; end; B uses output; B works;"
       "capture A B; B launches; free output; A waits B;"
       "A grows (a replay does not wait for what B did before the capture); B grows; end;"
       "capture A B; A grows (nor does the end of the capture); B grows; done; A reuses; end"},
      {"AStreamThatIsNotCapturingIsProvenNothing",
       "capture A B; a = A; b = B; A launches; free a; C grows; end; capture A B; B reuses"},
      // What it does may be part of a body by the time that it allocates again.
      {"WhatAStreamFreesThatIsNotCapturingIsHeldWhileOthersAre",
       "capture A B; a = A; c = C; free c; A launches; B waits A; B grows; C grows"},
      {"TheFirstStreamNeedNotBeCapturing",
       "capture A B; c = C; A launches; free c; A grows; B grows; C reuses; d = C; free d; A grows;"
       "C grows; end"},
      {"AnEagerScopesBlockIsNotProvenByTheCaptureThatFreesIt",
       "eager; a = A; A works; scope ends;"
       "capture A B; x = A; y = B; A launches; free a; B waits A; A grows; B grows; end;"
       "capture A; A grows; done; A reuses; end"},
      {"EagerWorkBetweenCapturesIsWaitedFor",
       "capture A B; B launches; A launches; x = A 8g; y = B 8g; a = A; free a; end;"
       "eager; e = B; pages 2; B works; free e; scope ends;"
       "capture A B; B launches; A launches;"
       "b = B; pages 3 (the graph may be replayed on any stream); free b;"
       "A waits B; A reuses (behind B's free); done; A reuses (B has done its work); end"},
      {"WhatIsFreedWhileACaptureElsewhereUsesItIsNotOpenToAScopeWithinThat",
       "capture A; a = A; end; body A B; A launches; free a; scope begins; B grows; scope ends;"
       "body ends; capture B; B reuses; end"},
      // --- Several captures in one scope, as of a conditional node's bodies ---
      {"NoCaptureTakesWhatAnotherOneFreedBeforeTheScopeEnds",
       "capture A B; outer = A; b = B; A launches; free outer;"
       "body C; C grows; C launches; inner = C; free inner; C reuses (its own); last = C; free "
       "last;"
       "body ends; A launches; B waits A; B reuses (that of A); B grows;"
       "body C; C grows (the same stream, but another body); body ends; end; capture B; B reuses"},
      {"EachCaptureProvesWhatItFreed",
       "capture A; A launches; body B; B launches; x = A 8g; y = B 8g; a = A; b = B; free a; B "
       "grows;"
       "free b; C waits B; C launches; C reuses (behind the body's free);"
       "D waits A; D reuses (behind the first one's)"},
      {"AStreamGetsItsOwnBytesBackThoughOtherCapturesAreUnderWay",
       "capture A; body B; a = A; b = B; A launches; B launches; free a b; A reuses; B reuses"},
      {"ABodyTakesWhatIsOpen",
       "capture A; a = A; free a; end; capture A; x = A 1g;"
       "body B; B reuses 1g (beside that of A, which was open when the scope began)"},
      // Its blocks too are known to be of this capture, not of the body.
      {"ABodyDoesNotHoldWhatTheFirstStreamHadBeforeItCapturedAnything",
       "capture A B; a = A; b = B; body C; c = C; body ends; A launches; free a; B grows; B waits "
       "A;"
       "B reuses"},
      // An earlier block of a stream that captures nothing: which of them has worked on it nobody
      // knows.
      {"WhereThereAreSeveralCapturesNoStreamsOrderIsTrusted",
       "capture A; d = D; end; capture A B; a = A; b = B; body C; c = C; free d; D grows"},
      // A's frontier in its new capture says nothing of what it did in the one before.
      {"AStreamThatHasGoneOnToAnotherCaptureProvesNothingOfTheOneBefore",
       "capture A B; a used = A; B uses used; A launches; capture ends;"
       "body A B; x = A; A launches; free a used; A grows; B waits A; B grows;"
       "own = A; A launches; free own; A reuses (what it has worked on in this one alone); end"},
      {"NorOfABlockOfAnEarlierScope",
       "capture A; old = A; end;"
       "scope begins; body B; B launches; body A; A launches; x = A 8g; y = B 8g; fresh = A;"
       "free old fresh; body ends; body A; A launches; A grows; body ends; body ends; scope ends"},
      {"AUseInAnotherCaptureLastsUntilTheScopeEnds",
       "capture A B; a = A; body C; C uses a; A launches; C launches; free a; B waits A; A grows;"
       "B grows; C grows; body ends; end; capture A; A reuses"},
      // Its stream is part of the first one by the time of the free. Nothing is allocated in the body,
      // so that the pool learns of that from the use alone.
      {"AUseInABodyThatIsOverLastsUntilTheScopeEnds",
       "capture A B; a = A; body C; C uses a; C launches; body ends; A launches; C waits A; free a;"
       "A grows (nothing of A waits for the body); B waits A; B grows; end; capture A; A reuses"},
      // The pool is told nothing of the body: its stream uses what is its own, and allocates nothing.
      {"AStreamThatMayHaveBeenInABodyHasNoOrder",
       "capture A C; c = C; end; capture A B; a = A; b = B; A launches;"
       "body C; C launches; body ends; free c; C waits B; C grows (B has not waited for the body);"
       "end; done; capture A; A reuses"},
      // Nothing is allocated, so that the pool learns of the captures from the free alone.
      {"AUserInAnotherCaptureIsWaitedForThoughTheScopeOnlyFrees",
       "capture A; a = A; end;"
       "scope begins; body B; body A; A launches; B launches; B uses a; free a; end;"
       "capture A; A grows (B still captures); end; body ends; capture A; A reuses"},
      // --- Captures that fail ---
      {"OfAnInvalidatedCaptureAllComesBackAfterItsEnd",
       "capture A B; a = A; b = B; used = A; B uses used; A launches; B launches; free a; "
       "invalidate;"
       "B grows; free b used; A grows; B grows; end; done;"
       "capture C; C reuses; C reuses; C reuses; C grows; end"},
      // cudaStreamEndCapture() fails; what the streams captured is gone.
      {"AStreamThatNeverJoinedHoldsNothing",
       "capture A B; B launches; A launches; a = A 8g; b = B 8g; c = B 3p; free c; A grows; end;"
       "capture C; C reuses 3p; end"},
      // As PyTorch does: the capture has ended when the scope does, and blocks die in between.
      {"WhatIsFreedBetweenTheEndsOfTheCaptureAndTheScopeIsFreeAfterwards",
       "capture A B; a = A; b = B; used = A; B uses used; A launches; B launches; capture ends;"
       "free a b used; scope ends; capture C; C reuses; C reuses; C reuses"},
      // --- Captures after each other ---
      {"AfterTheScopeEverythingIsFreeToAll",
       "capture A B C; a = A; b = B; c = A; C uses c; A launches; B launches; C launches; free a b "
       "c;"
       "end; capture D; D reuses; D reuses; D reuses"},
      {"AScopeThatOnlyFreesLeavesNothingBehind",
       "capture A B; B launches; A launches; a = A; b = B; end;"
       "capture A B; B launches; A launches; A uses b; free a b; end;"
       "capture A B; B launches; A launches; A reuses; B reuses; end"},
      // The pool expects of a capture what the last one was like: with several streams each free
      // notes its frontier from the beginning, with one nothing is asked for.
      {"ThatACaptureHadSeveralStreamsIsRemembered",
       "capture A B; a = A; free a; b = B; free b; end;"
       "capture A B; a = A; A launches; then marks A; free a; A launches; B waits then;"
       "B reuses (the frontier was noted before B came)"},
      {"ScopesOfOneAndOfManyStreamsFollowEachOther",
       "capture A; a = A 4p; A launches; free a; end;"
       "capture A B; B launches; A launches; a = A; b = B; A launches; free a; B launches;"
       "c = B; free c; B waits A; all = B 3p; free all b; end; pages 4;"
       "capture A; a = A 4p; A launches; free a; end;"
       "capture A B; B launches; A launches; a = A; b = B; A launches; free a; B launches;"
       "c = B; free c; B waits A; all = B 3p; free all b; end; pages 4"},
      {"AnEarlierCapturesBlockIsBehindTheFrontierOfTheStreamThatMadeIt",
       "capture A B; a = A; b = B; free b; end;"
       "capture A B; b = B; A launches; free a; B grows; B waits A; B reuses"},
      {"AnEarlierCapturesBlockOfAStreamThatDoesNotCaptureNowIsHeldToTheEnd",
       "capture A B; a used = A; B uses used; b = B; free b; end;"
       "capture B C; b = B; free a used; B launches; C waits B; B grows; C grows; end; done;"
       "capture B; B reuses 2p"},
  };
}

INSTANTIATE_TEST_SUITE_P(Captures, PoolScripts, ::testing::ValuesIn(Scripts()),
                         PoolScripts::NameOf);

// The capture of another pool goes on when this scope ends: no event can be recorded in it.
TEST_F(PoolProofsTest, AUseInACaptureThatOutlastsTheScopeLastsUntilThatHasEnded) {
  const CaptureId capture = Begin({kA, kB});
  const Block block = Allocate(kPage, kA);
  const CaptureId other = BeginCapture({kC});
  Use(block, kC);
  Launch(kA);
  Free(block);
  End(capture);
  EXPECT_EQ(watch_.events(), 0U);
  const CaptureId second = Begin({kA, kB});
  EXPECT_FALSE(Reuses(kPage, kA));
  End(second);
  graphs_.End(other);
  watch_.Submit(kC);
  const CaptureId third = Begin({kA, kB});
  EXPECT_FALSE(Reuses(kPage, kA)) << "recorded now, behind what C has in flight";
  watch_.FinishAll();
  EXPECT_TRUE(Reuses(kPage, kA));
  End(third);
}

TEST(PoolProofsMemory, ThatACaptureHasOneStreamAgainIsFoundOut) {
  HostDriver host({.granularity = 4096, .map_memory = false});
  FaultyDriver driver(host);  // counts calls
  Pool pool(driver, {.page_bytes = kPage});
  std::vector<bool> asked;
  for (const bool several : {false, true, false, false}) {
    driver.Disarm();
    pool.BeginScope(ScopeKind::kCapture);
    const CaptureId capture = host.graphs().Begin(kA);
    host.graphs().Wait(kB, host.graphs().Record(kA));
    pool.Free(pool.Allocate(kPage, kA).address);
    if (several) pool.Free(pool.Allocate(kPage, kB).address);
    host.graphs().End(capture);
    pool.EndScope();
    asked.push_back(std::ranges::count(driver.calls(), DriverCall::kCapture) > 0);
  }
  EXPECT_THAT(asked, ElementsAre(false, true, true, false));
}

// --- The only stream of a scope, which leaves its capture ---

// What it does next that makes the pool look.
enum class Next : uint8_t { kAllocates, kIsJoinedByAnother, kRecordsAUse };

class OnlyStreamTest : public PoolProofsTest, public ::testing::WithParamInterface<Next> {};

TEST_P(OnlyStreamTest, LeavesItsBytesBehindWhereItsCaptureIsOver) {
  pool_.BeginScope(ScopeKind::kCapture);
  const CaptureId own = BeginCapture({kB});
  const Block kept = Allocate(kPage, kB);
  const Block late = Allocate(kPage, kB);
  Free(Allocate(kPage, kB));
  Launch(kB);
  graphs_.End(own);
  Free(late);
  const CaptureId capture = BeginCapture({kA});
  Join(kB, kA);
  if (GetParam() == Next::kIsJoinedByAnother) {
    EXPECT_FALSE(Reuses(kPage, kA));
  }
  if (GetParam() == Next::kRecordsAUse) Use(kept, kA);
  EXPECT_FALSE(Reuses(2 * kPage, kB)) << "the graph of its own capture still uses them";
  Free(kept);
  Launch(kB);
  EXPECT_FALSE(Reuses(kPage, kB));
  EXPECT_FALSE(Reuses(kPage, kA));
  const Block here = Allocate(kPage, kB);
  Free(here);
  EXPECT_TRUE(Reuses(kPage, kB)) << "what it leaves in the capture that it is in is its own";
  End(capture);
  const CaptureId next = Begin({kB});
  EXPECT_TRUE(Reuses(3 * kPage, kB));
  End(next);
}

INSTANTIATE_TEST_SUITE_P(, OnlyStreamTest,
                         ::testing::Values(Next::kAllocates, Next::kIsJoinedByAnother,
                                           Next::kRecordsAUse));

// Numbers of fences are used again from one scope to the next.
TEST_F(PoolProofsTest, ProofsOfOneCaptureSayNothingOfTheNext) {
  for (int i = 0; i < 4; ++i) {
    const CaptureId capture = Begin({kA, kB});
    std::vector<Block> blocks;
    for (int n = 0; n < 6; ++n) blocks.push_back(Allocate(kPage, n % 2 == 0 ? kA : kB));
    for (int n = 0; n < 6; ++n) {
      const StreamId stream = n % 2 == 0 ? kA : kB;
      Launch(stream);
      Free(blocks[static_cast<std::size_t>(n)]);
    }
    std::vector<Block> taken;
    for (int n = 0; n < 3; ++n) taken.push_back(Allocate(kPage, kA));
    EXPECT_EQ(pool_.Stats().pages, 6U) << "its own three";
    Join(kA, kB);
    for (int n = 0; n < 3; ++n) taken.push_back(Allocate(kPage, kA));
    EXPECT_EQ(pool_.Stats().pages, 6U) << "and B's, now that it stands behind them";
    for (const Block& block : taken) Free(block);
    End(capture);
  }
}

// --- A driver that fails ---

// A and B capture; A has four blocks, and works on.
struct ProofsWorld {
  ProofsWorld() {
    graphs.Wait(kB, graphs.Record(kA));
    pool.BeginScope(ScopeKind::kCapture);
    for (int i = 0; i < 4; ++i) blocks.push_back(pool.Allocate(kPage, kA));
    graphs.Launch(kA);
  }
  // Where the next blocks of both streams come to lie.
  std::vector<std::pair<PageId, uint64_t>> Probe() {
    if (!pool.in_scope()) pool.BeginScope(ScopeKind::kCapture);
    std::vector<std::pair<PageId, uint64_t>> places;
    for (const StreamId stream : {kB, kA, kB, kA, kB}) {
      for (const PhysicalPiece& piece : pool.Pieces(pool.Allocate(kPage, stream).address)) {
        places.emplace_back(piece.page, piece.offset_bytes);
      }
    }
    pool.Check();
    return places;
  }

  HostDriver host{{.granularity = 4096, .map_memory = false}};
  FaultyDriver driver{host};
  HostGraphs& graphs = host.graphs();
  const CaptureId capture = graphs.Begin(kA);
  Pool pool{driver, {.page_bytes = kPage}};
  std::vector<Block> blocks;
};

// Fails each call of `step`, one at a time: it throws with nothing changed, and does when it is
// tried again what it does without a failure.
template <typename Prepare, typename Step>
void FailEachCall(Prepare&& prepare, Step&& step, uint64_t least_calls) {
  ProofsWorld unharmed;
  prepare(unharmed);
  unharmed.driver.Disarm();
  step(unharmed);
  const uint64_t calls = unharmed.driver.call_count();
  EXPECT_GE(calls, least_calls);
  const auto expected = unharmed.Probe();
  for (uint64_t n = 1; n <= calls; ++n) {
    ProofsWorld world;
    prepare(world);
    const uint64_t pages = world.pool.Stats().pages;
    const uint64_t live_blocks = world.pool.Stats().live_blocks;
    world.driver.Arm({.call_number = n});
    EXPECT_THROW(step(world), DriverError) << "call " << n << " of " << calls;
    EXPECT_EQ(world.driver.failures(), 1U);
    world.driver.Disarm();
    world.pool.Check();
    EXPECT_EQ(world.pool.Stats().pages, pages);
    EXPECT_EQ(world.pool.Stats().live_blocks, live_blocks);
    step(world);
    world.pool.Check();
    EXPECT_EQ(world.Probe(), expected) << "call " << n << " of " << calls;
  }
}

void FreeTwo(ProofsWorld& world) {
  for (const int i : {0, 1}) world.pool.Free(world.blocks[static_cast<std::size_t>(i)].address);
}

TEST(PoolProofsFailures, TheAllocationOfASecondStream) {
  FailEachCall(
      FreeTwo, [](ProofsWorld& world) { world.pool.Allocate(kPage, kB); }, 3);
}

TEST(PoolProofsFailures, TheUseByASecondStream) {
  FailEachCall(
      FreeTwo, [](ProofsWorld& world) { world.pool.RecordUse(world.blocks[2].address, kB); }, 1);
}

TEST(PoolProofsFailures, AnAllocationThatFindsOutWhatIsProven) {
  FailEachCall(
      [](ProofsWorld& world) {
        world.pool.Allocate(kPage, kB);
        FreeTwo(world);
        world.graphs.Launch(kA);
        world.graphs.Wait(kB, world.graphs.Record(kA));
        for (int i = 0; i < 3; ++i) world.graphs.Launch(kB);
      },
      [](ProofsWorld& world) { world.pool.Allocate(kPage, kB); }, 5);
}

TEST(PoolProofsFailures, AnAllocationAfterAnotherThreadFreedBlocks) {
  FailEachCall(
      [](ProofsWorld& world) {
        world.pool.Allocate(kPage, kB);
        world.pool.RecordUse(world.blocks[0].address, kB);
        std::thread([&] { FreeTwo(world); }).join();
        world.graphs.Launch(kA);
        world.graphs.Wait(kB, world.graphs.Record(kA));
      },
      [](ProofsWorld& world) { world.pool.Allocate(kPage, kB); }, 5);
}

TEST(PoolProofsFailures, TheFreeOfABlockThatTwoStreamsUsed) {
  FailEachCall(
      [](ProofsWorld& world) {
        world.pool.RecordUse(world.blocks[2].address, kB);
        world.graphs.Launch(kB);
      },
      [](ProofsWorld& world) { world.pool.Free(world.blocks[2].address); }, 2);
}

TEST(PoolProofsFailures, AUseByAStreamThatIsNotCapturing) {
  FailEachCall([](ProofsWorld& world) { world.graphs.Launch(kA); },
               [](ProofsWorld& world) { world.pool.RecordUse(world.blocks[2].address, kC); }, 1);
}

}  // namespace
}  // namespace cgp
