#include "testing/faulty_driver.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "driver/host_driver.h"

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

TEST_F(FaultyDriverTest, PassesEverythingThrough) {
  EXPECT_EQ(driver_.device(), 2);
  EXPECT_EQ(driver_.granularity(), kPage);
  CallEverything();
  const std::vector<DriverCall> calls = driver_.calls();
  EXPECT_EQ(calls.size(), kDriverCallKinds - 1) << "all but DestroyEvent(), which cannot fail";
  EXPECT_EQ(std::set(calls.begin(), calls.end()).size(), calls.size());
  EXPECT_EQ(host_.calls()[DriverCall::kDestroyEvent], 2u);
  // Errors of the inner driver come through as they are.
  try {
    driver_.Unmap(kPage, kPage);
    FAIL();
  } catch (const DriverError& error) {
    EXPECT_EQ(error.call(), "HostDriver::Unmap");
  }
}

TEST_F(FaultyDriverTest, FailsEachCallOnceBeforeTheInnerDriverHearsOfIt) {
  CallEverything();
  const std::vector<DriverCall> all = driver_.calls();
  for (uint64_t number = 1; number <= all.size(); ++number) {
    driver_.Arm({.call_number = number});
    const DriverCall failing = all[number - 1];
    const CallCounts before = host_.calls();
    std::string call;
    try {
      CallEverything();
    } catch (const DriverError& error) {
      call = error.call();
      EXPECT_EQ(error.status(), DriverStatus::kFailed);
      EXPECT_EQ(error.device(), 2);
      EXPECT_NE(std::string(error.what()).find("as call " + std::to_string(number)),
                std::string::npos)
          << error.what();
    }
    EXPECT_EQ(call, Name(failing));
    EXPECT_EQ(host_.calls()[failing], before[failing]);
    EXPECT_EQ(driver_.call_count(), number);
    driver_.Info();  // once only
    EXPECT_EQ(driver_.failures(), 1u);
  }
}

TEST_F(FaultyDriverTest, FailsCallsOfOneKindForGoodUntilDisarmed) {
  driver_.Arm({2, DriverStatus::kOutOfMemory, /*for_good=*/true, DriverCall::kCreate});
  driver_.Reserve(kPage);
  driver_.Create(kPage);
  for (uint64_t failures = 1; failures < 4; ++failures) {
    try {
      driver_.Create(3 * kPage);
      FAIL();
    } catch (const DriverError& error) {
      EXPECT_EQ(error.status(), DriverStatus::kOutOfMemory);
      EXPECT_EQ(error.bytes(), 3 * kPage);
      EXPECT_EQ(error.code(), 2);
    }
    driver_.Info();
    EXPECT_EQ(driver_.failures(), failures);
    EXPECT_EQ(driver_.call_count(), 2 + 2 * failures);
  }
  driver_.Disarm();
  EXPECT_EQ(driver_.failures(), 0u);
  EXPECT_TRUE(driver_.calls().empty());
  driver_.Create(kPage);
}

TEST_F(FaultyDriverTest, CountsCallsOfManyThreads) {
  driver_.Arm({.call_number = 300});
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int call = 0; call < 100; ++call) {
        try {
          driver_.Info();
        } catch (const DriverError&) {
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(driver_.call_count(), 400u);
  EXPECT_EQ(driver_.failures(), 1u);
  EXPECT_EQ(host_.calls()[DriverCall::kInfo], 399u);
}

}  // namespace
}  // namespace cgp
