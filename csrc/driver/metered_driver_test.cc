// The limit on physical memory, and what is said of mappings.
#include "driver/metered_driver.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "testing/allocation_faults.h"
#include "testing/host_driver.h"

namespace cgp {
namespace {

class MeteredDriverTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kPage = uint64_t{2} << 20;

  std::string RefusalOf(uint64_t bytes) {
    try {
      driver_.Create(bytes);
    } catch (const DriverError& error) {
      EXPECT_EQ(error.status(), DriverStatus::kOutOfMemory);
      EXPECT_EQ(error.bytes(), bytes);
      return error.what();
    }
    return "";
  }
  uint64_t Held() const {
    return dynamic_cast<const HostDriver&>(driver_.inner()).usage().physical_bytes;
  }

  MeteredDriver driver_{std::make_unique<HostDriver>(
      HostDriverOptions{.physical_limit_bytes = 8 * kPage, .map_memory = false})};
};

TEST_F(MeteredDriverTest, ALimitBelowWhatIsHeldRefusesAndTakesNothing) {
  const Handle handle = driver_.Create(4 * kPage);
  driver_.SetLimit(kPage);
  EXPECT_NE(RefusalOf(kPage), "");
  EXPECT_EQ(Held(), 4 * kPage);
  driver_.Release(handle);
  EXPECT_EQ(RefusalOf(kPage), "");
  driver_.SetLimit(MeteredDriver::kNoLimit);
  EXPECT_EQ(RefusalOf(4 * kPage), "");
}

TEST_F(MeteredDriverTest, WhatTheDeviceRefusesDoesNotCount) {
  driver_.SetLimit(20 * kPage);
  EXPECT_NE(RefusalOf(9 * kPage), "");
  driver_.SetLimit(8 * kPage);
  EXPECT_EQ(RefusalOf(8 * kPage), "");
  EXPECT_THROW(driver_.Release(Handle{99}), DriverError);
  EXPECT_NE(RefusalOf(kPage), "");
}

TEST_F(MeteredDriverTest, WhatIsHeldIsKnownAndWhetherItChanged) {
  EXPECT_EQ(driver_.held_bytes(), 0U);
  const uint64_t at_first = driver_.changes();
  const Handle handle = driver_.Create(3 * kPage);
  EXPECT_EQ(driver_.held_bytes(), 3 * kPage);
  const uint64_t then = driver_.changes();
  EXPECT_GT(then, at_first);
  EXPECT_NE(RefusalOf(6 * kPage), "");
  EXPECT_EQ(driver_.changes(), then);
  driver_.Release(handle);
  EXPECT_EQ(driver_.held_bytes(), 0U);
  EXPECT_GT(driver_.changes(), then);
}

TEST_F(MeteredDriverTest, WhoRefusedLastIsKnown) {
  driver_.SetLimit(4 * kPage);
  MeteredDriver::ClearRefusals();
  EXPECT_FALSE(MeteredDriver::LimitRefused());
  EXPECT_NE(RefusalOf(5 * kPage), "");
  EXPECT_TRUE(MeteredDriver::LimitRefused());
  std::thread([] { EXPECT_FALSE(MeteredDriver::LimitRefused()); }).join();
  driver_.SetLimit(MeteredDriver::kNoLimit);
  EXPECT_NE(RefusalOf(9 * kPage), "");
  EXPECT_FALSE(MeteredDriver::LimitRefused()) << "the device itself";
}

TEST(MeteredDriverFaultTest, AHandleThatCannotBeNotedIsNotMade) {
  auto made = std::make_unique<HostDriver>(HostDriverOptions{.map_memory = false});
  HostDriver& host = *made;
  MeteredDriver metered(std::move(made));
  bool failed = false;
  bool done = false;
  for (uint64_t number = 1; !done; ++number) {
    try {
      const AllocationFault fault(number);
      metered.Release(metered.Create(host.granularity()));
      done = true;
    } catch (const std::bad_alloc&) {
      failed = true;
      EXPECT_EQ(host.usage().handles, 0U) << "allocation " << number;
    }
  }
  EXPECT_TRUE(failed);
}

std::vector<std::tuple<bool, Address, uint64_t>> heard;

TEST_F(MeteredDriverTest, WhatIsMappedIsSaid) {
  MeteredDriver driver(std::make_unique<HostDriver>(HostDriverOptions{.map_memory = false}),
                       [](int device, bool mapped, Address address, uint64_t bytes) {
                         EXPECT_EQ(device, 0);
                         heard.emplace_back(mapped, address, bytes);
                       });
  const Address address = driver.Reserve(2 * kPage);
  const Handle handle = driver.Create(kPage);
  driver.Map(address, kPage, handle);
  EXPECT_THROW(driver.Map(address, kPage, handle), DriverError);
  driver.Unmap(address, kPage);
  EXPECT_THROW(driver.Unmap(address, kPage), DriverError);
  EXPECT_EQ(heard, (std::vector<std::tuple<bool, Address, uint64_t>>{{true, address, kPage},
                                                                     {false, address, kPage}}))
      << "what failed is not said";
}

}  // namespace
}  // namespace cgp
