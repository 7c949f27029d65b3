#include "testing/driver_watch.h"

#include <gtest/gtest.h>

#include "driver/host_driver.h"

namespace cgp {
namespace {

constexpr StreamId kA{1};
constexpr StreamId kB{2};

class DriverWatchTest : public ::testing::Test {
 protected:
  HostDriver host_{{.granularity = 4096, .map_memory = false}};
  DriverWatch watch_{host_};
};

TEST_F(DriverWatchTest, WhatFollowsAWaitIsDoneBehindTheMark) {
  const uint64_t before = watch_.Submit(kA);
  const Event event = watch_.RecordEvent(kA);
  const uint64_t after = watch_.Submit(kA);
  watch_.WaitEvent(kB, event);
  watch_.DestroyEvent(event);
  const uint64_t waiting = watch_.Submit(kB);
  watch_.Finish(kB, waiting);
  EXPECT_TRUE(watch_.Done(kA, before));
  EXPECT_FALSE(watch_.Done(kA, after));
  EXPECT_TRUE(watch_.violations().empty());
}

TEST_F(DriverWatchTest, AStreamThatCapturesMustNotWait) {
  const Event event = watch_.RecordEvent(kA);
  host_.graphs().Begin(kB);
  watch_.WaitEvent(kB, event);
  EXPECT_EQ(watch_.violations().size(), 1u);
  watch_.DestroyEvent(event);
  watch_.WaitEvent(kA, event);
  EXPECT_EQ(watch_.violations().size(), 2u) << "the event is gone";
}

}  // namespace
}  // namespace cgp
