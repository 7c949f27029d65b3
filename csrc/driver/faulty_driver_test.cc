#include "driver/faulty_driver.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "testing/host_driver.h"

namespace cgp {
namespace {

constexpr uint64_t kPage = 512;
constexpr StreamId kStream{7};
constexpr StreamId kCapturing{8};

class FaultyDriverTest : public testing::Test {
 protected:
  // Each kind of call once, in an order in which all succeed, with what it does to the inner
  // driver.
  void CallEverything() {
    if (capture_ == kNoCapture) {
      capture_ = host_.graphs().Begin(kCapturing);
      first_ = host_.graphs().Launch(kCapturing);
      node_ = host_.graphs().Launch(kCapturing, HostGraphs::LaunchKind::kProgrammatic);
    }
    const Address address = driver_.Reserve(4 * kPage);
    const Handle handle = driver_.Create(2 * kPage);
    driver_.AddPeer(9);
    driver_.Map(address + kPage, 2 * kPage, handle);
    EXPECT_FALSE(host_.CanAccess(address + kPage, 2 * kPage, 2));
    driver_.SetAccess(address + kPage, 2 * kPage);
    EXPECT_TRUE(host_.CanAccess(address + kPage, 2 * kPage, 2));
    EXPECT_TRUE(host_.CanAccess(address + kPage, 2 * kPage, 9));
    Frontier frontier;
    driver_.Capture(kCapturing, &frontier);
    EXPECT_EQ(std::pair(frontier.capture, frontier.nodes), std::pair(capture_, std::vector{node_}));
    std::vector<GraphNode> nodes;
    EXPECT_FALSE(driver_.Dependencies(node_, &nodes)) << "it does not wait";
    EXPECT_EQ(nodes, std::vector{first_});
    host_.HoldEvents(true);
    const Event event = driver_.RecordEvent(kStream);
    EXPECT_FALSE(driver_.EventDone(event));
    driver_.WaitEvent(StreamId{9}, event);
    EXPECT_EQ(host_.waits().back(), (HostDriver::Wait{StreamId{9}, kStream}));
    driver_.DestroyEvent(event);
    host_.graphs().End(std::exchange(capture_, kNoCapture));
    driver_.DestroyEvent(driver_.RecordDeviceEvent());
    const MemoryInfo info = driver_.Info();
    EXPECT_EQ(info.free_bytes, host_.Info().free_bytes);
    driver_.Quiesce();
    driver_.Unmap(address + kPage, 2 * kPage);
    driver_.Release(handle);
    driver_.FreeAddresses(address, 4 * kPage);
    EXPECT_EQ(host_.usage(), HostUsage{});
  }

  HostDriver host_{{.device = 2, .granularity = kPage, .map_memory = false}};
  FaultyDriver driver_{host_};
  CaptureId capture_ = kNoCapture;
  GraphNode first_{};
  GraphNode node_{};
};

TEST_F(FaultyDriverTest, FailsEachCallBeforeTheInnerDriverHearsOfItOnceOrForGood) {
  CallEverything();
  const std::vector<DriverCall> all = driver_.calls();
  for (uint64_t number = 1; number <= 2 * all.size(); ++number) {
    const uint64_t nth = (number + 1) / 2;
    const bool for_good = number % 2 == 0;
    driver_.Arm({.call_number = nth, .for_good = for_good});
    const DriverCall failing = all[nth - 1];
    const CallCounts before = host_.calls();
    std::string call;
    try {
      CallEverything();
    } catch (const DriverError& error) {
      call = error.call();
      EXPECT_EQ(error.status(), DriverStatus::kFailed);
      EXPECT_EQ(error.device(), 2);
      EXPECT_NE(std::string(error.what()).find("as call " + std::to_string(nth)), std::string::npos)
          << error.what();
    }
    EXPECT_EQ(call, Name(failing));
    EXPECT_EQ(host_.calls()[failing], before[failing]);
    EXPECT_EQ(driver_.call_count(), nth);
    if (for_good) {
      EXPECT_THROW(driver_.Info(), DriverError);
    } else {
      driver_.Info();
    }
    EXPECT_EQ(driver_.failures(), for_good ? 2U : 1U);
  }
  driver_.Disarm();
  EXPECT_EQ(driver_.call_count() + driver_.failures(), 0U);
  driver_.Info();
}

}  // namespace
}  // namespace cgp
