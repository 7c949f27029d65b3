// The rules that the driver keeps, with real memory and with numbers.
#include "testing/host_driver.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "core/base/error.h"
#include "testing/test_names.h"

namespace cgp {
namespace {

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

// --- Captures ---

TEST_P(HostDriverRulesTest, ACaptureForbidsToGiveBackWhatIsOlder) {
  const Address address = driver_.Reserve(2 * kPage);
  const Address empty = driver_.Reserve(kPage);
  const Handle mapped = driver_.Create(kPage);
  const Handle unmapped = driver_.Create(kPage);
  driver_.Map(address, kPage, mapped);
  driver_.Map(address + kPage, kPage, unmapped);
  driver_.Unmap(address + kPage, kPage);
  const CaptureId capture = driver_.graphs().Begin(kA);
  ExpectRefusedInCapture(driver_, [&] { driver_.Unmap(address, kPage); });
  ExpectRefusedInCapture(driver_, [&] { driver_.FreeAddresses(empty, kPage); });
  ExpectRefusedInCapture(driver_, [&] { driver_.Release(mapped); });
  ExpectRefusedInCapture(driver_, [&] { driver_.Release(unmapped); });
  driver_.Map(address + kPage, kPage, unmapped);  // does not make it this capture's own
  ExpectRefusedInCapture(driver_, [&] { driver_.Release(unmapped); });
  driver_.Unmap(address + kPage, kPage);
  ExpectRefusedInCapture(driver_, [&] { driver_.Quiesce(); });
  ExpectRefusedInCapture(driver_, [&] { driver_.RecordEvent(kA); });
  driver_.RecordEvent(kB);
  driver_.graphs().End(capture);
  driver_.Unmap(address, kPage);
  driver_.FreeAddresses(empty, kPage);
  driver_.Release(mapped);
  driver_.Release(unmapped);
  driver_.Quiesce();
  driver_.RecordEvent(kA);
}

}  // namespace
}  // namespace cgp
