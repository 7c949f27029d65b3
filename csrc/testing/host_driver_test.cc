// The rules that the driver keeps, with real memory and with numbers.
#include "testing/host_driver.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "core/base/error.h"

namespace cgp {
namespace {

constexpr uint64_t kPage = 4096;
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

// --- Events ---

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

}  // namespace
}  // namespace cgp
