// Every driver call of scripted workloads is made to fail, once and for good: what fails says why,
// leaves everything as it was, and works when it is asked for again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/error.h"
#include "core/pool_set.h"
#include "testing/failure_workload.h"
#include "testing/faulty_driver.h"
#include "testing/pool_set_text.h"

namespace cgp {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr PoolId kOne = Workload::kOne;
constexpr StreamId kA = Workload::kA;
constexpr uint64_t kPage = Workload::kPage;

// What the driver holds, but events: one found to be done may be let go of by a call that fails
// later.
auto Held(const Workload& workload) {
  const HostUsage usage = workload.usage();
  return std::tuple(usage.handles, usage.physical_bytes, usage.reservations, usage.reserved_bytes,
                    usage.mappings, usage.mapped_bytes);
}

// A trim that fails has given back what came before: what is left goes with the next one.
bool GivesBack(DriverCall call) {
  return call == DriverCall::kUnmap || call == DriverCall::kRelease ||
         call == DriverCall::kFreeAddresses;
}

std::vector<DriverCall> CallsOfACleanRun(Script script) {
  Workload workload(script);
  workload.faulty().Disarm();
  for (const Workload::Step& step : workload.steps()) step();
  return workload.faulty().calls();
}

TEST(FailureTest, TheWorkloadMakesEveryCallThatCanFail) {
  const std::vector<DriverCall> calls = CallsOfACleanRun(Script::kEverything);
  for (size_t kind = 0; kind < kDriverCallKinds; ++kind) {
    const auto call = static_cast<DriverCall>(kind);
    // Events are let go of by a call that cannot fail, memory is asked after only when it runs out,
    // and no pool makes a stream wait.
    if (call == DriverCall::kDestroyEvent || call == DriverCall::kInfo) continue;
    if (call == DriverCall::kWaitEvent || call == DriverCall::kRecordEvent) continue;
    EXPECT_THAT(calls, ::testing::Contains(call)) << Name(call);
  }
}

class EveryCallFails : public ::testing::TestWithParam<std::tuple<Script, DriverStatus, bool>> {
 protected:
  Script script() const { return std::get<0>(GetParam()); }
  DriverStatus status() const { return std::get<1>(GetParam()); }
  bool for_good() const { return std::get<2>(GetParam()); }

  // A plan that there is no memory or no addresses for is given up, and so are pages ahead of need.
  bool MayGiveUp() const {
    return script() != Script::kEverything && status() != DriverStatus::kFailed;
  }

  // A pool's first range that there are no addresses for is asked for once more, without room.
  bool MayReserveLess(Workload& workload, DriverCall call) const {
    const std::vector<PoolId> ids = workload.set().ids();
    return status() == DriverStatus::kOutOfAddresses && !for_good() &&
           call == DriverCall::kReserve && std::ranges::any_of(ids, [&](PoolId id) {
             return workload.set().Stats(id).ranges == 1;
           });
  }

  void ExpectExplained(const std::exception& error, DriverCall call) const {
    if (const auto* driver_error = dynamic_cast<const DriverError*>(&error)) {
      // Where something is given up, the call that fails next is another one.
      if (!MayGiveUp()) {
        EXPECT_THAT(driver_error->call(), HasSubstr(Name(call)));
      }
      EXPECT_EQ(driver_error->device(), 2);
      EXPECT_EQ(driver_error->status(), status());
      EXPECT_NE(driver_error->code(), 0);
      EXPECT_THAT(error.what(), HasSubstr(std::to_string(driver_error->code())));
    } else {
      ASSERT_NE(dynamic_cast<const OutOfMemoryError*>(&error), nullptr) << error.what();
      EXPECT_NE(status(), DriverStatus::kFailed) << error.what();
      EXPECT_GT(dynamic_cast<const OutOfMemoryError&>(error).requested_bytes(), 0U);
    }
    EXPECT_THAT(error.what(), HasSubstr("device 2"));
  }

  // Runs `step`; on failure mends the driver, and expects that nothing has changed and that it now
  // works.
  void RunStep(Workload& workload, const Workload::Step& step, DriverCall failing) {
    const std::string before = Describe(workload.set());
    const auto held_before = Held(workload);
    const uint64_t failures_before = workload.faulty().failures();
    try {
      step();
      if (!MayGiveUp() && !MayReserveLess(workload, failing)) {
        EXPECT_EQ(workload.faulty().failures(), failures_before);
      }
      return;
    } catch (const std::exception& error) {
      ExpectExplained(error, failing);
    }
    const uint64_t failures = workload.faulty().failures();
    EXPECT_GE(failures, 1U);
    workload.set().Check();
    // A trim gives back what it can.
    if (!GivesBack(failing)) {
      EXPECT_EQ(Describe(workload.set()), before);
      // Where cleaning up failed too, the driver holds more until the pool is given back.
      if (failures == failures_before + 1) {
        EXPECT_EQ(Held(workload), held_before);
      }
    }
    workload.faulty().Disarm();
    step();
    workload.set().Check();
  }
};

TEST_P(EveryCallFails, SaysSoChangesNothingAndWorksAgain) {
  const std::vector<DriverCall> calls = CallsOfACleanRun(script());
  for (uint64_t number = 1; number <= calls.size(); ++number) {
    SCOPED_TRACE("call " + std::to_string(number) + ", " + std::string(Name(calls[number - 1])));
    Workload workload(script());
    workload.faulty().Arm({.call_number = number, .status = status(), .for_good = for_good()});
    for (size_t i = 0; i < workload.steps().size(); ++i) {
      SCOPED_TRACE("step " + std::to_string(i));
      RunStep(workload, workload.steps()[i], calls[number - 1]);
    }
    EXPECT_THAT(workload.set().ids(), IsEmpty());
    EXPECT_EQ(workload.usage(), HostUsage{}) << "what failed to be given back is given back later";
    // Where an undo fails to unmap, it cannot give the addresses back either.
    if (!for_good()) {
      EXPECT_THAT(workload.watch().violations(), IsEmpty());
    }
    if (HasFailure()) return;  // one is enough to read
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryCallFails,
                         ::testing::Combine(::testing::Values(Script::kEverything, Script::kPlanned,
                                                              Script::kAhead, Script::kRestores),
                                            ::testing::Values(DriverStatus::kFailed,
                                                              DriverStatus::kOutOfMemory,
                                                              DriverStatus::kOutOfAddresses),
                                            ::testing::Bool()),
                         [](const auto& one) {
                           const DriverStatus status = std::get<1>(one.param);
                           const std::string name = status == DriverStatus::kFailed ? "Failed"
                                                    : status == DriverStatus::kOutOfMemory
                                                        ? "OutOfMemory"
                                                        : "OutOfAddresses";
                           return name + (std::get<2>(one.param) ? "ForGood" : "Once") +
                                  (std::get<0>(one.param) == Script::kPlanned    ? "Planned"
                                   : std::get<0>(one.param) == Script::kAhead    ? "Ahead"
                                   : std::get<0>(one.param) == Script::kRestores ? "Restores"
                                                                                 : "");
                         });

// Each call fails whenever it is made while one step runs: what cleans up after it must not need
// that call itself.
class CallAlwaysFails : public ::testing::TestWithParam<std::tuple<Script, DriverStatus>> {};

TEST_P(CallAlwaysFails, LeavesAStateThatChecks) {
  const auto [script, status] = GetParam();
  for (size_t kind = 0; kind < kDriverCallKinds; ++kind) {
    const auto call = static_cast<DriverCall>(kind);
    SCOPED_TRACE(std::string(Name(call)));
    Workload workload(script);
    for (const Workload::Step& step : workload.steps()) {
      const std::string before = Describe(workload.set());
      workload.faulty().Arm({.status = status, .for_good = true, .only = call});
      try {
        step();
      } catch (const std::runtime_error&) {
        if (!GivesBack(call)) {
          EXPECT_EQ(Describe(workload.set()), before);
        }
        workload.faulty().Disarm();
        step();
      }
      workload.faulty().Disarm();
      workload.set().Check();
    }
    EXPECT_THAT(workload.set().ids(), IsEmpty());
    EXPECT_EQ(workload.usage(), HostUsage{});
  }
}

INSTANTIATE_TEST_SUITE_P(All, CallAlwaysFails,
                         ::testing::Combine(::testing::Values(Script::kEverything, Script::kPlanned,
                                                              Script::kAhead, Script::kRestores),
                                            ::testing::Values(DriverStatus::kFailed,
                                                              DriverStatus::kOutOfMemory)));

TEST(FailureTest, RunningOutNamesThePoolAndTheNumbers) {
  Workload workload(Script::kEverything);
  workload.set().BeginScope(kOne, ScopeKind::kCapture);
  workload.faulty().Arm({.status = DriverStatus::kOutOfMemory, .only = DriverCall::kCreate});
  try {
    workload.set().Allocate(kOne, 5 * kPage, kA);
    FAIL() << "nothing was thrown";
  } catch (const OutOfMemoryError& error) {
    EXPECT_EQ(error.requested_bytes(), 5 * kPage);
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("20480"), HasSubstr(ToString(kOne)), HasSubstr("device 2")));
  }
}

}  // namespace
}  // namespace cgp
