// When an event on a stream that captures is recorded, and when it is done.
#include "torch/put_off_events.h"

#include <gtest/gtest.h>

#include "driver/host_driver.h"
#include "torch/fake_cuda.h"

namespace cgp {
namespace {

using fake_cuda::SetCapture;
using fake_cuda::Stream;

class PutOffEventsTest : public ::testing::Test {
 protected:
  void SetUp() override { fake_cuda::Reset(); }
  void BeginCapture() {
    SetCapture(Stream(1), 7);
    host_.BeginCapture({kStream});  // what is recorded there fails
  }
  void EndCapture() {
    SetCapture(Stream(1), 0);
    host_.EndCapture();
  }
  uint64_t Recorded() const { return host_.calls()[DriverCall::kRecordEvent]; }

  const StreamId kStream = ToStreamId(Stream(1));
  HostDriver host_{HostDriverOptions{.map_memory = false}};
  PutOffEvents events_{host_};
};

TEST_F(PutOffEventsTest, OnOtherStreamsTheyAreTheDrivers) {
  BeginCapture();
  const Event event = events_.Record(ToStreamId(Stream(2)));
  EXPECT_EQ(Recorded(), 1U);
  EXPECT_TRUE(host_.EventDone(event));
  EXPECT_TRUE(events_.Done(event));
  events_.Destroy(event);
  EXPECT_EQ(host_.usage().events, 0U);
  EndCapture();
}

TEST_F(PutOffEventsTest, TheyAreRecordedOnceTheCaptureIsOver) {
  host_.HoldEvents(true);
  BeginCapture();
  const Event event = events_.Record(kStream);
  EXPECT_FALSE(events_.Done(event));
  EXPECT_EQ(Recorded(), 0U);
  EndCapture();
  EXPECT_FALSE(events_.Done(event)) << "the stream has work yet";
  EXPECT_FALSE(events_.Done(event));
  EXPECT_EQ(Recorded(), 1U);
  host_.CompleteEvents();
  EXPECT_TRUE(events_.Done(event));
  BeginCapture();
  EXPECT_TRUE(events_.Done(event)) << "whatever the stream does now";
  EndCapture();
  events_.Destroy(event);
  EXPECT_EQ(host_.usage().events, 0U);
}

TEST_F(PutOffEventsTest, EachIsOfItsOwnStream) {
  host_.HoldEvents(true);
  BeginCapture();
  SetCapture(Stream(2), 8);
  const Event first = events_.Record(kStream), second = events_.Record(ToStreamId(Stream(2)));
  EXPECT_NE(first, second);
  EndCapture();
  EXPECT_FALSE(events_.Done(first));
  EXPECT_FALSE(events_.Done(second));
  host_.CompleteEvents(kStream);
  EXPECT_TRUE(events_.Done(first));
  EXPECT_FALSE(events_.Done(second)) << "captures";
  events_.Destroy(second);
  events_.Destroy(first);
  EXPECT_EQ(host_.usage().events, 0U);
  EXPECT_EQ(host_.unknown_events_destroyed(), 0U);
}

}  // namespace
}  // namespace cgp
