// The limit on physical memory, and what the history is told of mappings.
#include "torch/observe/metered_driver.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "driver/host_driver.h"
#include "testing/allocation_faults.h"
#include "torch/observe/history.h"
#include "torch/testing/fake_cuda.h"

namespace cgp {
namespace {

using fake_cuda::kPage;
using Action = History::Action;

class MeteredDriverTest : public ::testing::Test {
 protected:
  void SetUp() override { Record(true); }
  void TearDown() override { Record(false); }
  static void Record(bool enabled) {
    History::Get().Configure(enabled, nullptr, 100, History::When::NEVER, true, {});
  }
  std::vector<History::TraceEntry> Noted() const {
    std::vector<std::vector<History::TraceEntry>> traces(static_cast<size_t>(device_) + 1);
    History::Get().MergeInto(traces);
    return traces[static_cast<size_t>(device_)];
  }
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

  const c10::DeviceIndex device_ = fake_cuda::NextDevice();
  MeteredDriver driver_{std::make_unique<HostDriver>(HostDriverOptions{
      .device = device_, .physical_limit_bytes = 8 * kPage, .map_memory = false})};
};

TEST_F(MeteredDriverTest, WithoutALimitTheDeviceSaysWhenItIsFull) {
  for (int i = 0; i < 8; ++i) driver_.Create(kPage);
  EXPECT_EQ(Held(), 8 * kPage);
  EXPECT_EQ(RefusalOf(kPage).find("set_per_process_memory_fraction"), std::string::npos);
}

TEST_F(MeteredDriverTest, TheLimitIsOfAllHandlesTogether) {
  driver_.SetLimit(3 * kPage + 1);
  const Handle two = driver_.Create(2 * kPage);
  const std::string refusal = RefusalOf(2 * kPage);
  EXPECT_NE(refusal.find("leaves graph pools 6 MiB, of which 4 MiB are in use"), std::string::npos)
      << refusal;
  driver_.Create(kPage);
  EXPECT_NE(RefusalOf(kPage), "");
  EXPECT_EQ(Held(), 3 * kPage) << "what is refused never reached the device";
  driver_.Release(two);
  driver_.Create(2 * kPage);
  EXPECT_EQ(Held(), 3 * kPage);
}

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
  const MeteredDriver::Purpose purpose({5, 6}, StreamId{7});
  EXPECT_FALSE(MeteredDriver::Purpose::limit_refused());
  EXPECT_NE(RefusalOf(5 * kPage), "");
  EXPECT_TRUE(MeteredDriver::Purpose::limit_refused());
  std::thread([] { EXPECT_FALSE(MeteredDriver::Purpose::limit_refused()); }).join();
  driver_.SetLimit(MeteredDriver::kNoLimit);
  EXPECT_NE(RefusalOf(9 * kPage), "");
  EXPECT_FALSE(MeteredDriver::Purpose::limit_refused()) << "the device itself";
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

TEST_F(MeteredDriverTest, MappingsAreNotedForThePoolAndStreamOfTheThread) {
  const Address address = driver_.Reserve(3 * kPage);
  const Handle handle = driver_.Create(kPage);
  {
    const MeteredDriver::Purpose purpose({5, 6}, StreamId{7});
    driver_.Map(address, kPage, handle);
    std::thread([&] { driver_.Map(address + kPage, kPage, handle); }).join();
  }
  driver_.Map(address + 2 * kPage, kPage, handle);
  EXPECT_THROW(driver_.Map(address, kPage, handle), DriverError);
  driver_.Unmap(address, kPage);
  EXPECT_THROW(driver_.Unmap(address, kPage), DriverError);

  const auto noted = Noted();
  ASSERT_EQ(noted.size(), 4U) << "what failed is not noted";
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(noted[i].action_, i < 3 ? Action::SEGMENT_MAP : Action::SEGMENT_UNMAP);
    EXPECT_EQ(noted[i].addr_, address + i % 3 * kPage);
    EXPECT_EQ(noted[i].size_, kPage);
    EXPECT_EQ(noted[i].mempool_, i == 0 ? c10::MempoolId_t(5, 6) : c10::MempoolId_t(0, 0));
    EXPECT_EQ(noted[i].stream_, reinterpret_cast<void*>(i == 0 ? 7 : 0));
  }
}

}  // namespace
}  // namespace cgp
