// Scripted sequences: those that once failed, as the fuzzer printed them or shorter, and programs
// of which every driver call and every allocation is made to fail: what fails says why, leaves
// everything as it was (FuzzSession compares), and works when it is asked for again.
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <tuple>
#include <utility>

#include "core/base/error.h"
#include "testing/fuzz_session.h"
#include "testing/test_names.h"
#include "testing/text.h"

namespace cgp {
namespace {

using enum Step::Kind;

struct Script {
  std::string name;
  std::string text;
  uint64_t page_bytes = kPage;
  friend void PrintTo(const Script& script, std::ostream* out) { *out << script.name; }
};

std::string NameOf(const testing::TestParamInfo<Script>& one) { return one.param.name; }

const Script kRegressions[] = {
    // Another stream's free list lost only what was taken, and got its neighbours twice.
    {"NeighboursOfTakenBytes",
     "BeginCapture, Allocate 1 1 541, Allocate 2 2 964, Free 0 2, Allocate 2 3 971"},
    // Address 0 marked an empty place of a hash table, and was found there.
    {"AddressZero", "BeginCapture, Allocate 0 1 512, FreeWild"},
    // Rounded up to pages these sizes overflowed, or filled memory before they failed.
    {"SizesBeyondMemory",
     "BeginCapture, Allocate 0 1 18446744073709551615, Allocate 0 2 "
     "18446744073692996361,Allocate 0 3 281474976710656"},
    // A pool without users, blocks or memory stayed for ever.
    {"ReleasedWithinItsScope", "BeginCapture, Release, End"},
    // The driver failed when the second of two events was asked for: the first fence stayed half
    // opened.
    {"PollThatFailsAtAScopesBegin",
     "BeginEager, Allocate 3 1 5473, Free 0 1, Allocate 0 2 464, Progress 3 0 5, End,Fail 0 0 0 "
     "1 2, BeginCapture, BeginEager"},
    {"PollThatFailsInACapture",
     "BeginEager, Allocate 1 1 1024, Allocate 2 2 1024, Allocate 3 3 1024, Free 0 1, Free 0 2, "
     "End,BeginCapture, Progress 1 0 9, Fail 0 0 0 1 2, Allocate 3 4 8192, End, "
     "BeginCapture,Allocate 3 5 2048"},
    // An undo failed too (from call 11 on memory runs out): what stayed mapped was in the way of
    // every later extension of that range.
    {"UndoThatFails",
     "BeginCapture, Fail 0 0 0 1 11 0 1, Allocate 1 1 205, Allocate 1 2 32768, Mend,Allocate 0 3 "
     "73315",
     2 * kPage},
    // A restore brought a captured block back over its own stream's eager work, and forgot that.
    {"RevivedOverItsOwnStreamsWork",
     "Retain, Checkpoint 0 0, BeginCapture, Allocate 1 1 15872, End, Checkpoint 0 1, Free 0 "
     "1,BeginEager, Allocate 1 2 4505, End, Restore 0 1, Restore 0 0, BeginCapture, Allocate 0 3 "
     "13503"},
    // And the end of a capture that freed it was taken for the end of another stream's work.
    {"RevivedOverWorkAndFreedInACapture",
     "BeginCapture, Allocate 1 1 8192, End, Checkpoint 0 0, Free 0 1, BeginEager, Allocate 2 2 "
     "8192,Free 0 2, End, Restore 0 0, BeginCapture, Free 0 1, End, BeginCapture, Allocate 1 3 "
     "8192"},
    // A captured block passed for the eager one of the checkpoint that it is just like. Its own
    // stream goes on.
    {"PassedForAnEagerBlock",
     "BeginEager, Allocate 1 1 8192, End, Checkpoint 0 0, Progress 1 0 9, Free 0 1, "
     "BeginCapture,Allocate 1 2 8192, End, Restore 0 0, Use 1 2, Free 0 2, BeginEager, Allocate "
     "2 3 8192"},
    // A trim had nothing to give back but what could not be undone: the checkpoint was over all the
    // same.
    {"CheckpointOfAPoolWithRemains",
     "Fail 0 0 0 1 9 0 1, BeginEager, Allocate 2 1 98305, Fail 0 0 0 1 2 2 1 7, Allocate 1 2 "
     "4289,End, Release, Checkpoint 0 0, Trim, Restore 0 0",
     8 * kPage},
    // A restore gives everyone what the ring has free, and the next capture gives it back to the
    // ring: that another block gets none of it is no growth in vain.
    {"TheRingAfterARestore",
     "BeginCapture, Allocate 0 1 8192, End, BeginCapture, Allocate 0 2 8192, End, Free 0 "
     "1,BeginCapture, Allocate 0 3 8192, End, Free 0 2, BeginCapture, Allocate 0 4 8192, End, Free "
     "0 3,BeginCapture, Allocate 0 5 8192, End, Free 0 4, Checkpoint, Restore, BeginCapture, "
     "Allocate 0 6 20480"},
    // Eager work that cannot mark the device takes no page that may have been lent for a moment.
    {"EagerWorkAfterALoanThatFailed",
     "BeginCapture, Allocate 0 1 4096, Free 0 1, End, BeginEager 0 0 1, Allocate 0 2 416, End, "
     "BeginEager,End, Fail 0 0 0 1 1 2 0 12, BeginLoan, BeginEager 0 0 1, Allocate 1 3 1590"},
    // A wake that failed while something captured left what it had made.
    {"AWakeThatFailsInACapture",
     "BeginCapture 0 0 0 2, Allocate 0 1 4096 2, End 0 0 0 2, Sleep 0 0 1 2, BeginCapture,Fail 0 0 "
     "0 1 2 2 1, BeginCapture 0 0 0 2"}};

class RegressionTest : public testing::TestWithParam<Script> {};

TEST_P(RegressionTest, StaysFixed) {
  for (const bool tidy_end : {false, true}) {
    FuzzSession session(
        {.page_bytes = GetParam().page_bytes, .inspect_every = 1, .tidy_end = tidy_end});
    EXPECT_EQ(RunAll(session, StepsOf(GetParam().text)), "");
  }
}

INSTANTIATE_TEST_SUITE_P(All, RegressionTest, testing::ValuesIn(kRegressions), NameOf);

// One program captured at three sizes, the last one planned from the first two.
std::string Planned() {
  // Blocks by their size in eighths of a page at the smallest scale; 0: the block is freed.
  constexpr std::pair<uint64_t, uint64_t> kProgram[] = {{8, 6}, {8, 0},  {1, 16}, {2, 4}, {3, 12},
                                                        {2, 0}, {4, 20}, {1, 0},  {5, 0}, {6, 44},
                                                        {3, 0}, {7, 28}, {4, 0},  {6, 0}, {7, 0}};
  std::string text;
  for (const uint64_t scale : {1U, 2U, 4U}) {
    text += "BeginCapture,";
    for (const auto& [block, eighths] : kProgram) {
      const uint64_t label = 10 * scale + block;
      if (block == 5) {
        text += Text("Allocate 0 ", label, " 8,");
      } else if (eighths > 0) {
        text += Text("Allocate 0 ", label, " ", eighths * scale * (kPage / 8), ",");
      } else {
        text += Text("Free 0 ", label, ",");
      }
    }
    text += Text("End, Free 0 ", 10 * scale + 5, ",");
  }
  return text + "Release, Release, Release, Trim";
}

// More blocks than the tables of a page's parts had room for when it was made.
Script ManyBlocks() {
  constexpr uint64_t kBlocks = 128;
  Script script{"ManyBlocks", "BeginEager", kBlocks * kGranuleBytes};
  for (uint64_t i = 1; i <= kBlocks; ++i) script.text += Text(", Allocate ", i % 2, " ", i, " 512");
  for (uint64_t i = 1; i <= kBlocks; ++i) script.text += Text(", Free 0 ", 1 + i * 37 % kBlocks);
  return script;
}

const Script kScripts[] = {
    // A new range, a page in part use; then what is stitched and appended, and where both streams
    // stand. Eager work marks the device and asks whether it has come by.
    {"EveryCall",
     "BeginCapture, Allocate 0 1 12288, Allocate 0 2 512, Free 0 1, Allocate 0 3 25088, Peer 0 "
     "1,Allocate 1 4 4096, Use 1 3, Free 0 3, Allocate 0 5 4096, End, BeginEager 0 0 0 "
     "2,Allocate 0 6 8192 2, Allocate 1 7 8192 2, Use 0 7, Free 0 6, Free 0 7, End 0 0 0 "
     "2,BeginEager 0 0 0 2, Allocate 1 8 16384 2, End 0 0 0 2, Use 0 8, Free 0 8, "
     "BeginCapture,Allocate 1 9 81920, Free 0 9, End, Free 0 2, Free 0 4, Free 0 5, Release, "
     "Release,Release 0 0 0 2, Release 0 0 0 2, Trim"},
    {"Planned", Planned()},
    // Two streams make a large pool grow, which is given pages ahead of need: of 260 a 128th, 2.
    {"Ahead",
     "BeginCapture, Allocate 0 1 1064960, Allocate 1 2 4096, Allocate 0 3 12288, Allocate 1 4 "
     "4096, End,Free 0 1, Free 0 2, Free 0 3, Free 0 4, Release, Trim"},
    // Goes back to a checkpoint while work that was not captured is under way.
    {"Restored",
     "BeginEager, Allocate 0 1 8192, Allocate 0 2 8704, Allocate 0 3 9216, Allocate 1 4 512, Use "
     "1 1,Use 1 2, End, Checkpoint, Free 0 1, Free 0 4, BeginEager, Allocate 1 5 4096, Allocate "
     "1 6 5120,Allocate 1 7 6144, Allocate 1 8 7168, End, Restore, Restore, Free 0 1, Free 0 2, "
     "Free 0 3,Free 0 4, Progress 0 0 99, Progress 1 0 99, Release, Release, Trim"}};

// Runs the script, with `fault` to come, or to come at each step anew; what fails is tried again
// without. Returns how many calls were made to fail.
uint64_t RunWith(const Fault& fault, bool each_step, const Script& script) {
  FuzzSession session({.map_memory = false});
  const Step fail{kFail, 0, 0, 0, 1, fault};
  if (!each_step) session.Run(fail);
  for (const Step& step : StepsOf(script.text)) {
    SCOPED_TRACE(ToString(step));
    if (each_step) session.Run(fail);
    EXPECT_EQ(session.Run(step), "");
    const bool again = session.last_failed();
    if (again || each_step) session.Run({kMend});
    if (again) {
      EXPECT_EQ(session.Run(step), "");
      EXPECT_FALSE(session.last_failed());
    }
  }
  EXPECT_EQ(session.Finish(), "");
  return session.driver_failures();
}

class EveryCallFails : public testing::TestWithParam<std::tuple<Script, DriverStatus>> {};

TEST_P(EveryCallFails, SaysSoChangesNothingAndWorksAgain) {
  const auto& [script, status] = GetParam();
  for (const bool for_good : {false, true}) {
    uint64_t number = 1;
    while (RunWith({number, status, for_good}, /*each_step=*/false, script) > 0) {
      ASSERT_FALSE(HasFailure()) << "call " << number << (for_good ? " and all others" : "");
      ++number;
    }
    EXPECT_GT(number, 21U);
  }
}

// What cleans up after a call must not need that call itself.
TEST_P(EveryCallFails, WheneverItIsMadeByOneStep) {
  const auto& [script, status] = GetParam();
  for (size_t kind = 0; kind < kDriverCallKinds; ++kind) {
    const auto call = static_cast<DriverCall>(kind);
    const uint64_t failures = RunWith({1, status, true, call}, /*each_step=*/true, script);
    ASSERT_FALSE(HasFailure()) << Name(call);
    // Events are let go of by a call that cannot fail, memory is asked after only when it runs out,
    // and no pool records a stream's event; a stream waits only for graphs that have been replayed.
    const bool unused = call == DriverCall::kDestroyEvent || call == DriverCall::kInfo ||
                        call == DriverCall::kWaitEvent || call == DriverCall::kRecordEvent;
    EXPECT_TRUE(failures > 0 || unused || script.name != "EveryCall") << Name(call);
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryCallFails,
                         testing::Combine(testing::ValuesIn(kScripts),
                                          testing::Values(DriverStatus::kFailed,
                                                          DriverStatus::kOutOfMemory,
                                                          DriverStatus::kOutOfAddresses)));

class EveryAllocationFails : public testing::TestWithParam<Script> {};

TEST_P(EveryAllocationFails, ChangesNothingAndGoesThroughAtLast) {
  // Of steps with odd numbers allocations fail, and of the others the driver's calls.
  for (const bool driver_calls : {false, true}) {
    FuzzSession session({.page_bytes = GetParam().page_bytes,
                         .map_memory = false,
                         .inspect_every = 1,
                         .fail_each = true});
    if (driver_calls) session.Run({kMend});
    EXPECT_EQ(RunAll(session, StepsOf(GetParam().text)), "");
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryAllocationFails, testing::ValuesIn(kScripts), NameOf);
INSTANTIATE_TEST_SUITE_P(ManyBlocks, EveryAllocationFails, testing::Values(ManyBlocks()), NameOf);

// A trim without memory on the heap ended the loan, and the pool stayed for ever.
INSTANTIATE_TEST_SUITE_P(LoanOfNothing, EveryAllocationFails,
                         testing::Values(Script{"LoanOfNothing",
                                                "BeginCapture, End, BeginLoan, End 0 0 0 "
                                                "9223372036854775809, Release, Trim"}),
                         NameOf);

// A pool that could not be given back is used again, and given back after that.
TEST(FailedTrimTest, LeavesAPoolThatWorks) {
  World world({.granularity = kPage, .map_memory = false}, {.page_bytes = kPage});
  PoolSet& set = *world.set;
  const auto allocate = [&](uint64_t bytes) {
    const Address address = set.Allocate(kPool, bytes, StreamId{1}).address;
    world.watch.MarkUsed();
    return address;
  };
  set.BeginScope(kPool, ScopeKind::kCapture);
  for (uint64_t pages = 1; pages < 8; ++pages) allocate(pages * kPage + 512);
  set.EndScope(kPool);
  for (const auto& live : set.Snapshot(kPool).blocks) set.Free(live.block.address);
  set.Release(kPool);
  world.faulty.Arm({.for_good = true, .only = DriverCall::kRelease});
  EXPECT_THROW(set.Trim(), DriverError);
  const uint64_t left = set.TrimmableBytes();
  EXPECT_EQ(left, world.host.usage().physical_bytes);
  set.BeginScope(kPool, ScopeKind::kEager);
  const Address block = allocate(kPage);
  set.Check();
  EXPECT_EQ(set.Trim(), 0U) << "a pool in use";
  EXPECT_EQ(set.Usage().reserved_bytes.current, left + kPage);
  set.EndScope(kPool);
  set.Release(kPool);
  EXPECT_THROW(set.Trim(), DriverError) << "what is left";
  world.faulty.Disarm();
  EXPECT_EQ(set.Trim(), left);
  EXPECT_EQ(world.host.usage().handles, 1U) << "of the block that lives";
  set.Free(block);
  set.Trim();
  EXPECT_EQ(world.host.usage().handles, 0U);
}

}  // namespace
}  // namespace cgp
