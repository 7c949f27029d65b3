#include "driver/faulty_driver.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "testing/host_driver.h"
#include "testing/test_names.h"

namespace cgp {
namespace {

void MapAndGiveBack(Driver& driver) {
  const Address address = driver.Reserve(4 * kPage);
  const Handle handle = driver.Create(2 * kPage);
  driver.Map(address + kPage, 2 * kPage, handle);
  driver.SetAccess(address + kPage, 2 * kPage);
  driver.DestroyEvent(driver.RecordDeviceEvent());
  driver.Quiesce();
  driver.Unmap(address + kPage, 2 * kPage);
  driver.Release(handle);
  driver.FreeAddresses(address, 4 * kPage);
}

TEST(FaultyDriverTest, FailsEachCallBeforeTheInnerDriverHearsOfItOnceOrForGood) {
  HostDriver host({.device = 2, .granularity = kPage, .map_memory = false});
  FaultyDriver driver(host);
  MapAndGiveBack(driver);
  EXPECT_EQ(host.usage(), HostUsage{});
  const std::vector<DriverCall> all = driver.calls();
  for (uint64_t number = 1; number <= 2 * all.size(); ++number) {
    const uint64_t nth = (number + 1) / 2;
    const bool for_good = number % 2 == 0;
    driver.Arm({.call_number = nth, .for_good = for_good});
    const DriverCall failing = all[nth - 1];
    const CallCounts before = host.calls();
    std::string call;
    try {
      MapAndGiveBack(driver);
    } catch (const DriverError& error) {
      call = error.call();
      EXPECT_EQ(error.status(), DriverStatus::kFailed);
      EXPECT_NE(std::string(error.what()).find("as call " + std::to_string(nth)), std::string::npos)
          << error.what();
    }
    EXPECT_EQ(call, Name(failing));
    EXPECT_EQ(host.calls()[failing], before[failing]);
    if (for_good) {
      EXPECT_THROW(driver.Info(), DriverError);
    } else {
      driver.Info();
    }
    EXPECT_EQ(driver.failures(), for_good ? 2U : 1U);
  }
  driver.Disarm();
  EXPECT_EQ(driver.call_count() + driver.failures(), 0U);
}

}  // namespace
}  // namespace cgp
