// Sequences that once failed, as the fuzzer printed them or shorter. Each is looked at closely after every operation.
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "testing/fuzz_session.h"
#include "testing/pool_operation.h"

namespace cgp {
namespace {

struct Regression {
  std::string name;
  std::vector<PoolOperation> operations;
  FuzzSetup setup = {.inspect_every = 1};
};

std::ostream& operator<<(std::ostream& out, const Regression& regression) {
  return out << regression.name;
}

std::vector<Regression> Regressions() {
  return {
      // Another stream's view forgot only what was taken, and learned its neighbours twice.
      {"NeighboursOfTakenBytes",
       {
           BeginOp{1, ScopeKind::kCapture},
           AllocateOp{.label = 1, .pool = 1, .bytes = 541, .stream = 1},
           AllocateOp{.label = 2, .pool = 1, .bytes = 964, .stream = 2},
           FreeOp{2},
           AllocateOp{.label = 3, .pool = 1, .bytes = 971, .stream = 2},
       }},
      // Address 0 marked an empty place of a hash table, and was found there.
      {"AddressZero",
       {
           BeginOp{1, ScopeKind::kCapture},
           AllocateOp{.label = 1, .pool = 1, .bytes = 512, .stream = 0},
           FreeWildOp{0},
       }},
      // Rounded up to pages these sizes overflowed, or filled memory before they failed.
      {"SizesBeyondMemory",
       {
           BeginOp{1, ScopeKind::kCapture},
           AllocateOp{.label = 1, .pool = 1, .bytes = 18446744073709551615U, .stream = 0},
           AllocateOp{.label = 2, .pool = 1, .bytes = 18446744073692996361U, .stream = 0},
           AllocateOp{.label = 3, .pool = 1, .bytes = 281474976710656U, .stream = 0},
       }},
      // A pool without users, blocks or memory stayed for ever.
      {"ReleasedWithinItsScope",
       {
           BeginOp{1, ScopeKind::kCapture},
           ReleaseOp{1},
           EndOp{1},
       }},
      // The driver failed when the second of two events was asked for: the first fence stayed half opened.
      {"PollThatFailsAtAScopesBegin",
       {
           BeginOp{1, ScopeKind::kEager},
           AllocateOp{.label = 1, .pool = 1, .bytes = 5473, .stream = 3},
           FreeOp{1},
           AllocateOp{.label = 2, .pool = 1, .bytes = 464, .stream = 0},
           ProgressOp{3, 5},
           EndOp{1},
           FailOp{1, DriverStatus::kFailed, false},
           BeginOp{1, ScopeKind::kCapture},
           BeginOp{1, ScopeKind::kEager},
       }},
      {"PollThatFailsInACapture",
       {
           BeginOp{1, ScopeKind::kEager},
           AllocateOp{.label = 1, .pool = 1, .bytes = 1024, .stream = 1},
           AllocateOp{.label = 2, .pool = 1, .bytes = 1024, .stream = 2},
           AllocateOp{.label = 3, .pool = 1, .bytes = 1024, .stream = 3},
           FreeOp{1},
           FreeOp{2},
           EndOp{1},
           BeginOp{1, ScopeKind::kCapture},
           ProgressOp{1, 9},
           FailOp{1, DriverStatus::kFailed, false},
           AllocateOp{.label = 4, .pool = 1, .bytes = 8192, .stream = 3},
           EndOp{1},
           BeginOp{1, ScopeKind::kCapture},
           AllocateOp{.label = 5, .pool = 1, .bytes = 2048, .stream = 3},
       }},
      // An undo failed too: what stayed mapped was in the way of every later extension of that range.
      {"UndoThatFails",
       {
           BeginOp{1, ScopeKind::kCapture},
           FailOp{10, DriverStatus::kOutOfMemory, true},
           AllocateOp{.label = 1, .pool = 1, .bytes = 205, .stream = 1},
           AllocateOp{.label = 2, .pool = 1, .bytes = 32768, .stream = 1},
           MendOp{},
           AllocateOp{.label = 3, .pool = 1, .bytes = 73315, .stream = 0},
       },
       {.page_bytes = 8192, .inspect_every = 1}},
      // A restore brought a captured block back over its own stream's eager work, and forgot that.
      {"RevivedOverItsOwnStreamsWork",
       {
           RetainOp{1},
           CheckpointOp{0, 1},
           BeginOp{1, ScopeKind::kCapture},
           AllocateOp{.label = 1, .pool = 1, .bytes = 15872, .stream = 1},
           EndOp{1},
           CheckpointOp{1, 1},
           FreeOp{1},
           BeginOp{1, ScopeKind::kEager},
           AllocateOp{.label = 2, .pool = 1, .bytes = 4505, .stream = 1},
           EndOp{1},
           RestoreOp{1, 1},
           RestoreOp{0, 1},
           BeginOp{1, ScopeKind::kCapture},
           AllocateOp{.label = 3, .pool = 1, .bytes = 13503, .stream = 0},
       }},
      // And the end of a capture that freed it was taken for the end of another stream's work.
      {"RevivedOverWorkAndFreedInACapture",
       {
           BeginOp{1, ScopeKind::kCapture},
           AllocateOp{.label = 1, .pool = 1, .bytes = 8192, .stream = 1},
           EndOp{1},
           CheckpointOp{0, 1},
           FreeOp{1},
           BeginOp{1, ScopeKind::kEager},
           AllocateOp{.label = 2, .pool = 1, .bytes = 8192, .stream = 2},
           FreeOp{2},
           EndOp{1},
           RestoreOp{0, 1},
           BeginOp{1, ScopeKind::kCapture},
           FreeOp{1},
           EndOp{1},
           BeginOp{1, ScopeKind::kCapture},
           AllocateOp{.label = 3, .pool = 1, .bytes = 8192, .stream = 1},
       }},
      // A captured block passed for the eager one of the checkpoint that it is just like.
      {"PassedForAnEagerBlock",
       {
           BeginOp{1, ScopeKind::kEager},
           AllocateOp{.label = 1, .pool = 1, .bytes = 8192, .stream = 1},
           EndOp{1},
           CheckpointOp{0, 1},
           ProgressOp{1, 9},
           FreeOp{1},
           BeginOp{1, ScopeKind::kCapture},
           AllocateOp{.label = 2, .pool = 1, .bytes = 8192, .stream = 1},
           EndOp{1},
           RestoreOp{0, 1},
           RecordUseOp{2, 1},  // its own stream goes on
           FreeOp{2},
           BeginOp{1, ScopeKind::kEager},
           AllocateOp{.label = 3, .pool = 1, .bytes = 8192, .stream = 2},
       }},
  };
}

class RegressionTest : public ::testing::TestWithParam<Regression> {};

TEST_P(RegressionTest, StaysFixed) {
  for (const bool tidy_end : {false, true}) {
    FuzzSetup setup = GetParam().setup;
    setup.tidy_end = tidy_end;
    FuzzSession session(setup);
    for (const PoolOperation& operation : GetParam().operations) {
      ASSERT_EQ(session.Run(operation), "") << "after " << operation;
    }
    EXPECT_EQ(session.Finish(), "");
  }
}

INSTANTIATE_TEST_SUITE_P(All, RegressionTest, ::testing::ValuesIn(Regressions()),
                         [](const auto& one) { return one.param.name; });

}  // namespace
}  // namespace cgp
