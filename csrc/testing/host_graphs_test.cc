#include "testing/host_graphs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "testing/host_driver.h"

namespace cgp {
namespace {

using ::testing::IsEmpty;
using LaunchKind = HostGraphs::LaunchKind;

constexpr StreamId kA{1};
constexpr StreamId kB{2};
constexpr StreamId kC{3};

class HostGraphsTest : public ::testing::Test {
 protected:
  Frontier At(StreamId stream) const {
    Frontier frontier{.capture = 99, .nodes = {GraphNode{99}}, .waits = false};
    graphs_.Capture(stream, &frontier);
    return frontier;
  }
  void ExpectNotCapturing(StreamId stream) const {
    const Frontier frontier = At(stream);
    EXPECT_EQ(frontier.capture, kNoCapture);
    EXPECT_THAT(frontier.nodes, IsEmpty());
    EXPECT_TRUE(frontier.waits);
  }

  HostGraphs graphs_;
};

TEST_F(HostGraphsTest, OfAnInvalidatedCaptureNothingIsTold) {
  const CaptureId capture = graphs_.Begin(kA);
  graphs_.Launch(kA);
  const Frontier point = graphs_.Record(kA);
  graphs_.Wait(kB, point);
  graphs_.Begin(kC);
  graphs_.Invalidate(capture);
  ExpectNotCapturing(kA);
  ExpectNotCapturing(kB);
  EXPECT_NE(At(kC).capture, kNoCapture);
  EXPECT_THROW(graphs_.Launch(kB), UsageError);
  EXPECT_THROW(graphs_.Record(kB), UsageError);
  EXPECT_THROW(graphs_.Wait(kB, point), UsageError);
  EXPECT_THROW(graphs_.Wait(StreamId{4}, point), UsageError);
  EXPECT_THROW(graphs_.Begin(kA), UsageError) << "the stream is not free before the capture ends";
  graphs_.End(capture);
  EXPECT_NE(graphs_.Begin(kA), capture);
}

}  // namespace
}  // namespace cgp
