// Every driver call of scripted workloads is made to fail, once and for good: what fails says why,
// leaves everything as it was, and works when it is asked for again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/error.h"
#include "core/pool_set.h"
#include "driver/faulty_driver.h"
#include "driver/host_driver.h"
#include "testing/driver_watch.h"
#include "testing/pool_set_text.h"

namespace cgp {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr PoolId kOne{0, 1};
constexpr PoolId kTwo{0, 2};
constexpr StreamId kA{1};
constexpr StreamId kB{2};
constexpr uint64_t kPage = 4096;

enum class Script : uint8_t {
  kEverything,  // takes every path on which the driver is called
  kPlanned,     // one program captured at three sizes, the last one planned from the first two
  kAhead,       // two streams make a large pool grow, which is given pages ahead of need
};

// A set with a fault to come, and steps that use it.
class Workload {
 public:
  using Step = std::function<void()>;

  explicit Workload(Script script) {
    switch (script) {
      case Script::kEverything:
        TakeEveryPath();
        break;
      case Script::kPlanned:
        for (const uint64_t scale : {1U, 2U, 4U}) Capture(scale);
        Finish(kOne, 3);
        break;
      case Script::kAhead:
        GrowAhead();
        Finish(kOne, 1);
        break;
    }
  }

  ~Workload() { watch_.Quiesce(); }

  const std::vector<Step>& steps() const { return steps_; }
  PoolSet& set() { return set_; }
  FaultyDriver& faulty() { return faulty_; }
  DriverWatch& watch() { return watch_; }
  HostUsage usage() const { return host_.usage(); }

 private:
  // Sizes in eighths of a page; of those that grow, at scale 1.
  void Capture(uint64_t scale) {
    const auto allocate = [&](size_t slot, uint64_t eighths) {
      steps_.emplace_back([=, this] {
        blocks_[slot] = set_.Allocate(kOne, eighths * (kPage / 8), kA).address;
        watch_.MarkUsed();
      });
    };
    const auto free = [&](size_t slot) {
      steps_.emplace_back([=, this] { set_.Free(blocks_[slot]); });
    };
    steps_.emplace_back([this] { set_.BeginScope(kOne, ScopeKind::kCapture); });
    allocate(7, 6 * scale);
    free(7);
    allocate(0, 16 * scale);
    allocate(1, 4 * scale);
    allocate(2, 12 * scale);
    free(1);
    allocate(3, 20 * scale);
    free(0);
    allocate(4, 8);
    allocate(5, 44 * scale);
    free(2);
    allocate(6, 28 * scale);
    free(3);
    free(5);
    free(6);
    steps_.emplace_back([this] { set_.EndScope(kOne); });
    free(4);
  }

  // Of 600 pages a 128th are 4.
  void GrowAhead() {
    const auto allocate = [&](size_t slot, uint64_t bytes, StreamId stream) {
      steps_.emplace_back([=, this] {
        blocks_[slot] = set_.Allocate(kOne, bytes, stream).address;
        watch_.MarkUsed();
        host_.graphs().Launch(stream);
      });
    };
    steps_.emplace_back([this] { set_.BeginScope(kOne, ScopeKind::kCapture); });
    steps_.emplace_back([this] {
      capture_ = host_.graphs().Begin(kA);
      host_.graphs().Wait(kB, host_.graphs().Record(kA));
    });
    allocate(0, 600 * kPage, kA);
    allocate(1, kPage, kB);      // and 4 ahead
    allocate(2, 7 * kPage, kA);  // takes them
    allocate(3, kPage, kB);
    steps_.emplace_back([this] { host_.graphs().End(capture_); });
    steps_.emplace_back([this] { set_.EndScope(kOne); });
    for (size_t slot = 0; slot < 4; ++slot) {
      steps_.emplace_back([=, this] { set_.Free(blocks_[slot]); });
    }
  }

  void Finish(PoolId id, int users) {
    for (int user = 0; user < users; ++user) {
      steps_.emplace_back([=, this] { set_.Release(id); });
    }
    steps_.emplace_back([this] { set_.Trim(); });
  }

  void TakeEveryPath() {
    const auto allocate = [this](size_t slot, PoolId id, uint64_t bytes, StreamId stream) {
      return [=, this] {
        blocks_[slot] = set_.Allocate(id, bytes, stream).address;
        watch_.MarkUsed();
      };
    };
    const auto free = [this](size_t slot) { return [=, this] { set_.Free(blocks_[slot]); }; };
    const auto use = [this](size_t slot, StreamId stream) {
      return [=, this] { set_.RecordUse(blocks_[slot], stream); };
    };
    const auto begin = [this](PoolId id, ScopeKind kind) {
      return [=, this] { set_.BeginScope(id, kind); };
    };
    const auto end = [this](PoolId id) { return [=, this] { set_.EndScope(id); }; };
    const auto launch = [this](StreamId stream) {
      return [=, this] { host_.graphs().Launch(stream); };
    };
    // `stream` waits for what `other` has captured.
    const auto join = [this](StreamId stream, StreamId other) {
      return [=, this] { host_.graphs().Wait(stream, host_.graphs().Record(other)); };
    };
    steps_ = {
        begin(kOne, ScopeKind::kCapture),
        [this] { capture_ = host_.graphs().Begin(kA); },
        launch(kA),
        allocate(0, kOne, 3 * kPage, kA),  // a new range
        allocate(1, kOne, 512, kA),        // a page in part use
        free(0),
        allocate(2, kOne, 6 * kPage + 512, kA),  // stitched, and new pages appended
        [this] { set_.EnablePeer(1); },
        join(kB, kA),
        allocate(3, kOne, kPage, kB),
        launch(kB),
        use(2, kB),
        free(2),  // asks where both streams stand
        join(kA, kB),
        launch(kA),
        launch(kA),
        allocate(8, kOne, kPage, kA),  // asks whether A stands behind that
        [this] { host_.graphs().End(capture_); },
        end(kOne),
        begin(kTwo, ScopeKind::kEager),
        allocate(4, kTwo, 2 * kPage, kA),
        allocate(5, kTwo, 2 * kPage, kB),
        use(5, kA),
        free(4),
        free(5),
        end(kTwo),  // records events
        begin(kTwo, ScopeKind::kEager),
        allocate(6, kTwo, 4 * kPage, kB),  // asks whether they are done
        end(kTwo),
        use(6, kA),
        free(6),  // records events outside of a scope
        begin(kOne, ScopeKind::kCapture),
        allocate(7, kOne, 20 * kPage, kB),
        free(7),
        end(kOne),
        free(1),
        free(3),
        free(8),
        [this] { set_.Release(kOne); },
        [this] { set_.Release(kOne); },
        [this] { set_.Release(kTwo); },
        [this] { set_.Release(kTwo); },
        [this] { set_.Trim(); },
    };
  }

  HostDriver host_{{.device = 2, .granularity = kPage, .map_memory = false}};
  DriverWatch watch_{host_};
  FaultyDriver faulty_{watch_};
  PoolSet set_{faulty_};
  CaptureId capture_ = kNoCapture;
  Address blocks_[9] = {};
  std::vector<Step> steps_;
};

// What the driver holds, but events: one found to be done may be let go of by a call that fails
// later.
auto Held(const Workload& workload) {
  const HostUsage usage = workload.usage();
  return std::tuple(usage.handles, usage.physical_bytes, usage.reservations, usage.reserved_bytes,
                    usage.mappings, usage.mapped_bytes);
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
    if (call == DriverCall::kWaitEvent) continue;
    EXPECT_THAT(calls, ::testing::Contains(call)) << Name(call);
  }
}

// The step of the planned script that makes pages ahead of need: more than the pool ever held.
std::optional<size_t> StepMadeAhead() {
  Workload workload(Script::kPlanned);
  for (size_t i = 0; i < workload.steps().size(); ++i) {
    const uint64_t before = workload.usage().handles;
    workload.steps()[i]();
    if (workload.usage().handles <= before) continue;
    const PoolStats stats = workload.set().Stats(kOne);
    if (stats.reserved_bytes > stats.peak_allocated_bytes + 8 * kPage) return i;
  }
  return std::nullopt;
}

// The plan's pages are not to be had, once or for good: the block, which needs none, is placed.
TEST(FailureTest, APlanThatThereIsNoMemoryForIsGivenUp) {
  const std::optional<size_t> made_ahead = StepMadeAhead();
  ASSERT_TRUE(made_ahead) << "the script is not planned";
  for (const bool for_good : {false, true}) {
    for (uint64_t number = 1; number <= 5; ++number) {
      SCOPED_TRACE(std::to_string(number) + (for_good ? " for good" : " once"));
      Workload workload(Script::kPlanned);
      for (size_t i = 0; i < *made_ahead; ++i) workload.steps()[i]();
      const PoolStats before = workload.set().Stats(kOne);
      workload.faulty().Arm({.call_number = number,
                             .status = DriverStatus::kOutOfMemory,
                             .for_good = for_good,
                             .only = DriverCall::kCreate});
      workload.steps()[*made_ahead]();
      EXPECT_EQ(workload.faulty().failures(), 1U);
      EXPECT_EQ(workload.set().Stats(kOne).pages, before.pages);
      EXPECT_EQ(workload.usage().handles, before.pages);
      workload.faulty().Disarm();
      for (size_t i = *made_ahead + 1; i < workload.steps().size(); ++i) {
        workload.steps()[i]();
        if (workload.set().ids().empty()) continue;
        const PoolStats stats = workload.set().Stats(kOne);
        EXPECT_LE(stats.reserved_bytes, stats.peak_allocated_bytes + 8 * kPage) << "step " << i;
      }
      EXPECT_THAT(workload.watch().violations(), IsEmpty());
      EXPECT_THAT(workload.set().ids(), IsEmpty());
    }
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
      // Pools that go have nobody to tell; no other error is passed over.
      if (!MayGiveUp() && !MayReserveLess(workload, failing) && !workload.set().ids().empty()) {
        EXPECT_EQ(workload.faulty().failures(), failures_before);
      }
      return;
    } catch (const std::exception& error) {
      ExpectExplained(error, failing);
    }
    const uint64_t failures = workload.faulty().failures();
    EXPECT_GE(failures, 1U);
    EXPECT_EQ(Describe(workload.set()), before);
    workload.set().Check();
    // Where cleaning up failed too, the driver holds what nobody can give back.
    if (failures == failures_before + 1) {
      EXPECT_EQ(Held(workload), held_before);
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
    // Where an Unmap() fails while a pool is given back, its addresses cannot be given back either.
    if (!for_good() && calls[number - 1] != DriverCall::kUnmap) {
      EXPECT_THAT(workload.watch().violations(), IsEmpty());
    }
    if (HasFailure()) return;  // one is enough to read
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, EveryCallFails,
    ::testing::Combine(::testing::Values(Script::kEverything, Script::kPlanned, Script::kAhead),
                       ::testing::Values(DriverStatus::kFailed, DriverStatus::kOutOfMemory,
                                         DriverStatus::kOutOfAddresses),
                       ::testing::Bool()),
    [](const auto& one) {
      const DriverStatus status = std::get<1>(one.param);
      const std::string name = status == DriverStatus::kFailed        ? "Failed"
                               : status == DriverStatus::kOutOfMemory ? "OutOfMemory"
                                                                      : "OutOfAddresses";
      return name + (std::get<2>(one.param) ? "ForGood" : "Once") +
             (std::get<0>(one.param) == Script::kPlanned ? "Planned"
              : std::get<0>(one.param) == Script::kAhead ? "Ahead"
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
        EXPECT_EQ(Describe(workload.set()), before);
        workload.faulty().Disarm();
        step();
      }
      workload.faulty().Disarm();
      workload.set().Check();
    }
    EXPECT_THAT(workload.set().ids(), IsEmpty());
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, CallAlwaysFails,
    ::testing::Combine(::testing::Values(Script::kEverything, Script::kPlanned, Script::kAhead),
                       ::testing::Values(DriverStatus::kFailed, DriverStatus::kOutOfMemory)));

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
