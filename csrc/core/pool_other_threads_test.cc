// Blocks of a capture that other threads free or use than the one that began it. Another one still
// may be ending the capture, and the driver crashes when it is asked of it meanwhile.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "core/base/error.h"
#include "core/pool.h"
#include "core/pool_proofs_test_pool.h"

namespace cgp {
namespace {

class PoolOtherThreadsTest : public PoolProofsTest {
 protected:
  // Another thread makes the call, which asks the driver nothing.
  template <typename Call>
  void Elsewhere(const Call& call) {
    const auto before = host_.calls();
    std::thread(call).join();
    EXPECT_EQ(host_.calls(), before);
    pool_.Check();
  }
  void FreeElsewhere(const Block& block) {
    Elsewhere([&] { pool_.Free(block.address); });
  }
  void UseElsewhere(const Block& block, StreamId stream) {
    Elsewhere([&] { pool_.RecordUse(block.address, stream); });
  }
};

TEST_F(PoolOtherThreadsTest, TheNextAllocationAsksForWhatTheyFreed) {
  Begin({kA, kB});
  const Block block = Allocate(kPage, kA);
  Allocate(kPage, kB);
  Launch(kA);
  FreeElsewhere(block);
  EXPECT_EQ(pool_.Find(block.address), nullptr);
  EXPECT_EQ(pool_.Stats().allocated_bytes, kPage);
  EXPECT_FALSE(Reuses(kPage, kB));
  Join(kB, kA);
  EXPECT_TRUE(Reuses(kPage, kB));
}

TEST_F(PoolOtherThreadsTest, TheNextAllocationHearsOfTheUsesThatTheyRecorded) {
  Begin({kA, kB});
  UseElsewhere(Allocate(kPage, kA), kB);
  const Block block = Allocate(kPage, kA);
  Launch(kA);
  const Frontier at_free = Record(kA);
  Free(block);
  Launch(kA);
  Wait(kB, at_free);
  EXPECT_TRUE(Reuses(kPage, kB)) << "the frontier was noted before B came";
}

TEST_F(PoolOtherThreadsTest, SoDoBlocksOfSeveralStreamsThatAreKnownToCapture) {
  Begin({kA, kB});
  const Block block = Allocate(kPage, kA);
  Allocate(kPage, kB);
  UseElsewhere(block, kB);
  Launch(kB);
  FreeElsewhere(block);
  EXPECT_FALSE(Reuses(kPage, kA));
  Join(kA, kB);
  EXPECT_TRUE(Reuses(kPage, kA));
}

// It may have been at work on the block before it became part of the capture.
TEST_F(PoolOtherThreadsTest, NotThoseOfAStreamThatMayComeLater) {
  const CaptureId capture = Begin({kA});
  const Block block = Allocate(kPage, kA);
  UseElsewhere(block, kB);
  watch_.Submit(kB);
  FreeElsewhere(block);
  Join(kB, kA);
  Launch(kB);
  Join(kA, kB);
  EXPECT_FALSE(Reuses(kPage, kA));
  End(capture);
  Begin({kC});
  EXPECT_FALSE(Reuses(2 * kPage, kC)) << "B is still at work";
}

// What it did with a graph's output was in a body, behind which it is not.
TEST_F(PoolOtherThreadsTest, NorOfAStreamThatHasComeSince) {
  CaptureId capture = Begin({kA, kB});
  Allocate(kPage, kA);
  const Block block = Allocate(kPage, kB);
  End(capture);
  capture = Begin({kA});
  const CaptureId body = graphs_.Begin(kB);
  Launch(kB);
  FreeElsewhere(block);
  graphs_.End(body);
  Join(kB, kA);
  EXPECT_FALSE(Reuses(kPage, kA));
  End(capture);
}

// A scope may open before its streams capture, or without it.
TEST_F(PoolOtherThreadsTest, NorOfStreamsThatAreNotCapturing) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block block = Allocate(kPage, kA);
  Allocate(kPage, kB);
  UseElsewhere(block, kB);
  watch_.Submit(kB);
  FreeElsewhere(block);
  EndScope();
  Begin({kC});
  EXPECT_FALSE(Reuses(kPage, kC)) << "B is still at work";
}

TEST_F(PoolOtherThreadsTest, AStreamThatWorksOnAfterTheCaptureIsWaitedFor) {
  const CaptureId capture = Begin({kA, kB});
  const Block block = Allocate(kPage, kA);
  Allocate(kPage, kB);
  graphs_.End(capture);
  UseElsewhere(block, kB);
  watch_.Submit(kB);
  FreeElsewhere(block);
  EndScope();
  Begin({kC});
  EXPECT_FALSE(Reuses(kPage, kC)) << "B is still at work";
}

TEST_F(PoolOtherThreadsTest, TheEndOfTheCaptureStandsForTheNextAllocation) {
  const CaptureId capture = Begin({kA, kB});
  const Block alone = Allocate(kPage, kA);
  const Block used = Allocate(kPage, kA);
  Allocate(kPage, kB);
  Use(used, kB);
  for (const Block& block : {alone, used}) FreeElsewhere(block);
  End(capture);
  Begin({kC});
  EXPECT_TRUE(Reuses(2 * kPage, kC));
}

TEST_F(PoolOtherThreadsTest, ItSaysNothingOfEagerWork) {
  pool_.BeginScope(ScopeKind::kEager);
  const Block block = Allocate(kPage, kA);
  watch_.Submit(kA);
  EndScope();
  const CaptureId capture = Begin({kB});
  FreeElsewhere(block);
  End(capture);
  Begin({kB});
  EXPECT_FALSE(Reuses(kPage, kB)) << "A is still at work";
}

TEST_F(PoolOtherThreadsTest, AStreamThatHasLeftTheCaptureDoesNotTakeWhatWasFreedInIt) {
  const CaptureId capture = Begin({kA, kB});
  const Block block = Allocate(kPage, kA);
  const Block used = Allocate(kPage, kA);
  Launch(kA);
  FreeElsewhere(block);
  Use(used, kB);
  graphs_.End(capture);
  EXPECT_FALSE(Reuses(kPage, kA));
}

TEST_F(PoolOtherThreadsTest, InsideACaptureAndOutsideOneTheyAreNoDifferent) {
  const CaptureId capture = Begin({kA});
  const Block first = Allocate(kPage, kA);
  const Block second = Allocate(kPage, kA);
  FreeElsewhere(first);
  EXPECT_TRUE(Reuses(kPage, kA));
  End(capture);
  FreeElsewhere(second);
  EXPECT_EQ(pool_.Stats().frees, 2U);
  Begin({kA});
  EXPECT_TRUE(Reuses(kPage, kA));
}

TEST_F(PoolOtherThreadsTest, ABlockIsFreedOnce) {
  Begin({kA});
  const Block block = Allocate(kPage, kA);
  FreeElsewhere(block);
  EXPECT_THROW(pool_.Free(block.address), UsageError);
}

}  // namespace
}  // namespace cgp
