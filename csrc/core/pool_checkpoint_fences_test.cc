// Who may take what a restore lets go of, and what it brings back over bytes that a stream is still
// at work on.
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "core/checkpoint_test_set.h"

namespace cgp {
namespace {

class PoolCheckpointFencesTest : public CheckpointTest {
 protected:
  PoolCheckpoint EmptyCheckpoint() {
    set_.Retain(kId);
    return set_.Checkpoint(kId);
  }

  // Eager work on a block of this size, freed while it goes on. Returns its pieces.
  std::vector<PhysicalPiece> WorkOn(uint64_t bytes, StreamId stream) {
    set_.BeginScope(kId, ScopeKind::kEager);
    const Block other = Allocate(bytes, stream);
    std::vector<PhysicalPiece> pieces = set_.Pieces(other.address);
    watch_.Submit(stream);
    set_.Free(other.address);
    set_.EndScope(kId);
    return pieces;
  }

  // That stream C gets no bytes of `pieces` before all work is done, and does then. pre: no block
  // lives.
  void ExpectHeldUntilWorkIsDone(const std::vector<PhysicalPiece>& pieces) {
    for (const ScopeKind kind : {ScopeKind::kCapture, ScopeKind::kEager}) {
      EXPECT_FALSE(GetsBytesOf(pieces, kPage, kC, kind));
      EXPECT_FALSE(GetsBytesOf(pieces, kGranule, kC, kind));
    }
    watch_.FinishAll();
    const uint64_t pages = set_.Stats(kId).pages;
    EXPECT_TRUE(GetsBytesOf(pieces, pages * kPage, kC, ScopeKind::kCapture));
    EXPECT_EQ(set_.Stats(kId).pages, pages) << "all is free by now";
  }
};

// --- What is dropped ---

TEST_F(PoolCheckpointFencesTest, ADroppedEagerBlockWaitsForItsStream) {
  for (const uint64_t bytes : {2 * kGranule, kPage, 3 * kPage + 5 * kGranule}) {
    SCOPED_TRACE(bytes);
    const PoolCheckpoint nothing = EmptyCheckpoint();
    const Block block = AllocateIn(ScopeKind::kEager, bytes, kA);
    const auto pieces = set_.Pieces(block.address);
    watch_.Submit(kA);
    set_.Restore(kId, nothing);
    ExpectHeldUntilWorkIsDone(pieces);
  }
}

// The graph that a capture makes may be replayed on any stream, so its own stream waits too.
TEST_F(PoolCheckpointFencesTest, ACaptureOnItsStreamWaitsForADroppedEagerBlock) {
  const PoolCheckpoint nothing = EmptyCheckpoint();
  const Block block = AllocateIn(ScopeKind::kEager, 2 * kPage, kA);
  const auto pieces = set_.Pieces(block.address);
  watch_.Submit(kA);
  set_.Restore(kId, nothing);
  EXPECT_FALSE(GetsBytesOf(pieces, 2 * kPage, kA, ScopeKind::kCapture));
}

TEST_F(PoolCheckpointFencesTest, ADroppedBlockWaitsForAForeignUse) {
  const PoolCheckpoint nothing = EmptyCheckpoint();
  const Block block = AllocateIn(ScopeKind::kCapture, 2 * kPage, kA);
  const auto pieces = set_.Pieces(block.address);
  set_.RecordUse(block.address, kB);
  watch_.Submit(kB);
  set_.Restore(kId, nothing);
  ExpectHeldUntilWorkIsDone(pieces);
}

TEST_F(PoolCheckpointFencesTest, ADroppedBlockOfACaptureIsFreeToAll) {
  const PoolCheckpoint nothing = EmptyCheckpoint();
  const Block block = AllocateIn(ScopeKind::kCapture, 2 * kPage, kA);
  const auto pieces = set_.Pieces(block.address);
  watch_.Submit(kA);
  set_.Restore(kId, nothing);
  EXPECT_EQ(watch_.events(), 0U);
  EXPECT_TRUE(GetsBytesOf(pieces, 2 * kPage, kB, ScopeKind::kCapture));
}

// --- What is brought back ---

// The block at a checkpoint, freed, and bytes of it in the hands of a stream since.
struct Case {
  std::string name;
  uint64_t bytes = 0;    // of the block
  uint64_t worked = 0;   // of the block that the stream is at work on
  StreamId worker{};     // that stream; the block's own is stream 1
  bool lives = false;    // that block lives when the checkpoint is restored
  ScopeKind freed_in{};  // the scope within which the block that was brought back is freed
  bool between = false;  // or it is freed between scopes

  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
};

class RevivedBytesTest : public PoolCheckpointFencesTest,
                         public ::testing::WithParamInterface<Case> {};

TEST_P(RevivedBytesTest, StayProtectedFromTheWorkThatWasUnderWay) {
  const Case& c = GetParam();
  const Block block = AllocateIn(ScopeKind::kCapture, c.bytes, kA);
  const auto pieces = set_.Pieces(block.address);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  set_.Free(block.address);
  set_.BeginScope(kId, ScopeKind::kEager);
  const Block other = Allocate(c.worked, c.worker);
  const auto worked = set_.Pieces(other.address);
  ASSERT_TRUE(Overlap(worked, pieces));
  watch_.Submit(c.worker);
  if (!c.lives) set_.Free(other.address);
  set_.EndScope(kId);

  set_.Restore(kId, checkpoint);
  EXPECT_EQ(set_.At(block.address), block);
  if (c.between) {
    set_.Free(block.address);
  } else {
    set_.BeginScope(kId, c.freed_in);
    set_.Free(block.address);
    if (c.freed_in == ScopeKind::kCapture) {
      const Block next = Allocate(kGranule, kA);
      EXPECT_FALSE(Overlap(set_.Pieces(next.address), worked));
      set_.Free(next.address);
    }
    set_.EndScope(kId);
  }
  ExpectHeldUntilWorkIsDone(worked);
}

std::vector<Case> Cases() {
  constexpr uint64_t kPage = 8192;
  std::vector<Case> cases;
  const auto add = [&](const std::string& name, uint64_t bytes, uint64_t worked) {
    for (const bool own : {false, true}) {
      for (const bool lives : {false, true}) {
        for (const int freed : {0, 1, 2}) {
          Case c{.name = name, .bytes = bytes, .worked = worked};
          c.worker = StreamId{own ? 1U : 2U};
          c.lives = lives;
          c.between = freed == 0;
          c.freed_in = freed == 1 ? ScopeKind::kCapture : ScopeKind::kEager;
          c.name += own ? "Own" : "Foreign";
          c.name += lives ? "Living" : "Freed";
          c.name += freed == 0 ? "Between" : freed == 1 ? "InCapture" : "InEagerScope";
          cases.push_back(c);
        }
      }
    }
  };
  add("Small", kPage / 4, kPage / 4 - kGranuleBytes);
  add("Whole", 2 * kPage, 2 * kPage - kGranuleBytes);
  add("Stitched", 3 * kPage + kPage / 4, 3 * kPage);
  add("PartOf", 5 * kPage, kPage);
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, RevivedBytesTest, ::testing::ValuesIn(Cases()),
                         [](const auto& one) { return one.param.name; });

// What was done with long ago is no reason to wait.
TEST_F(PoolCheckpointFencesTest, ABlockOverBytesThatNobodyIsAtWorkOnIsAsItWas) {
  const Block block = AllocateIn(ScopeKind::kCapture, 2 * kPage, kA);
  const auto pieces = set_.Pieces(block.address);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  set_.Free(block.address);
  WorkOn(kPage, kB);
  watch_.FinishAll();
  set_.Restore(kId, checkpoint);
  EXPECT_EQ(watch_.events(), 0U) << "the restore has found out that B is done";
  watch_.Submit(kA);
  watch_.Submit(kB);
  set_.Free(block.address);
  EXPECT_EQ(watch_.events(), 0U);
  EXPECT_TRUE(GetsBytesOf(pieces, 2 * kPage, kC, ScopeKind::kCapture));
}

// Of a block's bytes in one page, those in the middle.
TEST_F(PoolCheckpointFencesTest, WorkBetweenBytesThatNobodyIsAtWorkOnIsSeen) {
  const Block block = AllocateIn(ScopeKind::kCapture, 12 * kGranule, kA);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  set_.Free(block.address);
  const Block first = AllocateIn(ScopeKind::kCapture, 4 * kGranule, kA);
  ASSERT_EQ(first.address, block.address);
  const auto worked = WorkOn(4 * kGranule, kB);
  set_.Free(first.address);
  set_.Restore(kId, checkpoint);
  ASSERT_TRUE(Overlap(set_.Pieces(block.address), worked));
  set_.Free(block.address);
  ExpectHeldUntilWorkIsDone(worked);
}

// Once the work is over the block is like any other of a capture: what a capture frees of it is its
// stream's again at once, although other work goes on.
TEST_F(PoolCheckpointFencesTest, ProtectionEndsWithTheWork) {
  const Block block = AllocateIn(ScopeKind::kCapture, 2 * kPage, kA);
  const auto pieces = set_.Pieces(block.address);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  set_.Free(block.address);
  WorkOn(kPage, kB);
  set_.Restore(kId, checkpoint);
  watch_.FinishAll();
  const PoolCheckpoint later = set_.Checkpoint(kId);
  WorkOn(3 * kPage, kC);
  set_.Restore(kId, later);
  set_.BeginScope(kId, ScopeKind::kCapture);
  set_.Free(block.address);
  EXPECT_TRUE(Overlap(set_.Pieces(Allocate(2 * kPage, kA).address), pieces));
  set_.EndScope(kId);
}

// What the restore protects is in the checkpoints that follow, too.
TEST_F(PoolCheckpointFencesTest, ProtectionGoesOnThroughFurtherCheckpoints) {
  const Block block = AllocateIn(ScopeKind::kCapture, 2 * kPage, kA);
  const PoolCheckpoint first = set_.Checkpoint(kId);
  set_.Free(block.address);
  const auto worked = WorkOn(kPage, kB);
  const PoolCheckpoint nothing = set_.Checkpoint(kId);
  set_.Restore(kId, first);
  const PoolCheckpoint second = set_.Checkpoint(kId);
  set_.Restore(kId, nothing);
  set_.Restore(kId, second);
  set_.Restore(kId, first);
  set_.Free(block.address);
  ExpectHeldUntilWorkIsDone(worked);
}

// A capture of several streams had fenced what the checkpoint brings back.
TEST_F(PoolCheckpointFencesTest, ARestoreForgetsWhatACaptureFenced) {
  HostGraphs& graphs = host_.graphs();
  const auto begin = [&] {
    set_.BeginScope(kId, ScopeKind::kCapture);
    const CaptureId capture = graphs.Begin(kA);
    graphs.Wait(kB, graphs.Record(kA));
    for (const StreamId stream : {kA, kB}) graphs.Launch(stream);
    return capture;
  };
  const auto end = [&](CaptureId capture) {
    graphs.End(capture);
    set_.EndScope(kId);
  };
  CaptureId capture = begin();
  const Block kept = Allocate(kPage, kA);
  Allocate(kPage, kB);
  end(capture);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  capture = begin();
  set_.RecordUse(kept.address, kB);
  set_.Free(kept.address);
  set_.Free(Allocate(2 * kPage, kA).address);
  Allocate(kPage, kB);
  end(capture);
  set_.Restore(kId, checkpoint);
  EXPECT_TRUE(set_.At(kept.address));

  const uint64_t pages = set_.Stats(kId).pages;
  capture = begin();
  graphs.Launch(kB);
  Allocate((pages - 2) * kPage, kB);
  EXPECT_EQ(set_.Stats(kId).pages, pages) << "all that does not live is free";
  set_.Free(kept.address);
  Allocate(kPage, kB);
  EXPECT_EQ(set_.Stats(kId).pages, pages + 1);
  graphs.Wait(kB, graphs.Record(kA));
  Allocate(kPage, kB);
  EXPECT_EQ(set_.Stats(kId).pages, pages + 1);
  end(capture);
}

// --- What lives on, and what was recorded ---

TEST_F(PoolCheckpointFencesTest, ABlockThatLivesOnKeepsItsLaterUses) {
  const Block block = AllocateIn(ScopeKind::kCapture, 2 * kPage, kA);
  const auto pieces = set_.Pieces(block.address);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  set_.RecordUse(block.address, kB);
  AllocateIn(ScopeKind::kCapture, kPage, kA);
  set_.Restore(kId, checkpoint);
  watch_.Submit(kB);
  set_.Free(block.address);
  ExpectHeldUntilWorkIsDone(pieces);
}

// Captured uses: one outside of captures makes the block an eager one as well.
TEST_F(PoolCheckpointFencesTest, ARevivedBlockHasTheUsesThatItHad) {
  set_.BeginScope(kId, ScopeKind::kCapture);
  const CaptureId capture = host_.graphs().Begin(kB);
  const Block block = Allocate(2 * kPage, kA);
  const auto pieces = set_.Pieces(block.address);
  set_.RecordUse(block.address, kB);
  host_.graphs().End(capture);
  set_.EndScope(kId);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  set_.Free(block.address);
  set_.BeginScope(kId, ScopeKind::kCapture);
  set_.EndScope(kId);
  set_.Restore(kId, checkpoint);  // over bytes that nobody works on
  watch_.Submit(kB);
  set_.Free(block.address);
  ExpectHeldUntilWorkIsDone(pieces);
}

TEST_F(PoolCheckpointFencesTest, ARevivedEagerBlockIsStillEager) {
  const Block block = AllocateIn(ScopeKind::kEager, 2 * kPage, kA);
  const auto pieces = set_.Pieces(block.address);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  set_.Free(block.address);
  set_.Restore(kId, checkpoint);
  watch_.Submit(kA);
  set_.Free(block.address);
  ExpectHeldUntilWorkIsDone(pieces);
}

// A use that the checkpoint does not know was of the life that has ended.
TEST_F(PoolCheckpointFencesTest, ARevivedBlockHasNoUsesOfAnotherLife) {
  const Block block = AllocateIn(ScopeKind::kCapture, 2 * kPage, kA);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  set_.RecordUse(block.address, kB);
  set_.Free(block.address);
  set_.Restore(kId, checkpoint);
  EXPECT_EQ(watch_.events(), 0U);
  watch_.Submit(kB);
  set_.Free(block.address);
  EXPECT_EQ(watch_.events(), 0U);
}

// By the time of the restore a capture has a block just like one that lived then: it passes for it,
// but what was eager work before will be so again.
TEST_F(PoolCheckpointFencesTest, ABlockThatPassesForAnEagerOneIsEager) {
  const Block eager = AllocateIn(ScopeKind::kEager, 2 * kPage, kA);
  const auto pieces = set_.Pieces(eager.address);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  set_.Free(eager.address);
  const Block captured = AllocateIn(ScopeKind::kCapture, 2 * kPage, kA);
  ASSERT_EQ(captured, eager);
  set_.Restore(kId, checkpoint);
  watch_.Submit(kA);
  set_.Free(eager.address);
  ExpectHeldUntilWorkIsDone(pieces);
}

TEST_F(PoolCheckpointFencesTest, ABlockThatPassesForOneWithUsesHasThem) {
  const Block used = AllocateIn(ScopeKind::kCapture, 2 * kPage, kA);
  const auto pieces = set_.Pieces(used.address);
  set_.RecordUse(used.address, kB);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  set_.Free(used.address);
  const Block later = AllocateIn(ScopeKind::kCapture, 2 * kPage, kA);
  ASSERT_EQ(later, used);
  set_.Restore(kId, checkpoint);
  watch_.Submit(kB);
  set_.Free(used.address);
  ExpectHeldUntilWorkIsDone(pieces);
}

// Another block that starts at the same address does not pass for it.
TEST_F(PoolCheckpointFencesTest, ABlockOfAnotherSizeOrStreamAtTheAddressIsDropped) {
  const Block block = AllocateIn(ScopeKind::kCapture, 2 * kPage, kA);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  for (const auto& [bytes, stream] :
       {std::pair{kPage, kA}, std::pair{2 * kPage - 1, kA}, std::pair{2 * kPage, kB}}) {
    set_.Free(block.address);
    const Block other = AllocateIn(ScopeKind::kEager, bytes, stream);
    ASSERT_EQ(other.address, block.address);
    const uint64_t frees = set_.Stats(kId).frees;
    set_.Restore(kId, checkpoint);
    EXPECT_EQ(set_.At(block.address), block);
    EXPECT_EQ(set_.Stats(kId).frees, frees + 1);
    set_.Check();
    watch_.FinishAll();
    set_.Restore(kId, PoolCheckpoint{.blocks = {}, .owner = checkpoint.owner});
    set_.Restore(kId, checkpoint);
  }
}

}  // namespace
}  // namespace cgp
