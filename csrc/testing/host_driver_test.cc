// The rules that the driver keeps, with real memory and with numbers.
#include "testing/host_driver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/error.h"

namespace cgp {
namespace {

constexpr uint64_t kPage = 4096;
constexpr Handle kNoHandle{999999};
constexpr StreamId kStreamA{1};
constexpr StreamId kStreamB{2};

HostDriverOptions SmallPages() { return {.device = 3, .granularity = kPage}; }

// What `call` throws; the driver must be as before.
DriverError Refused(HostDriver& driver, const std::function<void()>& call) {
  const HostUsage usage = driver.usage();
  const CallCounts calls = driver.calls();
  try {
    call();
  } catch (const DriverError& error) {
    EXPECT_EQ(driver.usage(), usage) << error.what();
    EXPECT_EQ(driver.calls(), calls) << error.what();
    EXPECT_EQ(error.device(), driver.device());
    return error;
  }
  ADD_FAILURE() << "the call was not refused";
  return DriverError(DriverStatus::kFailed, "", 0, "", 0, 0);
}

void ExpectRefused(HostDriver& driver, const std::string& part, const std::function<void()>& call) {
  const DriverError error = Refused(driver, call);
  EXPECT_EQ(error.status(), DriverStatus::kFailed);
  EXPECT_NE(std::string(error.what()).find("CUDA_ERROR_INVALID_VALUE"), std::string::npos)
      << error.what();
  EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
}

void ExpectRefusedInCapture(HostDriver& driver, const std::function<void()>& call) {
  const DriverError error = Refused(driver, call);
  EXPECT_EQ(error.status(), DriverStatus::kFailed);
  EXPECT_EQ(error.code(), 900);
  EXPECT_NE(std::string(error.what()).find("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
            std::string::npos)
      << error.what();
}

TEST(HostDriverOptionsTest, GranularityMustBeAPowerOfTwoThatCanBeMapped) {
  EXPECT_EQ(HostDriver().granularity(), uint64_t{2} << 20);
  EXPECT_EQ(HostDriver(SmallPages()).granularity(), kPage);
  EXPECT_EQ(HostDriver(SmallPages()).device(), 3);
  EXPECT_EQ(HostDriver({.granularity = 512, .map_memory = false}).granularity(), 512u);
  EXPECT_THROW(HostDriver({.granularity = 2048}), UsageError);
  EXPECT_THROW(HostDriver({.granularity = 3 * kPage}), UsageError);
  EXPECT_THROW(HostDriver({.granularity = 0}), UsageError);
  EXPECT_THROW(HostDriver({.granularity = 256, .map_memory = false}), UsageError);
}

// --- Rules ---

class HostDriverRulesTest : public testing::TestWithParam<bool> {
 protected:
  HostDriverOptions Options() const {
    HostDriverOptions options = SmallPages();
    options.map_memory = GetParam();
    return options;
  }
  HostDriver driver_{Options()};
};

INSTANTIATE_TEST_SUITE_P(Modes, HostDriverRulesTest, testing::Values(true, false),
                         [](const auto& param) { return param.param ? "Memory" : "Numbers"; });

TEST_P(HostDriverRulesTest, CountsWhatItHoldsAndGivesItAllBack) {
  const Address address = driver_.Reserve(4 * kPage);
  const Handle handle = driver_.Create(2 * kPage);
  driver_.Map(address, 2 * kPage, handle);
  driver_.Map(address + 2 * kPage, 2 * kPage, handle);
  const Event event = driver_.RecordEvent(kStreamA);
  const HostUsage expected = {.handles = 1,
                              .physical_bytes = 2 * kPage,
                              .reservations = 1,
                              .reserved_bytes = 4 * kPage,
                              .mappings = 2,
                              .mapped_bytes = 4 * kPage,
                              .events = 1};
  EXPECT_EQ(driver_.usage(), expected);
  driver_.Unmap(address, 2 * kPage);
  driver_.Unmap(address + 2 * kPage, 2 * kPage);
  driver_.Release(handle);
  driver_.FreeAddresses(address, 4 * kPage);
  driver_.DestroyEvent(event);
  EXPECT_EQ(driver_.usage(), HostUsage{});
  EXPECT_EQ(driver_.calls()[DriverCall::kMap], 2u);
  EXPECT_EQ(driver_.calls()[DriverCall::kUnmap], 2u);
  EXPECT_EQ(driver_.calls()[DriverCall::kQuiesce], 0u);
  EXPECT_EQ(driver_.calls().total(), 10u);
}

TEST_P(HostDriverRulesTest, ReservationsAreApart) {
  std::vector<std::pair<Address, uint64_t>> made;
  for (uint64_t pages = 1; pages < 20; ++pages) {
    const Address address = driver_.Reserve(pages * kPage);
    EXPECT_EQ(address % kPage, 0u);
    for (const auto& [other, bytes] : made) {
      EXPECT_TRUE(address + pages * kPage <= other || other + bytes <= address);
    }
    made.emplace_back(address, pages * kPage);
  }
}

TEST_P(HostDriverRulesTest, RefusesSizesOffTheGranularity) {
  const Address address = driver_.Reserve(2 * kPage);
  const Handle handle = driver_.Create(kPage);
  driver_.Map(address, kPage, handle);
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, kPage - 1, kPage + 512}) {
    const std::string part = "a size of " + std::to_string(bytes) + " bytes";
    ExpectRefused(driver_, part, [&] { driver_.Reserve(bytes); });
    ExpectRefused(driver_, part, [&] { driver_.Create(bytes); });
    ExpectRefused(driver_, part, [&] { driver_.Map(address + kPage, bytes, handle); });
    ExpectRefused(driver_, part, [&] { driver_.SetAccess(address, bytes); });
  }
}

TEST_P(HostDriverRulesTest, RefusesToMapWhereItCannot) {
  const Address address = driver_.Reserve(4 * kPage);
  const Handle small = driver_.Create(kPage);
  const Handle big = driver_.Create(2 * kPage);
  driver_.Map(address + kPage, 2 * kPage, big);
  for (const uint64_t page : {1u, 2u}) {
    ExpectRefused(driver_, "overlaps", [&] { driver_.Map(address + page * kPage, kPage, small); });
  }
  for (const uint64_t page : {0u, 1u, 2u}) {
    ExpectRefused(driver_, "overlaps",
                  [&] { driver_.Map(address + page * kPage, 2 * kPage, big); });
  }
  ExpectRefused(driver_, "one reservation",
                [&] { driver_.Map(address + 3 * kPage, 2 * kPage, big); });
  ExpectRefused(driver_, "one reservation", [&] { driver_.Map(address - kPage, kPage, small); });
  ExpectRefused(driver_, "one reservation",
                [&] { driver_.Map(address + 4 * kPage, kPage, small); });
  ExpectRefused(driver_, "one reservation", [&] { driver_.Map(0, kPage, small); });
  ExpectRefused(driver_, "multiple of the granularity",
                [&] { driver_.Map(address + 512, kPage, small); });
  ExpectRefused(driver_, "mapped whole", [&] { driver_.Map(address, kPage, big); });
  driver_.Map(address, kPage, small);
  driver_.Map(address + 3 * kPage, kPage, small);
}

TEST_P(HostDriverRulesTest, AMappingDoesNotCrossFromOneReservationIntoTheNext) {
  // Numbers follow on each other; the system's addresses may.
  const Address one = driver_.Reserve(kPage);
  const Address other = driver_.Reserve(kPage);
  const Handle handle = driver_.Create(2 * kPage);
  ExpectRefused(driver_, "one reservation",
                [&] { driver_.Map(std::min(one, other), 2 * kPage, handle); });
}

TEST_P(HostDriverRulesTest, RefusesToUnmapButExactlyWhatWasMapped) {
  const Address address = driver_.Reserve(4 * kPage);
  const Handle big = driver_.Create(2 * kPage);
  driver_.Map(address, 2 * kPage, big);
  driver_.Map(address + 2 * kPage, 2 * kPage, big);
  const auto refused = [&](Address at, uint64_t bytes) {
    ExpectRefused(driver_, "not exactly what one Map() mapped", [&] { driver_.Unmap(at, bytes); });
  };
  refused(address, kPage);
  refused(address + kPage, kPage);
  refused(address + kPage, 2 * kPage);
  refused(address, 4 * kPage);
  refused(address, 0);
  driver_.Unmap(address, 2 * kPage);
  refused(address, 2 * kPage);
}

TEST_P(HostDriverRulesTest, RefusesAccessToWhatIsNotWhollyMapped) {
  const Address address = driver_.Reserve(6 * kPage);
  const Handle big = driver_.Create(2 * kPage);
  driver_.Map(address, 2 * kPage, big);
  driver_.Map(address + 4 * kPage, 2 * kPage, big);
  const auto refused = [&](uint64_t page, uint64_t pages) {
    ExpectRefused(driver_, "not covered by whole mappings",
                  [&] { driver_.SetAccess(address + page * kPage, pages * kPage); });
  };
  refused(0, 1);
  refused(1, 1);
  refused(0, 3);
  refused(0, 4);
  refused(2, 2);
  refused(0, 6);
  refused(4, 3);
  EXPECT_FALSE(driver_.CanAccess(address, kPage, 3));
  driver_.Map(address + 2 * kPage, 2 * kPage, big);
  driver_.SetAccess(address, 6 * kPage);
  driver_.SetAccess(address, 6 * kPage);
  EXPECT_TRUE(driver_.CanAccess(address, 6 * kPage, 3));
  EXPECT_TRUE(driver_.CanAccess(address + 100, 6 * kPage - 100, 3));
  EXPECT_FALSE(driver_.CanAccess(address, 6 * kPage + 1, 3));
  EXPECT_FALSE(driver_.CanAccess(address - 1, 2, 3));
}

TEST_P(HostDriverRulesTest, RefusesUnknownAndReleasedHandles) {
  const Address address = driver_.Reserve(2 * kPage);
  ExpectRefused(driver_, "there is no handle 999999", [&] { driver_.Release(kNoHandle); });
  ExpectRefused(driver_, "there is no handle 999999",
                [&] { driver_.Map(address, kPage, kNoHandle); });
  const Handle mapped = driver_.Create(kPage);
  driver_.Map(address, kPage, mapped);
  driver_.Release(mapped);
  ExpectRefused(driver_, "was released before", [&] { driver_.Release(mapped); });
  ExpectRefused(driver_, "was released before",
                [&] { driver_.Map(address + kPage, kPage, mapped); });
  const Handle gone = driver_.Create(kPage);
  driver_.Release(gone);
  ExpectRefused(driver_, "there is no handle", [&] { driver_.Release(gone); });
  EXPECT_NE(driver_.Create(kPage), gone);
}

TEST_P(HostDriverRulesTest, RefusesToFreeButExactlyAnEmptyReservation) {
  const Address address = driver_.Reserve(4 * kPage);
  const Handle handle = driver_.Create(kPage);
  driver_.Map(address + kPage, kPage, handle);
  driver_.Map(address + 2 * kPage, kPage, handle);
  ExpectRefused(driver_, "2 mappings", [&] { driver_.FreeAddresses(address, 4 * kPage); });
  driver_.Unmap(address + kPage, kPage);
  ExpectRefused(driver_, "1 mappings", [&] { driver_.FreeAddresses(address, 4 * kPage); });
  driver_.Unmap(address + 2 * kPage, kPage);
  const auto refused = [&](Address at, uint64_t bytes) {
    ExpectRefused(driver_, "one Reserve()", [&] { driver_.FreeAddresses(at, bytes); });
  };
  refused(address, 3 * kPage);
  refused(address + kPage, 3 * kPage);
  refused(address, 5 * kPage);
  driver_.FreeAddresses(address, 4 * kPage);
  refused(address, 4 * kPage);
}

TEST_P(HostDriverRulesTest, PhysicalMemoryEnds) {
  HostDriverOptions options = Options();
  options.physical_limit_bytes = 4 * kPage;
  HostDriver driver(options);
  const Handle first = driver.Create(3 * kPage);
  const DriverError error = Refused(driver, [&] { driver.Create(2 * kPage); });
  EXPECT_EQ(error.status(), DriverStatus::kOutOfMemory);
  EXPECT_EQ(error.bytes(), 2 * kPage);
  EXPECT_EQ(error.code(), 2);
  EXPECT_EQ(driver.Info().free_bytes, kPage);
  EXPECT_EQ(driver.Info().total_bytes, 4 * kPage);
  driver.Create(kPage);
  // A released handle holds its memory while it is mapped.
  const Address address = driver.Reserve(3 * kPage);
  driver.Map(address, 3 * kPage, first);
  driver.Release(first);
  EXPECT_EQ(Refused(driver, [&] { driver.Create(kPage); }).status(), DriverStatus::kOutOfMemory);
  driver.Unmap(address, 3 * kPage);
  driver.Create(3 * kPage);
}

TEST_P(HostDriverRulesTest, AddressesEnd) {
  HostDriverOptions options = Options();
  options.address_limit_bytes = 4 * kPage;
  HostDriver driver(options);
  const Address address = driver.Reserve(3 * kPage);
  const DriverError error = Refused(driver, [&] { driver.Reserve(2 * kPage); });
  EXPECT_EQ(error.status(), DriverStatus::kOutOfAddresses);
  EXPECT_EQ(error.bytes(), 2 * kPage);
  driver.Reserve(kPage);
  driver.FreeAddresses(address, 3 * kPage);
  driver.Reserve(2 * kPage);
}

TEST_P(HostDriverRulesTest, AddressesAndMemoryEndWithoutLimitsToo) {
  HostDriverOptions options = Options();
  options.physical_limit_bytes = std::numeric_limits<uint64_t>::max();
  options.address_limit_bytes = std::numeric_limits<uint64_t>::max();
  HostDriver driver(options);
  const uint64_t huge = uint64_t{0} - kPage;
  EXPECT_EQ(Refused(driver, [&] { driver.Reserve(huge); }).status(), DriverStatus::kOutOfAddresses);
  if (GetParam()) {
    // The system has not so many.
    const uint64_t all = uint64_t{1} << 47;
    EXPECT_EQ(Refused(driver, [&] { driver.Reserve(all); }).status(),
              DriverStatus::kOutOfAddresses);
  }
  driver.Create(2 * kPage);
  // In all, 2^64 bytes and more.
  EXPECT_EQ(Refused(driver, [&] { driver.Create(huge); }).status(), DriverStatus::kOutOfMemory);
  EXPECT_EQ(driver.usage().physical_bytes, 2 * kPage);
}

// --- Peers ---

TEST_P(HostDriverRulesTest, PeersGetInByTheNextSetAccess) {
  const Address address = driver_.Reserve(2 * kPage);
  const Handle handle = driver_.Create(kPage);
  driver_.Map(address, kPage, handle);
  driver_.Map(address + kPage, kPage, handle);
  driver_.SetAccess(address, 2 * kPage);
  driver_.AddPeer(5);
  driver_.AddPeer(3);  // itself
  EXPECT_FALSE(driver_.CanAccess(address, kPage, 5));
  EXPECT_TRUE(driver_.CanAccess(address, kPage, 3));
  driver_.SetAccess(address, kPage);
  EXPECT_TRUE(driver_.CanAccess(address, kPage, 5));
  EXPECT_FALSE(driver_.CanAccess(address, 2 * kPage, 5));
  driver_.AddPeer(5);
  driver_.AddPeer(6);
  EXPECT_TRUE(driver_.CanAccess(address, kPage, 5));
  EXPECT_FALSE(driver_.CanAccess(address, kPage, 6));
  EXPECT_FALSE(driver_.CanAccess(address, kPage, 7));
  driver_.Unmap(address, kPage);
  driver_.Map(address, kPage, handle);
  EXPECT_FALSE(driver_.CanAccess(address, kPage, 5));
  ExpectRefused(driver_, "there is no device -1", [&] { driver_.AddPeer(-1); });
}

// --- Events ---

TEST_P(HostDriverRulesTest, EventsAreDoneAtOnceOrWhenTold) {
  EXPECT_TRUE(driver_.EventDone(driver_.RecordEvent(kStreamA)));
  driver_.HoldEvents(true);
  const Event a = driver_.RecordEvent(kStreamA);
  const Event b = driver_.RecordEvent(kStreamB);
  EXPECT_NE(a, b);
  EXPECT_FALSE(driver_.EventDone(a));
  driver_.CompleteEvents(kStreamB);
  EXPECT_FALSE(driver_.EventDone(a));
  EXPECT_TRUE(driver_.EventDone(b));
  driver_.HoldEvents(false);
  EXPECT_FALSE(driver_.EventDone(a));
  EXPECT_TRUE(driver_.EventDone(driver_.RecordEvent(kStreamA)));
  driver_.CompleteEvents();
  EXPECT_TRUE(driver_.EventDone(a));
}

TEST_P(HostDriverRulesTest, QuiesceCompletesAllEvents) {
  driver_.HoldEvents(true);
  const Event a = driver_.RecordEvent(kStreamA);
  const Event b = driver_.RecordEvent(kStreamB);
  driver_.Quiesce();
  EXPECT_TRUE(driver_.EventDone(a));
  EXPECT_TRUE(driver_.EventDone(b));
  EXPECT_FALSE(driver_.EventDone(driver_.RecordEvent(kStreamA)));
  EXPECT_EQ(driver_.calls()[DriverCall::kQuiesce], 1u);
}

TEST_P(HostDriverRulesTest, TellsWhichStreamWaitsForWhich) {
  const Event event = driver_.RecordEvent(kStreamA);
  const CaptureId capture = driver_.graphs().Begin(kStreamA);
  driver_.WaitEvent(kStreamB, event);
  ExpectRefusedInCapture(driver_, [&] { driver_.WaitEvent(kStreamA, event); });
  driver_.graphs().End(capture);
  driver_.DestroyEvent(event);
  ExpectRefused(driver_, "there is no event", [&] { driver_.WaitEvent(kStreamB, event); });
  EXPECT_EQ(driver_.waits(), (std::vector<HostDriver::Wait>{{kStreamB, kStreamA}}));
  EXPECT_EQ(driver_.calls()[DriverCall::kWaitEvent], 1u);
}

TEST_P(HostDriverRulesTest, AnEventEndsWithItsDestruction) {
  const Event event = driver_.RecordEvent(kStreamA);
  driver_.DestroyEvent(event);
  EXPECT_EQ(driver_.usage().events, 0u);
  ExpectRefused(driver_, "there is no event", [&] { driver_.EventDone(event); });
  EXPECT_EQ(driver_.unknown_events_destroyed(), 0u);
  driver_.DestroyEvent(event);
  EXPECT_EQ(driver_.unknown_events_destroyed(), 1u);
  EXPECT_EQ(driver_.usage().events, 0u);
}

// --- Captures ---

TEST_P(HostDriverRulesTest, ACaptureAllowsToMakeAndToUndo) {
  const Address old = driver_.Reserve(2 * kPage);
  const Handle old_unmapped = driver_.Create(kPage);
  const Handle old_handle = driver_.Create(kPage);
  const HostUsage before = driver_.usage();
  const CaptureId capture = driver_.graphs().Begin(kStreamB);
  const Address address = driver_.Reserve(2 * kPage);
  const Handle handle = driver_.Create(kPage);
  driver_.Map(address, kPage, handle);
  driver_.Map(address + kPage, kPage, old_handle);
  driver_.Map(old, kPage, old_handle);
  driver_.SetAccess(address, 2 * kPage);
  driver_.EventDone(driver_.RecordEvent(kStreamA));
  driver_.AddPeer(4);
  driver_.Info();
  driver_.Unmap(address, kPage);
  driver_.Unmap(address + kPage, kPage);
  driver_.Unmap(old, kPage);
  driver_.Release(handle);
  driver_.FreeAddresses(address, 2 * kPage);
  HostUsage after = driver_.usage();
  after.events = 0;
  EXPECT_EQ(after, before);
  driver_.Release(old_handle);
  driver_.Release(old_unmapped);
  driver_.graphs().End(capture);
}

TEST_P(HostDriverRulesTest, ACaptureForbidsToGiveBackWhatIsOlder) {
  const Address address = driver_.Reserve(2 * kPage);
  const Address empty = driver_.Reserve(kPage);
  const Handle mapped = driver_.Create(kPage);
  const Handle unmapped = driver_.Create(kPage);
  driver_.Map(address, kPage, mapped);
  driver_.Map(address + kPage, kPage, unmapped);
  driver_.Unmap(address + kPage, kPage);
  const CaptureId capture = driver_.graphs().Begin(kStreamA);
  ExpectRefusedInCapture(driver_, [&] { driver_.Unmap(address, kPage); });
  ExpectRefusedInCapture(driver_, [&] { driver_.FreeAddresses(empty, kPage); });
  ExpectRefusedInCapture(driver_, [&] { driver_.Release(mapped); });
  ExpectRefusedInCapture(driver_, [&] { driver_.Release(unmapped); });
  driver_.Map(address + kPage, kPage, unmapped);  // does not make it this capture's own
  ExpectRefusedInCapture(driver_, [&] { driver_.Release(unmapped); });
  driver_.Unmap(address + kPage, kPage);
  ExpectRefusedInCapture(driver_, [&] { driver_.Quiesce(); });
  ExpectRefusedInCapture(driver_, [&] { driver_.RecordEvent(kStreamA); });
  driver_.RecordEvent(kStreamB);
  driver_.graphs().End(capture);
  driver_.Unmap(address, kPage);
  driver_.FreeAddresses(empty, kPage);
  driver_.Release(mapped);
  driver_.Release(unmapped);
  driver_.Quiesce();
  driver_.RecordEvent(kStreamA);
}

TEST_P(HostDriverRulesTest, WhatOneCaptureMadeTheNextMustKeep) {
  const CaptureId one = driver_.graphs().Begin(kStreamA);
  const Address address = driver_.Reserve(kPage);
  const Handle handle = driver_.Create(kPage);
  driver_.Map(address, kPage, handle);
  driver_.graphs().End(one);
  const CaptureId next = driver_.graphs().Begin(kStreamA);
  ExpectRefusedInCapture(driver_, [&] { driver_.Unmap(address, kPage); });
  ExpectRefusedInCapture(driver_, [&] { driver_.Release(handle); });
  driver_.graphs().End(next);
  driver_.Unmap(address, kPage);
}

TEST_P(HostDriverRulesTest, CapturesMayOverlap) {
  const CaptureId a = driver_.graphs().Begin(kStreamA);
  const Address of_a = driver_.Reserve(kPage);
  const Address also_of_a = driver_.Reserve(kPage);
  const CaptureId b = driver_.graphs().Begin(kStreamB);
  const Address of_b = driver_.Reserve(kPage);
  driver_.FreeAddresses(of_a, kPage);
  ExpectRefusedInCapture(driver_, [&] { driver_.RecordEvent(kStreamA); });
  driver_.graphs().End(a);
  ExpectRefusedInCapture(driver_, [&] { driver_.Quiesce(); });
  ExpectRefusedInCapture(driver_, [&] { driver_.RecordEvent(kStreamB); });
  ExpectRefusedInCapture(driver_, [&] { driver_.FreeAddresses(also_of_a, kPage); });
  driver_.FreeAddresses(of_b, kPage);
  driver_.graphs().End(b);
  driver_.Quiesce();
}

// --- Threads ---

TEST_P(HostDriverRulesTest, ManyThreadsAtOnce) {
  const Address shared = driver_.Reserve(64 * kPage);
  std::atomic<int> wrong = 0;
  const auto work = [&](uint64_t thread) {
    const Address base = shared + thread * 16 * kPage;
    for (int round = 0; round < 50; ++round) {
      const Address own = driver_.Reserve(kPage);
      const Handle handle = driver_.Create(kPage);
      const Address at = base + static_cast<uint64_t>(round % 16) * kPage;
      driver_.Map(own, kPage, handle);
      driver_.Map(at, kPage, handle);
      driver_.SetAccess(own, kPage);
      driver_.SetAccess(at, kPage);
      if (GetParam()) {
        const auto value = static_cast<unsigned char>(round + 1);
        *reinterpret_cast<volatile unsigned char*>(own) = value;
        if (*reinterpret_cast<volatile unsigned char*>(at) != value) ++wrong;
      }
      const Event event = driver_.RecordEvent(StreamId{thread});
      if (!driver_.EventDone(event)) ++wrong;
      driver_.DestroyEvent(event);
      driver_.Info();
      driver_.Release(handle);
      driver_.Unmap(own, kPage);
      driver_.Unmap(at, kPage);
      driver_.FreeAddresses(own, kPage);
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (uint64_t thread = 0; thread < 4; ++thread) threads.emplace_back(work, thread);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  const HostUsage expected = {.reservations = 1, .reserved_bytes = 64 * kPage};
  EXPECT_EQ(driver_.usage(), expected);
  EXPECT_EQ(driver_.calls()[DriverCall::kMap], 400u);
}

}  // namespace
}  // namespace cgp
