// Sequences that once failed, as the fuzzer printed them or shorter. Each is looked at closely after every operation.
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "testing/fuzz_session.h"
#include "testing/pool_operation.h"

namespace cgp {
namespace {

constexpr ScopeKind kCapture = ScopeKind::kCapture;
constexpr ScopeKind kEager = ScopeKind::kEager;

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
       Sequence(BeginOp{1, kCapture}, AllocateOp{1, 1, 541, 1}, AllocateOp{2, 1, 964, 2}, FreeOp{2},
                AllocateOp{3, 1, 971, 2})},
      // Address 0 marked an empty place of a hash table, and was found there.
      {"AddressZero", Sequence(BeginOp{1, kCapture}, AllocateOp{1, 1, 512, 0}, FreeWildOp{0})},
      // Rounded up to pages these sizes overflowed, or filled memory before they failed.
      {"SizesBeyondMemory",
       Sequence(BeginOp{1, kCapture}, AllocateOp{1, 1, 18446744073709551615U, 0},
                AllocateOp{2, 1, 18446744073692996361U, 0}, AllocateOp{3, 1, 281474976710656U, 0})},
      // A pool without users, blocks or memory stayed for ever.
      {"ReleasedWithinItsScope", Sequence(BeginOp{1, kCapture}, ReleaseOp{1}, EndOp{1})},
      // The driver failed when the second of two events was asked for: the first fence stayed half opened.
      {"PollThatFailsAtAScopesBegin",
       Sequence(BeginOp{1, kEager}, AllocateOp{1, 1, 5473, 3}, FreeOp{1}, AllocateOp{2, 1, 464, 0},
                ProgressOp{3, 5}, EndOp{1}, FailOp{1, DriverStatus::kFailed, false},
                BeginOp{1, kCapture}, BeginOp{1, kEager})},
      {"PollThatFailsInACapture",
       Sequence(BeginOp{1, kEager}, AllocateOp{1, 1, 1024, 1}, AllocateOp{2, 1, 1024, 2},
                AllocateOp{3, 1, 1024, 3}, FreeOp{1}, FreeOp{2}, EndOp{1}, BeginOp{1, kCapture},
                ProgressOp{1, 9}, FailOp{1, DriverStatus::kFailed, false},
                AllocateOp{4, 1, 8192, 3}, EndOp{1}, BeginOp{1, kCapture},
                AllocateOp{5, 1, 2048, 3})},
      // An undo failed too: what stayed mapped was in the way of every later extension of that range.
      {"UndoThatFails",
       Sequence(BeginOp{1, kCapture}, FailOp{10, DriverStatus::kOutOfMemory, true},
                AllocateOp{1, 1, 205, 1}, AllocateOp{2, 1, 32768, 1}, MendOp{},
                AllocateOp{3, 1, 73315, 0}),
       {.page_bytes = 8192, .inspect_every = 1}},
      // A restore brought a captured block back over its own stream's eager work, and forgot that.
      {"RevivedOverItsOwnStreamsWork",
       Sequence(RetainOp{1}, CheckpointOp{0, 1}, BeginOp{1, kCapture}, AllocateOp{1, 1, 15872, 1},
                EndOp{1}, CheckpointOp{1, 1}, FreeOp{1}, BeginOp{1, kEager},
                AllocateOp{2, 1, 4505, 1}, EndOp{1}, RestoreOp{1, 1}, RestoreOp{0, 1},
                BeginOp{1, kCapture}, AllocateOp{3, 1, 13503, 0})},
      // And the end of a capture that freed it was taken for the end of another stream's work.
      {"RevivedOverWorkAndFreedInACapture",
       Sequence(BeginOp{1, kCapture}, AllocateOp{1, 1, 8192, 1}, EndOp{1}, CheckpointOp{0, 1},
                FreeOp{1}, BeginOp{1, kEager}, AllocateOp{2, 1, 8192, 2}, FreeOp{2}, EndOp{1},
                RestoreOp{0, 1}, BeginOp{1, kCapture}, FreeOp{1}, EndOp{1}, BeginOp{1, kCapture},
                AllocateOp{3, 1, 8192, 1})},
      // A captured block passed for the eager one of the checkpoint that it is just like.
      {"PassedForAnEagerBlock",
       Sequence(BeginOp{1, kEager}, AllocateOp{1, 1, 8192, 1}, EndOp{1}, CheckpointOp{0, 1},
                ProgressOp{1, 9}, FreeOp{1}, BeginOp{1, kCapture}, AllocateOp{2, 1, 8192, 1},
                EndOp{1}, RestoreOp{0, 1}, RecordUseOp{2, 1},  // its own stream goes on
                FreeOp{2}, BeginOp{1, kEager}, AllocateOp{3, 1, 8192, 2})},
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
