// What the graph under capture says of who may take freed bytes, step by step: scopes after each
// other, several captures at once, captures that fail, and what it all costs in driver calls.
// Whether what is given is right is for capture_session.h to say.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/pool_set.h"
#include "driver/host_driver.h"
#include "testing/driver_watch.h"

namespace cgp {
namespace {

using ::testing::IsEmpty;

constexpr PoolId kPool{0, 1};
constexpr PoolId kOtherPool{0, 2};
constexpr StreamId kA{1};
constexpr StreamId kB{2};
constexpr StreamId kC{3};
constexpr StreamId kD{4};
constexpr uint64_t kPage = 4096;
constexpr uint64_t kHalf = kPage / 2;

class PoolGraphsTest : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_NO_THROW(set_.Check());
    watch_.Quiesce();
    EXPECT_THAT(watch_.violations(), IsEmpty());
  }

  CaptureId Begin(PoolId id = kPool, StreamId origin = kA) {
    set_.BeginScope(id, ScopeKind::kCapture);
    return graphs_.Begin(origin);
  }
  void End(CaptureId capture, PoolId id = kPool) {
    graphs_.End(capture);
    set_.EndScope(id);
  }
  Address Allocate(uint64_t bytes, StreamId stream, PoolId id = kPool) {
    Frontier frontier;
    graphs_.Capture(stream, &frontier);
    const Address address = set_.Allocate(id, bytes, stream, frontier.capture).address;
    watch_.MarkUsed();
    return address;
  }
  void Join(StreamId stream, StreamId other) { graphs_.Wait(stream, graphs_.Record(other)); }
  // Both streams have captured something that is not behind the other.
  void Branch(StreamId stream, StreamId other) {
    Join(stream, other);
    graphs_.Launch(stream);
    graphs_.Launch(other);
  }
  uint64_t Pages(PoolId id = kPool) const { return set_.Stats(id).pages; }
  uint64_t Questions() const {
    return host_.calls()[DriverCall::kCapture] + host_.calls()[DriverCall::kDependencies];
  }
  // How many pages the pool grows by when the stream asks for one.
  uint64_t GrowthOnePageFor(StreamId stream) {
    const uint64_t before = Pages();
    const Address address = Allocate(kPage, stream);
    const uint64_t growth = Pages() - before;
    set_.Free(address);
    return growth;
  }

  HostDriver host_{{.granularity = kPage, .map_memory = false}};
  DriverWatch watch_{host_};
  PoolSet set_{watch_, {.page_bytes = kPage}};
  HostGraphs& graphs_ = host_.graphs();
};

TEST_F(PoolGraphsTest, NothingIsAskedOfTheGraphWhereOneStreamCaptures) {
  for (int graph = 0; graph < 3; ++graph) {
    const CaptureId capture = Begin();
    for (int i = 0; i < 20; ++i) {
      const Address address = Allocate(512 * (1 + static_cast<uint64_t>(i)), kA);
      graphs_.Launch(kA);
      set_.RecordUse(address, kA);
      set_.Free(address);
    }
    End(capture);
  }
  EXPECT_EQ(Questions(), 0U);
}

TEST_F(PoolGraphsTest, EachNodeIsAskedAfterOnceAndForEachStreamOnlyItsFrontier) {
  constexpr uint64_t kRounds = 200;
  const CaptureId capture = Begin();
  Branch(kB, kA);
  Allocate(512, kA);
  Allocate(512, kB);
  const CallCounts before = host_.calls();
  for (uint64_t i = 0; i < kRounds; ++i) {
    const StreamId stream = i % 2 == 0 ? kA : kB;
    const StreamId other = i % 2 == 0 ? kB : kA;
    const Address address = Allocate(kPage, stream);
    graphs_.Launch(stream);
    Join(other, stream);
    set_.RecordUse(address, other);
    graphs_.Launch(other);
    set_.Free(address);
    Join(stream, other);
  }
  // 2 nodes a round, and 2 before the first.
  EXPECT_LE(host_.calls()[DriverCall::kDependencies], 2 * kRounds + 2);
  // An allocation asks for one frontier, a free for two.
  EXPECT_LE(host_.calls()[DriverCall::kCapture] - before[DriverCall::kCapture], 3 * kRounds + 2);
  EXPECT_EQ(Pages(), 2U);
  End(capture);
}

TEST_F(PoolGraphsTest, ScopesOfOneAndOfManyStreamsFollowEachOther) {
  for (int round = 0; round < 6; ++round) {
    const CaptureId capture = Begin();
    if (round % 2 == 0) {
      const Address address = Allocate(4 * kPage, kA);
      graphs_.Launch(kA);
      set_.Free(address);
    } else {
      Branch(kB, kA);
      const Address a = Allocate(kPage, kA);
      const Address b = Allocate(kPage, kB);
      graphs_.Launch(kA);
      set_.Free(a);
      graphs_.Launch(kB);
      EXPECT_EQ(GrowthOnePageFor(kB), 0U);
      Join(kB, kA);
      const Address all = Allocate(3 * kPage, kB);
      set_.Free(all);
      set_.Free(b);
    }
    End(capture);
    EXPECT_EQ(Pages(), 4U) << round;
  }
}

// The same nodes again, by their numbers, and other edges between them.
TEST_F(PoolGraphsTest, ACaptureKnowsNothingOfTheOneBefore) {
  for (int round = 0; round < 4; ++round) {
    const CaptureId capture = Begin();
    Branch(kB, kA);
    Allocate(kHalf, kA);
    Allocate(kHalf, kB);
    const Address block = Allocate(kPage, kA);
    graphs_.Launch(kA);
    set_.Free(block);
    const bool joined = round % 2 == 0;
    if (joined) Join(kB, kA);
    graphs_.Launch(kB);
    EXPECT_EQ(GrowthOnePageFor(kB), joined || round > 1 ? 0U : 1U) << round;
    End(capture);
    for (const auto& live : set_.Snapshot(kPool).blocks) set_.Free(live.block.address);
  }
}

TEST_F(PoolGraphsTest, AFailedCaptureGivesEverythingBack) {
  for (int round = 0; round < 4; ++round) {
    const CaptureId capture = Begin();
    Branch(kB, kA);
    const Address a = Allocate(kPage, kA);
    const Address b = Allocate(kPage, kB);
    graphs_.Launch(kB);
    set_.RecordUse(a, kB);
    set_.Free(a);
    graphs_.Invalidate(capture);
    // Tensors go, and Python may even go on for a while.
    const Address late = Allocate(kPage, kB);
    set_.RecordUse(late, kA);
    set_.Free(late);
    set_.Free(b);
    End(capture);
    watch_.FinishAll();
    const CaptureId next = Begin();
    const uint64_t before = Pages();
    const Address all = Allocate(before * kPage, kC);
    EXPECT_EQ(Pages(), before) << round;
    set_.Free(all);
    End(next);
  }
}

// cudaStreamEndCapture() fails; what the streams captured is gone.
TEST_F(PoolGraphsTest, AStreamThatNeverJoinedHoldsNothing) {
  const CaptureId capture = Begin();
  Branch(kB, kA);
  Allocate(kHalf, kA);
  Allocate(kHalf, kB);
  set_.Free(Allocate(3 * kPage, kB));
  EXPECT_EQ(GrowthOnePageFor(kA), 1U);
  End(capture);
  const CaptureId next = Begin();
  EXPECT_EQ(GrowthOnePageFor(kC), 0U);
  Allocate(4 * kPage, kC);
  EXPECT_EQ(Pages(), 5U);
  End(next);
}

// torch ends the capture first, then the scope; tensors may go in between.
TEST_F(PoolGraphsTest, AFreeBetweenTheEndsOfCaptureAndScopeIsOneOfTheCapture) {
  const CaptureId capture = Begin();
  Branch(kB, kA);
  const Address a = Allocate(kPage, kA);
  const Address b = Allocate(kPage, kB);
  set_.RecordUse(b, kA);
  graphs_.Launch(kA);
  graphs_.Launch(kB);
  graphs_.End(capture);
  set_.Free(a);
  set_.Free(b);
  set_.EndScope(kPool);
  const CaptureId next = Begin();
  Allocate(2 * kPage, kC);
  EXPECT_EQ(Pages(), 2U);
  End(next);
}

// The second stream comes before the first has captured anything.
TEST_F(PoolGraphsTest, AStreamGetsItsOwnBytesBackThoughOtherCapturesAreUnderWay) {
  const CaptureId capture = Begin();
  const CaptureId other = graphs_.Begin(kB);
  const Address a = Allocate(kPage, kA);
  const Address b = Allocate(kPage, kB);
  graphs_.Launch(kA);
  graphs_.Launch(kB);
  set_.Free(a);
  set_.Free(b);
  EXPECT_EQ(GrowthOnePageFor(kA), 0U);
  EXPECT_EQ(GrowthOnePageFor(kB), 0U);
  graphs_.End(other);
  End(capture);
}

// What the stream did in the capture that it has left stands in another graph.
TEST_F(PoolGraphsTest, AStreamThatIsCapturedAnewDoesNotGetItsBytesBackInTheSameScope) {
  CaptureId capture = Begin();
  const Address old = Allocate(kPage, kA);
  End(capture);
  capture = Begin();
  const CaptureId other = graphs_.Begin(kB);
  graphs_.Launch(kA);
  graphs_.Launch(kB);
  Allocate(kHalf, kA);
  Allocate(kHalf, kB);
  const Address fresh = Allocate(kPage, kA);
  set_.Free(old);
  set_.Free(fresh);
  graphs_.End(capture);
  capture = graphs_.Begin(kA);
  graphs_.Launch(kA);
  EXPECT_EQ(GrowthOnePageFor(kA), 1U);
  graphs_.End(other);
  End(capture);
}

// Nobody allocates in the second scope; the third must not meet its fences.
TEST_F(PoolGraphsTest, AScopeThatOnlyFreesLeavesNothingBehind) {
  CaptureId capture = Begin();
  Branch(kB, kA);
  const Address a = Allocate(kPage, kA);
  const Address b = Allocate(kPage, kB);
  End(capture);
  capture = Begin();
  Branch(kB, kA);
  set_.RecordUse(b, kA);
  set_.Free(a);
  set_.Free(b);
  End(capture);
  set_.Check();
  capture = Begin();
  Branch(kB, kA);
  EXPECT_EQ(GrowthOnePageFor(kA), 0U);
  EXPECT_EQ(GrowthOnePageFor(kB), 0U);
  End(capture);
}

// A conditional body: another graph, whose place in the first one no edge of either tells.
TEST_F(PoolGraphsTest, CapturesInOneScopeProveNothingAboutEachOthersBlocks) {
  const CaptureId capture = Begin();
  graphs_.Launch(kA);
  const CaptureId body = graphs_.Begin(kB);
  graphs_.Launch(kB);
  Allocate(kHalf, kA);
  Allocate(kHalf, kB);
  const Address a = Allocate(kPage, kA);
  const Address b = Allocate(kPage, kB);
  set_.Free(a);
  EXPECT_EQ(GrowthOnePageFor(kB), 1U);
  set_.Free(b);
  EXPECT_EQ(GrowthOnePageFor(kA), 0U) << "its own";
  EXPECT_EQ(GrowthOnePageFor(kB), 0U) << "its own";
  Join(kC, kB);
  graphs_.Launch(kC);
  EXPECT_EQ(GrowthOnePageFor(kC), 0U) << "behind the body's free";
  Join(kD, kA);
  Allocate(kPage, kD);
  EXPECT_EQ(Pages(), 4U) << "behind the first one's free";
  graphs_.End(body);
  End(capture);
}

TEST_F(PoolGraphsTest, AUserInAnotherCaptureIsWaitedForWhenItCapturesNoMore) {
  const CaptureId capture = Begin();
  graphs_.Launch(kA);
  // Some other thread's.
  const CaptureId other = graphs_.Begin(kB);
  graphs_.Launch(kB);
  Allocate(kHalf, kA);
  Allocate(kHalf, kA);
  const Address a = Allocate(kPage, kA);
  set_.RecordUse(a, kB);
  set_.Free(a);
  EXPECT_EQ(GrowthOnePageFor(kA), 1U);
  End(capture);
  CaptureId next = Begin();
  Allocate(kPage, kA);
  EXPECT_EQ(GrowthOnePageFor(kA), 1U) << "B still captures: nobody can say what it will do";
  End(next);
  graphs_.End(other);
  watch_.Submit(kB);  // the graph, say
  next = Begin();
  Allocate(2 * kPage, kA);
  EXPECT_EQ(Pages(), 5U) << "B's work is not done";
  End(next);
  watch_.FinishAll();
  for (const auto& live : set_.Snapshot(kPool).blocks) set_.Free(live.block.address);
  next = Begin();
  Allocate(5 * kPage, kA);
  EXPECT_EQ(Pages(), 5U);
  End(next);
}

// The same where nothing is allocated, so that the pool learns of the captures from the free alone.
TEST_F(PoolGraphsTest, AUserInAnotherCaptureIsWaitedForThoughTheScopeOnlyFrees) {
  CaptureId capture = Begin();
  const Address a = Allocate(kPage, kA);
  End(capture);
  capture = Begin();
  const CaptureId other = graphs_.Begin(kB);
  graphs_.Launch(kA);
  graphs_.Launch(kB);
  set_.RecordUse(a, kB);
  set_.Free(a);
  End(capture);
  CaptureId next = Begin();
  EXPECT_EQ(GrowthOnePageFor(kA), 1U) << "B still captures";
  End(next);
  graphs_.End(other);
  next = Begin();
  Allocate(2 * kPage, kA);
  EXPECT_EQ(Pages(), 2U);
  End(next);
}

TEST_F(PoolGraphsTest, PoolsThatAreCapturedAtOnceHaveNothingInCommon) {
  const CaptureId one = Begin(kPool, kA);
  const CaptureId two = Begin(kOtherPool, kB);
  Branch(kC, kA);
  Branch(kD, kB);
  for (const StreamId stream : {kA, kC}) Allocate(kHalf, stream, kPool);
  for (const StreamId stream : {kB, kD}) Allocate(kHalf, stream, kOtherPool);
  const Address a = Allocate(kPage, kA, kPool);
  const Address b = Allocate(kPage, kB, kOtherPool);
  set_.Free(a);
  set_.Free(b);
  Join(kC, kA);
  EXPECT_EQ(GrowthOnePageFor(kC), 0U);
  Allocate(kPage, kD, kOtherPool);
  EXPECT_EQ(Pages(kOtherPool), 3U) << "D did not join";
  End(one, kPool);
  Join(kD, kB);
  EXPECT_EQ(Pages(kOtherPool), 3U);
  Allocate(kPage, kD, kOtherPool);
  EXPECT_EQ(Pages(kOtherPool), 3U) << "now it has";
  End(two, kOtherPool);
}

TEST_F(PoolGraphsTest, ARestoreBetweenCapturesForgetsWhatTheyFenced) {
  CaptureId capture = Begin();
  Branch(kB, kA);
  const Address kept = Allocate(kPage, kA);
  Allocate(kPage, kB);
  End(capture);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kPool);

  capture = Begin();
  Branch(kB, kA);
  set_.RecordUse(kept, kB);
  set_.Free(kept);
  set_.Free(Allocate(2 * kPage, kA));
  Allocate(kPage, kB);
  End(capture);
  set_.Restore(kPool, checkpoint);
  set_.Check();
  EXPECT_TRUE(set_.At(kept));

  const uint64_t pages = Pages();
  capture = Begin();
  Branch(kB, kA);
  graphs_.Launch(kB);
  Allocate((pages - 2) * kPage, kB);
  EXPECT_EQ(Pages(), pages) << "all that does not live is free";
  set_.Free(kept);
  EXPECT_EQ(GrowthOnePageFor(kB), 1U);
  Join(kB, kA);
  Allocate(kPage, kB);
  EXPECT_EQ(Pages(), pages + 1);
  End(capture);
}

TEST_F(PoolGraphsTest, EagerWorkBetweenCapturesIsWaitedFor) {
  CaptureId capture = Begin();
  Branch(kB, kA);
  Allocate(kHalf, kA);
  Allocate(kHalf, kB);
  set_.Free(Allocate(kPage, kA));
  End(capture);

  set_.BeginScope(kPool, ScopeKind::kEager);
  const Address eager = Allocate(kPage, kB);
  EXPECT_EQ(Pages(), 2U);
  watch_.Submit(kB);
  set_.Free(eager);
  set_.EndScope(kPool);

  capture = Begin();
  Branch(kB, kA);
  EXPECT_EQ(GrowthOnePageFor(kB), 1U) << "the graph may be replayed on any stream";
  Join(kA, kB);
  Allocate(kPage, kA);
  EXPECT_EQ(Pages(), 3U) << "behind B's free";
  watch_.FinishAll();
  Allocate(kPage, kA);
  EXPECT_EQ(Pages(), 3U) << "B has done its work";
  End(capture);
}

// What eager work has used, a capture frees: the graph says nothing of that work.
TEST_F(PoolGraphsTest, TheGraphDoesNotSpeakForEagerWork) {
  set_.BeginScope(kPool, ScopeKind::kEager);
  const Address eager = Allocate(kPage, kB);
  watch_.Submit(kB);
  set_.EndScope(kPool);
  const CaptureId capture = Begin();
  Branch(kB, kA);
  Allocate(kHalf, kA);
  Allocate(kHalf, kB);
  set_.Free(eager);
  graphs_.Launch(kB);
  Join(kA, kB);
  EXPECT_EQ(GrowthOnePageFor(kA), 1U);
  End(capture);
}

}  // namespace
}  // namespace cgp
