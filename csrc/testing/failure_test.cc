// Every driver call and every allocation of scripted programs is made to fail: what fails says why,
// leaves everything as it was (FuzzSession compares), and works when it is asked for again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "core/base/error.h"
#include "testing/fuzz_session.h"
#include "testing/pool_operation.h"

namespace cgp {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kPage = 4096;
constexpr ScopeKind kCapture = ScopeKind::kCapture;
constexpr ScopeKind kEager = ScopeKind::kEager;

struct Script {
  const char* name;
  std::vector<PoolOperation> operations;
  friend void PrintTo(const Script& script, std::ostream* out) { *out << script.name; }
};

// One program captured at three sizes, the last one planned from the first two.
std::vector<PoolOperation> Planned() {
  std::vector<PoolOperation> operations;
  uint64_t label = 0;
  for (const uint64_t scale : {1U, 2U, 4U}) {
    const auto allocate = [&](uint64_t slot, uint64_t eighths) {
      operations.emplace_back(AllocateOp{label + slot, 1, eighths * (kPage / 8), 0});
    };
    const auto free = [&](uint64_t slot) { operations.emplace_back(FreeOp{label + slot}); };
    operations.emplace_back(BeginOp{1, kCapture});
    allocate(8, 6 * scale);
    free(8);
    allocate(1, 16 * scale);
    allocate(2, 4 * scale);
    allocate(3, 12 * scale);
    free(2);
    allocate(4, 20 * scale);
    free(1);
    allocate(5, 8);
    allocate(6, 44 * scale);
    free(3);
    allocate(7, 28 * scale);
    for (const uint64_t slot : {4U, 6U, 7U}) free(slot);
    operations.emplace_back(EndOp{1});
    free(5);
    label += 10;
  }
  operations.insert(operations.end(), {ReleaseOp{1}, ReleaseOp{1}, ReleaseOp{1}, TrimOp{}});
  return operations;
}

std::vector<Script> Scripts() {
  return {
      // A new range, a page in part use; then what is stitched and appended, and where both streams stand.
      // Eager work marks the device and asks whether it has come by.
      {"EveryCall",
       Sequence(BeginOp{1, kCapture}, AllocateOp{1, 1, 3 * kPage, 0}, AllocateOp{2, 1, 512, 0},
                FreeOp{1}, AllocateOp{3, 1, 6 * kPage + 512, 0}, EnablePeerOp{1},
                AllocateOp{4, 1, kPage, 1}, RecordUseOp{3, 1}, FreeOp{3},
                AllocateOp{5, 1, kPage, 0}, EndOp{1}, BeginOp{2, kEager},
                AllocateOp{6, 2, 2 * kPage, 0}, AllocateOp{7, 2, 2 * kPage, 1}, RecordUseOp{7, 0},
                FreeOp{6}, FreeOp{7}, EndOp{2}, BeginOp{2, kEager}, AllocateOp{8, 2, 4 * kPage, 1},
                EndOp{2}, RecordUseOp{8, 0}, FreeOp{8}, BeginOp{1, kCapture},
                AllocateOp{9, 1, 20 * kPage, 1}, FreeOp{9}, EndOp{1}, FreeOp{2}, FreeOp{4},
                FreeOp{5}, ReleaseOp{1}, ReleaseOp{1}, ReleaseOp{2}, ReleaseOp{2}, TrimOp{})},
      {"Planned", Planned()},
      // Two streams make a large pool grow, which is given pages ahead of need: of 260 a 128th, 2.
      {"Ahead",
       Sequence(BeginOp{1, kCapture}, AllocateOp{1, 1, 260 * kPage, 0}, AllocateOp{2, 1, kPage, 1},
                AllocateOp{3, 1, 3 * kPage, 0}, AllocateOp{4, 1, kPage, 1}, EndOp{1}, FreeOp{1},
                FreeOp{2}, FreeOp{3}, FreeOp{4}, ReleaseOp{1}, TrimOp{})},
      // Goes back to a checkpoint while work that was not captured is under way.
      {"Restored",
       Sequence(BeginOp{2, kEager}, AllocateOp{1, 2, 2 * kPage, 0},
                AllocateOp{2, 2, 2 * kPage + 512, 0}, AllocateOp{3, 2, 2 * kPage + 1024, 0},
                AllocateOp{4, 2, 512, 1}, RecordUseOp{1, 1}, RecordUseOp{2, 1}, EndOp{2},
                CheckpointOp{0, 2}, FreeOp{1}, FreeOp{4}, BeginOp{2, kEager},
                AllocateOp{5, 2, 4096, 1}, AllocateOp{6, 2, 5120, 1}, AllocateOp{7, 2, 6144, 1},
                AllocateOp{8, 2, 7168, 1}, EndOp{2}, RestoreOp{0, 2}, RestoreOp{0, 2}, FreeOp{1},
                FreeOp{2}, FreeOp{3}, FreeOp{4}, ProgressOp{0, 99}, ProgressOp{1, 99}, ReleaseOp{2},
                ReleaseOp{2}, TrimOp{})}};
}

constexpr FuzzSetup kSetup{.map_memory = false};

// Runs the script, with `fault` to come, or to come at each operation anew; what fails is tried again
// without. Returns how many calls were made to fail.
uint64_t RunWith(const FailOp& fault, bool each_operation, const Script& script) {
  FuzzSession session(kSetup);
  if (!each_operation) session.Run(fault);
  for (const PoolOperation& operation : script.operations) {
    SCOPED_TRACE(ToString(operation));
    if (each_operation) session.Run(fault);
    EXPECT_EQ(session.Run(operation), "");
    const bool again = session.last_failed();
    if (again || each_operation) session.Run(MendOp{});
    if (again) {
      EXPECT_EQ(session.Run(operation), "");
      EXPECT_FALSE(session.last_failed());
    }
  }
  EXPECT_EQ(session.Finish(), "");
  return session.driver_failures();
}

using Failing = std::tuple<Script, DriverStatus>;

class EveryCallFails : public ::testing::TestWithParam<Failing> {};

TEST_P(EveryCallFails, SaysSoChangesNothingAndWorksAgain) {
  const auto& [script, status] = GetParam();
  for (const bool for_good : {false, true}) {
    uint64_t before = 0;
    while (RunWith({before, status, for_good}, /*each_operation=*/false, script) > 0) {
      ASSERT_FALSE(HasFailure()) << "call " << before + 1 << (for_good ? " and all others" : "");
      ++before;
    }
    EXPECT_GT(before, 20U);
  }
}

// What cleans up after a call must not need that call itself.
TEST_P(EveryCallFails, WheneverItIsMadeByOneOperation) {
  const auto& [script, status] = GetParam();
  for (size_t kind = 0; kind < kDriverCallKinds; ++kind) {
    const auto call = static_cast<DriverCall>(kind);
    const uint64_t failures = RunWith({0, status, true, call}, /*each_operation=*/true, script);
    ASSERT_FALSE(HasFailure()) << Name(call);
    // Events are let go of by a call that cannot fail, memory is asked after only when it runs out, and
    // no pool records a stream's event; a stream waits only for graphs that have been replayed.
    const bool unused = call == DriverCall::kDestroyEvent || call == DriverCall::kInfo ||
                        call == DriverCall::kWaitEvent || call == DriverCall::kRecordEvent;
    if (script.name == std::string("EveryCall") && !unused) {
      EXPECT_GT(failures, 0U) << Name(call);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryCallFails,
                         ::testing::Combine(::testing::ValuesIn(Scripts()),
                                            ::testing::Values(DriverStatus::kFailed,
                                                              DriverStatus::kOutOfMemory,
                                                              DriverStatus::kOutOfAddresses)));

class EveryAllocationFails : public ::testing::TestWithParam<Script> {};

TEST_P(EveryAllocationFails, ChangesNothingAndGoesThroughAtLast) {
  FuzzSetup setup = kSetup;
  setup.fail_each = true;
  // Of operations with odd numbers allocations fail, and of the others the driver's calls.
  for (const bool driver_calls : {false, true}) {
    FuzzSession session(setup);
    if (driver_calls) session.Run(MendOp{});
    for (const PoolOperation& operation : GetParam().operations) {
      ASSERT_EQ(session.Run(operation), "") << operation;
      ASSERT_EQ(session.Run(InspectOp{}), "") << operation;
    }
    EXPECT_EQ(session.Finish(), "");
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryAllocationFails, ::testing::ValuesIn(Scripts()));

// More blocks than the tables of a page's parts had room for when it was made.
TEST(FailureTest, ManySmallBlocksInAPage) {
  constexpr uint64_t kBlocks = 128;
  FuzzSession session({.granularity_bytes = kBlocks * kGranuleBytes,
                       .page_bytes = kBlocks * kGranuleBytes,
                       .map_memory = false,
                       .fail_each = true});
  ASSERT_EQ(session.Run(BeginOp{1, kEager}), "");
  for (uint64_t i = 1; i <= kBlocks; ++i) {
    ASSERT_EQ(session.Run(MendOp{}), "");
    ASSERT_EQ(session.Run(AllocateOp{i, 1, kGranuleBytes, i % 2}), "");
  }
  EXPECT_EQ(session.model().Pages({1, 7}), 1U);
  for (uint64_t i = 1; i <= kBlocks; ++i) {
    ASSERT_EQ(session.Run(MendOp{}), "");
    ASSERT_EQ(session.Run(FreeOp{1 + i * 37 % kBlocks}), "");
  }
  EXPECT_EQ(session.Finish(), "");
}

// A set of which one pool is to be given back.
class FailedTrimTest : public ::testing::Test {
 protected:
  static constexpr PoolId kPool{0, 1};

  FailedTrimTest() {
    set_.BeginScope(kPool, kCapture);
    for (uint64_t pages = 1; pages < 8; ++pages) Allocate(pages * kPage + 512);
    set_.EndScope(kPool);
    for (const auto& live : set_.Snapshot(kPool).blocks) set_.Free(live.block.address);
    set_.Release(kPool);
  }
  Address Allocate(uint64_t bytes) {
    const Address address = set_.Allocate(kPool, bytes, StreamId{1}).address;
    watch_.MarkUsed();
    return address;
  }

  HostDriver host_{{.device = 2, .granularity = kPage, .map_memory = false}};
  DriverWatch watch_{host_};
  FaultyDriver faulty_{watch_};
  PoolSet set_{faulty_};
};

// Whatever call of a trim fails, all else is given back, and the rest with the next trim.
TEST_F(FailedTrimTest, IsFinishedByTheNext) {
  const uint64_t all = set_.TrimmableBytes();
  faulty_.Arm({.call_number = 5});
  EXPECT_THROW(set_.Trim(), DriverError);
  faulty_.Disarm();
  set_.Check();
  EXPECT_FALSE(set_.ids().empty()) << "the pool stays until all of it is given back";
  const uint64_t left = set_.TrimmableBytes();
  EXPECT_LE(left, all / 4);
  EXPECT_EQ(set_.Usage().reserved_bytes.current, left);
  EXPECT_EQ(host_.usage().physical_bytes, left) << "what the driver holds is known";
  EXPECT_EQ(set_.Trim(), left);
  set_.Check();
  EXPECT_EQ(host_.usage(), HostUsage{});
  EXPECT_TRUE(set_.ids().empty());
  EXPECT_EQ(set_.Usage().reserved_bytes.current, 0U);
  EXPECT_THAT(watch_.violations(), IsEmpty());
}

// The pool that could not be given back is used again, and given back after that.
TEST_F(FailedTrimTest, LeavesAPoolThatWorks) {
  faulty_.Arm({.for_good = true, .only = DriverCall::kRelease});
  EXPECT_THROW(set_.Trim(), DriverError);
  const uint64_t left = set_.TrimmableBytes();
  EXPECT_EQ(left, host_.usage().physical_bytes);
  set_.BeginScope(kPool, kEager);
  const Address block = Allocate(kPage);
  set_.Check();
  EXPECT_EQ(set_.Trim(), 0U) << "a pool in use";
  EXPECT_EQ(set_.Usage().reserved_bytes.current, left + kPage);
  set_.EndScope(kPool);
  set_.Release(kPool);
  EXPECT_THROW(set_.Trim(), DriverError) << "what is left";
  faulty_.Disarm();
  EXPECT_EQ(set_.Trim(), left);
  EXPECT_EQ(host_.usage().handles, 1U) << "of the block that lives";
  set_.Free(block);
  set_.Trim();
  EXPECT_EQ(host_.usage().handles, 0U);
}

TEST_F(FailedTrimTest, RunningOutNamesThePoolAndTheNumbers) {
  set_.Trim();
  set_.BeginScope(kPool, kCapture);
  faulty_.Arm({.status = DriverStatus::kOutOfMemory, .only = DriverCall::kCreate});
  try {
    Allocate(5 * kPage);
    FAIL() << "nothing was thrown";
  } catch (const OutOfMemoryError& error) {
    EXPECT_EQ(error.requested_bytes(), 5 * kPage);
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("20480"), HasSubstr(ToString(kPool)), HasSubstr("device 2")));
  }
}

}  // namespace
}  // namespace cgp
