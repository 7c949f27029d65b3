#include "testing/host_graphs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "core/base/error.h"
#include "testing/host_driver.h"

namespace cgp {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;
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
  std::vector<GraphNode> Before(GraphNode node) const {
    std::vector<GraphNode> nodes = {GraphNode{99}};
    graphs_.Dependencies(node, &nodes);
    return nodes;
  }
  bool Waits(GraphNode node) const {
    std::vector<GraphNode> nodes;
    return graphs_.Dependencies(node, &nodes);
  }
  void ExpectNotCapturing(StreamId stream) const {
    const Frontier frontier = At(stream);
    EXPECT_EQ(frontier.capture, kNoCapture);
    EXPECT_THAT(frontier.nodes, IsEmpty());
    EXPECT_TRUE(frontier.waits);
  }

  HostGraphs graphs_;
};

TEST_F(HostGraphsTest, OnlyAStreamThatBeganOrJoinedCaptures) {
  ExpectNotCapturing(kA);
  const CaptureId capture = graphs_.Begin(kA);
  EXPECT_NE(capture, kNoCapture);
  EXPECT_EQ(At(kA).capture, capture);
  EXPECT_THAT(At(kA).nodes, IsEmpty());
  EXPECT_TRUE(At(kA).waits);
  ExpectNotCapturing(kB);
  graphs_.Wait(kB, graphs_.Record(kA));
  EXPECT_EQ(At(kB).capture, capture);
  graphs_.End(capture);
  ExpectNotCapturing(kA);
  ExpectNotCapturing(kB);
}

TEST_F(HostGraphsTest, ANodeStandsBehindTheOneBeforeItOnItsStream) {
  graphs_.Begin(kA);
  const GraphNode first = graphs_.Launch(kA);
  EXPECT_THAT(At(kA).nodes, ElementsAre(first));
  const GraphNode second = graphs_.Launch(kA);
  EXPECT_THAT(At(kA).nodes, ElementsAre(second));
  EXPECT_THAT(Before(first), IsEmpty());
  EXPECT_THAT(Before(second), ElementsAre(first));
  EXPECT_TRUE(Waits(second));
}

TEST_F(HostGraphsTest, AStreamStandsBehindAllThatItWaitsFor) {
  graphs_.Begin(kA);
  const GraphNode root = graphs_.Launch(kA);
  const Frontier fork = graphs_.Record(kA);
  graphs_.Wait(kB, fork);
  const GraphNode a = graphs_.Launch(kA);
  const GraphNode b = graphs_.Launch(kB);
  EXPECT_THAT(Before(b), ElementsAre(root));
  const Frontier join = graphs_.Record(kB);
  const GraphNode later = graphs_.Launch(kB);
  graphs_.Wait(kA, join);
  graphs_.Wait(kA, join);
  EXPECT_THAT(At(kA).nodes, UnorderedElementsAre(a, b)) << "once each, and not what B did later";
  EXPECT_THAT(Before(graphs_.Launch(kA)), UnorderedElementsAre(a, b));
  EXPECT_THAT(At(kB).nodes, ElementsAre(later)) << "B waits for nothing";
}

TEST_F(HostGraphsTest, APointIsOneInTheStreamsPast) {
  graphs_.Begin(kA);
  const Frontier empty = graphs_.Record(kA);
  const GraphNode node = graphs_.Launch(kA);
  graphs_.Wait(kB, empty);
  EXPECT_THAT(At(kB).nodes, IsEmpty());
  graphs_.Wait(kC, graphs_.Record(kA));
  EXPECT_THAT(At(kC).nodes, ElementsAre(node));
}

TEST_F(HostGraphsTest, AProgrammaticLaunchDoesNotWait) {
  graphs_.Begin(kA);
  const GraphNode first = graphs_.Launch(kA);
  const GraphNode second = graphs_.Launch(kA, LaunchKind::kProgrammatic);
  EXPECT_FALSE(Waits(second));
  EXPECT_THAT(Before(second), ElementsAre(first));
  EXPECT_TRUE(At(kA).waits) << "who stands behind it waits for it";
  EXPECT_TRUE(Waits(graphs_.Launch(kA)));
}

TEST_F(HostGraphsTest, BehindAProgrammaticEventTheNextNodeDoesNotWait) {
  graphs_.Begin(kA);
  graphs_.Launch(kA);
  Frontier event = graphs_.Record(kA);
  EXPECT_TRUE(event.waits);
  event.waits = false;
  graphs_.Wait(kB, graphs_.Record(kA));
  graphs_.Wait(kB, event);
  graphs_.Wait(kB, graphs_.Record(kA));
  EXPECT_FALSE(At(kB).waits);
  EXPECT_FALSE(Waits(graphs_.Launch(kB)));
  EXPECT_TRUE(At(kB).waits);
  EXPECT_TRUE(Waits(graphs_.Launch(kB)));
  EXPECT_TRUE(At(kA).waits);
}

TEST_F(HostGraphsTest, CapturesHaveNothingInCommon) {
  const CaptureId one = graphs_.Begin(kA);
  const CaptureId two = graphs_.Begin(kB);
  EXPECT_NE(one, two);
  const GraphNode a = graphs_.Launch(kA);
  const GraphNode b = graphs_.Launch(kB);
  EXPECT_NE(a, b);
  EXPECT_THROW(graphs_.Wait(kB, graphs_.Record(kA)), UsageError);
  graphs_.End(one);
  ExpectNotCapturing(kA);
  EXPECT_EQ(At(kB).capture, two);
  EXPECT_THAT(At(kB).nodes, ElementsAre(b));
  EXPECT_THAT(Before(graphs_.Launch(kB)), ElementsAre(b));
}

TEST_F(HostGraphsTest, CapturesAreNeverNumberedAlikeButTheirNodesAre) {
  const CaptureId one = graphs_.Begin(kA);
  const GraphNode old = graphs_.Launch(kA);
  graphs_.End(one);
  std::vector<GraphNode> nodes;
  EXPECT_THROW(graphs_.Dependencies(old, &nodes), UsageError);
  EXPECT_NE(graphs_.Begin(kA), one);
  EXPECT_EQ(graphs_.Launch(kA), old);
  EXPECT_THAT(Before(old), IsEmpty());
}

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

TEST_F(HostGraphsTest, RefusesWhatCudaWould) {
  EXPECT_THROW(graphs_.Launch(kA), UsageError);
  EXPECT_THROW(graphs_.Record(kA), UsageError);
  EXPECT_THROW(graphs_.End(1), UsageError);
  EXPECT_THROW(graphs_.Invalidate(1), UsageError);
  EXPECT_THROW(graphs_.Wait(kA, Frontier{}), UsageError) << "a point of no capture";
  const CaptureId capture = graphs_.Begin(kA);
  EXPECT_THROW(graphs_.Begin(kA), UsageError);
  const Frontier point = graphs_.Record(kA);
  graphs_.End(capture);
  EXPECT_THROW(graphs_.Wait(kB, point), UsageError);
  EXPECT_THROW(graphs_.End(capture), UsageError);
}

TEST_F(HostGraphsTest, AreWhatTheHostDriverTellsOf) {
  HostDriver driver({.map_memory = false});
  Frontier frontier;
  driver.Capture(kA, &frontier);
  EXPECT_EQ(frontier.capture, kNoCapture);
  const CaptureId capture = driver.graphs().Begin(kA);
  const GraphNode first = driver.graphs().Launch(kA);
  const GraphNode second = driver.graphs().Launch(kA, LaunchKind::kProgrammatic);
  driver.Capture(kA, &frontier);
  EXPECT_EQ(frontier.capture, capture);
  EXPECT_THAT(frontier.nodes, ElementsAre(second));
  std::vector<GraphNode> nodes;
  EXPECT_FALSE(driver.Dependencies(second, &nodes));
  EXPECT_THAT(nodes, ElementsAre(first));
  EXPECT_TRUE(driver.Dependencies(first, &nodes));
  EXPECT_THAT(nodes, IsEmpty());
  EXPECT_EQ(driver.calls()[DriverCall::kCapture], 2U);
  EXPECT_EQ(driver.calls()[DriverCall::kDependencies], 2U);
  EXPECT_THROW(driver.Dependencies(GraphNode{1000}, &nodes), DriverError);
  EXPECT_THROW(driver.RecordEvent(kA), DriverError) << "it is capturing";
  driver.DestroyEvent(driver.RecordEvent(kB));
  driver.graphs().Invalidate(capture);
  EXPECT_THROW(driver.RecordEvent(kA), DriverError);
  driver.graphs().End(capture);
  driver.DestroyEvent(driver.RecordEvent(kA));
}

TEST_F(HostGraphsTest, AreCapturedAndAskedAfterFromManyThreads) {
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, origin = StreamId{2 * i}, other = StreamId{2 * i + 1}] {
      for (int round = 0; round < 20; ++round) {
        const CaptureId capture = graphs_.Begin(origin);
        for (int node = 0; node < 50; ++node) {
          const GraphNode before = graphs_.Launch(origin);
          graphs_.Wait(other, graphs_.Record(origin));
          EXPECT_EQ(At(other).capture, capture);
          EXPECT_THAT(Before(graphs_.Launch(other)), ::testing::Contains(before));
        }
        graphs_.End(capture);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace cgp
