// Who may take what a restore lets go of, and what it brings back over bytes that a stream is still
// at work on.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "core/checkpoint_test_set.h"
#include "core/pool_proofs_test_pool.h"

namespace cgp {
namespace {

std::vector<PoolScript> Scripts() {
  return {
      // --- What is dropped ---
      {"ADroppedEagerBlockWaitsForItsStream",
       "checkpoint none; eager; a = A 2g; scope ends; A works; restore none; held a"},
      {"ADroppedEagerPageWaitsForItsStream",
       "checkpoint none; eager; a = A; scope ends; A works; restore none; held a"},
      {"ADroppedLargeEagerBlockWaitsForItsStream",
       "checkpoint none; eager; a = A 53g; scope ends; A works; restore none; held a"},
      // The graph that a capture makes may be replayed on any stream, so its own stream waits too.
      {"ACaptureOnItsStreamWaitsForADroppedEagerBlock",
       "checkpoint none; eager; a = A 2p; scope ends; A works; restore none;"
       "scope begins; b = A 2p; b avoids a"},
      {"ADroppedBlockWaitsForAForeignUse",
       "checkpoint none; scope begins; a = A 2p; scope ends; B uses a; B works; restore none; held "
       "a"},
      {"ADroppedBlockOfACaptureIsFreeToAll",
       "checkpoint none; scope begins; a = A 2p; scope ends; A works; restore none; events 0;"
       "scope begins; b = B 2p; b shares a"},
      // --- What is brought back ---
      // What was done with long ago is no reason to wait.
      {"ABlockOverBytesThatNobodyIsAtWorkOnIsAsItWas",
       "scope begins; a = A 2p; scope ends; checkpoint c; free a;"
       "eager; w = B; B works; free w; scope ends; done;"
       "restore c; events 0 (the restore has found out that B is done); A works; B works; free a;"
       "events 0; scope begins; x = C 2p; x shares a"},
      // Of a block's bytes in one page, those in the middle.
      {"WorkBetweenBytesThatNobodyIsAtWorkOnIsSeen",
       "scope begins; a = A 12g; scope ends; checkpoint c; free a;"
       "scope begins; first = A 4g; scope ends; first shares a;"
       "eager; w = B 4g; B works; free w; scope ends; free first; restore c; a shares w; free a;"
       "held w"},
      // Once the work is over the block is like any other of a capture: what a capture frees of it
      // is its stream's again at once, although other work goes on.
      {"ProtectionEndsWithTheWork",
       "scope begins; a = A 2p; scope ends; checkpoint c; free a;"
       "eager; w = B; B works; free w; scope ends; restore c; done; checkpoint later;"
       "eager; w = C 3p; C works; free w; scope ends; restore later;"
       "scope begins; free a; x = A 2p; x shares a; scope ends"},
      // What the restore protects is in the checkpoints that follow, too.
      {"ProtectionGoesOnThroughFurtherCheckpoints",
       "scope begins; a = A 2p; scope ends; checkpoint c; free a;"
       "eager; w = B; B works; free w; scope ends; checkpoint none; restore c; checkpoint second;"
       "restore none; restore second; restore c; free a; held w"},
      // A capture of several streams had fenced what the checkpoint brings back.
      {"ARestoreForgetsWhatACaptureFenced",
       "capture A B; A launches; B launches; kept = A; b = B; end; checkpoint c;"
       "capture A B; A launches; B launches; B uses kept; free kept; x = A 2p; free x; y = B; end;"
       "restore c; pages 5;"
       "capture A B; A launches; B launches; B reuses 3p (all that does not live is free);"
       "free kept; B grows; B waits A; B reuses; end"},
      // --- What lives on, and what was recorded ---
      {"ABlockThatLivesOnKeepsItsLaterUses",
       "scope begins; a = A 2p; scope ends; checkpoint c; B uses a; scope begins; b = A; scope "
       "ends;"
       "restore c; B works; free a; held a"},
      // Captured uses: one outside of captures makes the block an eager one as well. It comes back
      // over bytes that nobody works on.
      {"ARevivedBlockHasTheUsesThatItHad",
       "scope begins; body B; a = A 2p; B uses a; body ends; scope ends; checkpoint c; free a;"
       "scope begins; scope ends; restore c; B works; free a; held a"},
      {"ARevivedEagerBlockIsStillEager",
       "eager; a = A 2p; scope ends; checkpoint c; free a; restore c; A works; free a; held a"},
      // A use that the checkpoint does not know was of the life that has ended.
      {"ARevivedBlockHasNoUsesOfAnotherLife",
       "scope begins; a = A 2p; scope ends; checkpoint c; B uses a; free a; restore c; events 0;"
       "B works; free a; events 0"},
      // By the time of the restore a capture has a block just like one that lived then: it passes
      // for it, but what was eager work before will be so again.
      {"ABlockThatPassesForAnEagerOneIsEager",
       "eager; a = A 2p; scope ends; checkpoint c; free a;"
       "scope begins; b = A 2p; scope ends; b shares a; restore c; A works; free a; held a"},
      {"ABlockThatPassesForOneWithUsesHasThem",
       "scope begins; a = A 2p; scope ends; B uses a; checkpoint c; free a;"
       "scope begins; b = A 2p; scope ends; b shares a; restore c; B works; free a; held a"},
  };
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, PoolScripts, ::testing::ValuesIn(Scripts()),
                         PoolScripts::NameOf);

// A block comes back over bytes that another stream, or its own, is at work on since: it stays
// protected from that, wherever it is freed again.
std::vector<PoolScript> RevivedBytes() {
  const std::vector<std::pair<std::string, std::string>> frees = {
      {"Between", "free a; "},
      {"InCapture", "scope begins; free a; n = A 1g; n avoids w; free n; scope ends; "},
      {"InEagerScope", "eager; free a; scope ends; "}};
  std::vector<PoolScript> scripts;
  const auto add = [&](const std::string& name, const std::string& bytes,
                       const std::string& worked) {
    for (const std::string worker : {"A", "B"}) {
      for (const bool lives : {false, true}) {
        for (const auto& [where, free] : frees) {
          scripts.push_back(
              {name + (worker == "A" ? "Own" : "Foreign") + (lives ? "Living" : "Freed") + where,
               "scope begins; a = A " + bytes + "; scope ends; checkpoint c; free a; eager; w = " +
                   worker + " " + worked + "; w shares a; " + worker + " works; " +
                   (lives ? "" : "free w; ") + "scope ends; restore c; " + free + "held w"});
        }
      }
    }
  };
  add("Small", "4g", "3g");
  add("Whole", "2p", "31g");
  add("Stitched", "52g", "3p");
  add("PartOf", "5p", "1p");
  return scripts;
}

INSTANTIATE_TEST_SUITE_P(RevivedBytes, PoolScripts, ::testing::ValuesIn(RevivedBytes()),
                         PoolScripts::NameOf);

// Another block that starts at the same address does not pass for it.
TEST_F(CheckpointTest, ABlockOfAnotherSizeOrStreamAtTheAddressIsDropped) {
  const Block block = AllocateIn(ScopeKind::kCapture, 2 * kPage, kA);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  for (const auto& [bytes, stream] :
       {std::pair{kPage, kA}, std::pair{2 * kPage - 1, kA}, std::pair{2 * kPage, kB}}) {
    set_.Free(block.address);
    const Block other = AllocateIn(ScopeKind::kEager, bytes, stream);
    ASSERT_EQ(other.address, block.address);
    const uint64_t frees = set_.Stats(kId).frees;
    set_.Restore(kId, checkpoint);
    EXPECT_EQ(set_.At(block.address)->block, block);
    EXPECT_EQ(set_.Stats(kId).frees, frees + 1);
    set_.Check();
    watch_.FinishAll();
    set_.Restore(kId, PoolCheckpoint{.blocks = {}, .owner = checkpoint.owner});
    set_.Restore(kId, checkpoint);
  }
}

}  // namespace
}  // namespace cgp
