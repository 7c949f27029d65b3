// What captures of several streams may take of each other, of earlier ones and of what was not
// captured, and that a failing driver changes nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "core/pool.h"
#include "core/pool_proofs_test_pool.h"
#include "testing/faulty_driver.h"

namespace cgp {
namespace {

using ::testing::ElementsAre;

// --- Streams that are not capturing ---

TEST_F(PoolProofsTest, AUseOnAStreamThatIsNotCapturingLastsUntilItsEventAfterTheScope) {
  const CaptureId capture = Begin({kA, kB});
  const Block block = Allocate(kPage, kA);
  Use(block, kC);
  watch_.Submit(kC);
  Launch(kA);
  Free(block);
  Join(kB, kA);
  EXPECT_FALSE(Reuses(kPage, kA));
  EXPECT_FALSE(Reuses(kPage, kB));
  End(capture);
  const CaptureId second = Begin({kA, kB});
  EXPECT_FALSE(Reuses(kPage, kA)) << "C has not done its work";
  watch_.FinishAll();
  EXPECT_TRUE(Reuses(kPage, kA));
  End(second);
}

TEST_F(PoolProofsTest, AUseBeforeItsStreamJoinsLastsUntilItsEventAfterTheScope) {
  const CaptureId capture = Begin({kA});
  const Block block = Allocate(kPage, kA);
  Use(block, kB);
  watch_.Submit(kB);
  Join(kB, kA);
  Launch(kB);
  Free(block);
  Join(kA, kB);
  EXPECT_FALSE(Reuses(kPage, kA)) << "a replay does not wait for what B did before it joined";
  EXPECT_FALSE(Reuses(kPage, kB));
  End(capture);
  Begin({kA, kB});
  EXPECT_FALSE(Reuses(kPage, kA)) << "nor does the end of the capture";
  watch_.FinishAll();
  EXPECT_TRUE(Reuses(kPage, kA));
}

TEST_F(PoolProofsTest, SoDoesOneBetweenTwoCapturesOfItsStream) {
  pool_.BeginScope(ScopeKind::kCapture);
  const CaptureId own = BeginCapture({kB, kC});
  Allocate(kPage, kB);
  Allocate(kPage, kC);
  graphs_.End(own);
  const CaptureId capture = BeginCapture({kA});
  const Block block = Allocate(kPage, kA);
  Use(block, kB);
  watch_.Submit(kB);
  Join(kB, kA);
  Launch(kB);
  Free(block);
  End(capture);
  Begin({kA});
  EXPECT_FALSE(Reuses(kPage, kA)) << "B is still at work";
}

TEST_F(PoolProofsTest, AUseBeforeTheCaptureLastsUntilItsEventThoughItsStreamCapturesNow) {
  const CaptureId first = Begin({kA});
  const Block output = Allocate(kPage, kA);
  End(first);
  Use(output, kB);
  watch_.Submit(kB);
  const CaptureId second = Begin({kA, kB});
  Launch(kB);
  Free(output);
  Join(kA, kB);
  EXPECT_FALSE(Reuses(kPage, kA)) << "a replay does not wait for what B did before the capture";
  EXPECT_FALSE(Reuses(kPage, kB));
  End(second);
  const CaptureId third = Begin({kA, kB});
  EXPECT_FALSE(Reuses(kPage, kA)) << "nor does the end of the capture";
  EXPECT_FALSE(Reuses(kPage, kB));
  watch_.FinishAll();
  EXPECT_TRUE(Reuses(kPage, kA));
  End(third);
}

TEST_F(PoolProofsTest, AStreamThatIsNotCapturingIsProvenNothing) {
  const CaptureId capture = Begin({kA, kB});
  const Block block = Allocate(kPage, kA);
  Allocate(kPage, kB);
  Launch(kA);
  Free(block);
  EXPECT_FALSE(Reuses(kPage, kC));
  End(capture);
  Begin({kA, kB});
  EXPECT_TRUE(Reuses(kPage, kB));
}

TEST_F(PoolProofsTest, WhatAStreamFreesThatIsNotCapturingIsItsOwnAtOnce) {
  Begin({kA, kB});
  Allocate(kPage, kA);
  const Block block = Allocate(kPage, kC);
  Free(block);
  Launch(kA);
  Join(kB, kA);
  EXPECT_FALSE(Reuses(kPage, kB));
  EXPECT_TRUE(Reuses(kPage, kC));
}

TEST_F(PoolProofsTest, TheFirstStreamNeedNotBeCapturing) {
  const CaptureId capture = Begin({kA, kB});
  const Block block = Allocate(kPage, kC);
  Launch(kA);
  Free(block);
  EXPECT_FALSE(Reuses(kPage, kA));
  EXPECT_FALSE(Reuses(kPage, kB));
  EXPECT_TRUE(Reuses(kPage, kC));
  const Block other = Allocate(kPage, kC);
  Free(other);
  EXPECT_FALSE(Reuses(kPage, kA));
  EXPECT_TRUE(Reuses(kPage, kC));
  End(capture);
}

TEST_F(PoolProofsTest, AnEagerScopesBlockIsNotProvenByTheCaptureThatFreesIt) {
  pool_.BeginScope(ScopeKind::kEager);
  const Block block = Allocate(kPage, kA);
  watch_.Submit(kA);
  EndScope();
  const CaptureId capture = Begin({kA, kB});
  Allocate(kPage, kA);
  Allocate(kPage, kB);
  Launch(kA);
  Free(block);
  Join(kB, kA);
  EXPECT_FALSE(Reuses(kPage, kA));
  EXPECT_FALSE(Reuses(kPage, kB));
  End(capture);
  const CaptureId second = Begin({kA});
  EXPECT_FALSE(Reuses(kPage, kA));
  watch_.FinishAll();
  EXPECT_TRUE(Reuses(kPage, kA));
  End(second);
}

// --- Several captures in one scope: the bodies of conditional nodes are captures of their own ---

TEST_F(PoolProofsTest, NoCaptureTakesWhatAnotherOneFreedBeforeTheScopeEnds) {
  const CaptureId capture = Begin({kA, kB});
  const Block outer = Allocate(kPage, kA);
  Allocate(kPage, kB);
  Launch(kA);
  Free(outer);
  const CaptureId body = BeginCapture({kC});
  EXPECT_FALSE(Reuses(kPage, kC));
  Launch(kC);
  const Block inner = Allocate(kPage, kC);
  Free(inner);
  EXPECT_TRUE(Reuses(kPage, kC)) << "its own";
  const Block last = Allocate(kPage, kC);
  Free(last);
  graphs_.End(body);
  Launch(kA);
  Join(kB, kA);
  EXPECT_TRUE(Reuses(kPage, kB)) << "that of A";
  EXPECT_FALSE(Reuses(kPage, kB));
  const CaptureId second_body = BeginCapture({kC});
  EXPECT_FALSE(Reuses(kPage, kC)) << "the same stream, but another body";
  graphs_.End(second_body);
  End(capture);
  Begin({kB});
  EXPECT_TRUE(Reuses(kPage, kB));
}

TEST_F(PoolProofsTest, ABodyTakesWhatIsOpen) {
  const CaptureId first = Begin({kA});
  const Block block = Allocate(kPage, kA);
  Free(block);
  End(first);
  Begin({kA});
  Allocate(kGranule, kA);
  const CaptureId body = BeginCapture({kB});
  EXPECT_TRUE(Reuses(kGranule, kB)) << "beside that of A, which was open when the scope began";
  graphs_.End(body);
}

// Its blocks too are known to be of this capture, not of the body.
TEST_F(PoolProofsTest, ABodyDoesNotHoldWhatTheFirstStreamHadBeforeItCapturedAnything) {
  Begin({kA, kB});
  const Block block = Allocate(kPage, kA);
  Allocate(kPage, kB);
  const CaptureId body = BeginCapture({kC});
  Allocate(kPage, kC);
  graphs_.End(body);
  Launch(kA);
  Free(block);
  EXPECT_FALSE(Reuses(kPage, kB));
  Join(kB, kA);
  EXPECT_TRUE(Reuses(kPage, kB));
}

// An earlier block of a stream that captures nothing: which of them has worked on it nobody knows.
TEST_F(PoolProofsTest, WhereThereAreSeveralCapturesNoStreamsOrderIsTrusted) {
  const CaptureId first = Begin({kA});
  const Block block = Allocate(kPage, kD);
  End(first);
  Begin({kA, kB});
  Allocate(kPage, kA);
  Allocate(kPage, kB);
  const CaptureId body = BeginCapture({kC});
  Allocate(kPage, kC);
  Free(block);
  EXPECT_FALSE(Reuses(kPage, kD));
  graphs_.End(body);
}

// A's frontier in its new capture says nothing of what it did in the one before.
TEST_F(PoolProofsTest, AStreamThatHasGoneOnToAnotherCaptureProvesNothingOfTheOneBefore) {
  const CaptureId first = Begin({kA, kB});
  const Block block = Allocate(kPage, kA);
  const Block used = Allocate(kPage, kA);
  Use(used, kB);
  Launch(kA);
  graphs_.End(first);
  const CaptureId second = BeginCapture({kA, kB});
  Allocate(kPage, kA);
  Launch(kA);
  Free(block);
  Free(used);
  EXPECT_FALSE(Reuses(kPage, kA));
  Join(kB, kA);
  EXPECT_FALSE(Reuses(kPage, kB));
  const Block own = Allocate(kPage, kA);
  Launch(kA);
  Free(own);
  EXPECT_TRUE(Reuses(kPage, kA)) << "what it has worked on in this one alone";
  End(second);
}

TEST_F(PoolProofsTest, AUseInAnotherCaptureLastsUntilTheScopeEnds) {
  const CaptureId capture = Begin({kA, kB});
  const Block block = Allocate(kPage, kA);
  const CaptureId body = BeginCapture({kC});
  Use(block, kC);
  Launch(kA);
  Launch(kC);
  Free(block);
  Join(kB, kA);
  for (const StreamId stream : {kA, kB, kC}) EXPECT_FALSE(Reuses(kPage, stream));
  graphs_.End(body);
  End(capture);
  Begin({kA});
  EXPECT_TRUE(Reuses(kPage, kA));
}

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

// --- Captures that fail ---

TEST_F(PoolProofsTest, OfAnInvalidatedCaptureAllComesBackAfterItsEnd) {
  const CaptureId capture = Begin({kA, kB});
  const Block a = Allocate(kPage, kA);
  const Block b = Allocate(kPage, kB);
  const Block used = Allocate(kPage, kA);
  Use(used, kB);
  Launch(kA);
  Launch(kB);
  Free(a);
  graphs_.Invalidate(capture);
  EXPECT_FALSE(Reuses(kPage, kB));
  Free(b);
  Free(used);
  EXPECT_FALSE(Reuses(kPage, kA));
  EXPECT_FALSE(Reuses(kPage, kB));
  End(capture);
  watch_.FinishAll();
  const CaptureId second = Begin({kC});
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Reuses(kPage, kC));
  EXPECT_FALSE(Reuses(kPage, kC));
  End(second);
}

// As PyTorch does: the capture has ended when the scope does, and blocks die in between.
TEST_F(PoolProofsTest, WhatIsFreedBetweenTheEndsOfTheCaptureAndTheScopeIsFreeAfterwards) {
  const CaptureId capture = Begin({kA, kB});
  const Block a = Allocate(kPage, kA);
  const Block b = Allocate(kPage, kB);
  const Block used = Allocate(kPage, kA);
  Use(used, kB);
  Launch(kA);
  Launch(kB);
  graphs_.End(capture);
  for (const Block& block : {a, b, used}) Free(block);
  EndScope();
  Begin({kC});
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Reuses(kPage, kC));
}

// --- Captures after each other ---

TEST_F(PoolProofsTest, AfterTheScopeEverythingIsFreeToAll) {
  const CaptureId capture = Begin({kA, kB, kC});
  std::vector<Block> blocks;
  for (const StreamId stream : {kA, kB, kA}) blocks.push_back(Allocate(kPage, stream));
  Use(blocks[2], kC);
  for (const StreamId stream : {kA, kB, kC}) Launch(stream);
  for (const Block& block : blocks) Free(block);
  End(capture);
  Begin({kD});
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Reuses(kPage, kD));
}

// The pool expects of a capture what the last one was like: with several streams each free notes
// its frontier from the beginning, with one nothing is asked for.
TEST_F(PoolProofsTest, ThatACaptureHadSeveralStreamsIsRemembered) {
  const CaptureId first = Begin({kA, kB});
  for (const StreamId stream : {kA, kB}) Free(Allocate(kPage, stream));
  End(first);
  Begin({kA, kB});
  const Block block = Allocate(kPage, kA);
  Launch(kA);
  const Frontier at_free = Record(kA);
  Free(block);
  Launch(kA);
  Wait(kB, at_free);
  EXPECT_TRUE(Reuses(kPage, kB)) << "the frontier was noted before B came";
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

TEST_F(PoolProofsTest, AnEarlierCapturesBlockIsBehindTheFrontierOfTheStreamThatMadeIt) {
  const CaptureId first = Begin({kA, kB});
  const Block block = Allocate(kPage, kA);
  Free(Allocate(kPage, kB));
  End(first);
  Begin({kA, kB});
  Allocate(kPage, kB);
  Launch(kA);
  Free(block);
  EXPECT_FALSE(Reuses(kPage, kB));
  Join(kB, kA);
  EXPECT_TRUE(Reuses(kPage, kB));
}

TEST_F(PoolProofsTest, AnEarlierCapturesBlockOfAStreamThatDoesNotCaptureNowIsHeldToTheEnd) {
  const CaptureId first = Begin({kA, kB});
  const Block block = Allocate(kPage, kA);
  const Block used = Allocate(kPage, kA);
  Use(used, kB);
  Free(Allocate(kPage, kB));
  End(first);
  const CaptureId second = Begin({kB, kC});
  Allocate(kPage, kB);
  Free(block);
  Free(used);
  Launch(kB);
  Join(kC, kB);
  EXPECT_FALSE(Reuses(kPage, kB));
  EXPECT_FALSE(Reuses(kPage, kC));
  End(second);
  watch_.FinishAll();
  Begin({kB});
  EXPECT_TRUE(Reuses(2 * kPage, kB));
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
