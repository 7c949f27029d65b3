// Where a stream stands in its capture, and what a node depends on: as the driver tells of it.
#include <gtest/gtest.h>

#include <vector>

#include "driver/cuda_driver.h"
#include "driver/cuda_driver_test_cuda.h"

namespace cgp {
namespace {

using namespace made_up_cuda;

// What a programmatic launch makes: it waits until the one in front lets it, or has begun.
constexpr CUgraphEdgeData kLaunchedBy = {.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC,
                                         .to_port = 0,
                                         .type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC,
                                         .reserved = {}};
constexpr CUgraphEdgeData kBegunBy = {.from_port = CU_GRAPH_KERNEL_NODE_PORT_LAUNCH_ORDER,
                                      .to_port = 0,
                                      .type = CU_GRAPH_DEPENDENCY_TYPE_DEFAULT,
                                      .reserved = {}};

TEST_F(CudaDriverTest, TellsWhereAStreamStandsInItsCapture) {
  CudaDriver driver(0, api_);
  fake_.capture_status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  fake_.capture = 17;
  fake_.nodes = {Node(1), Node(2)};
  Frontier frontier{.capture = 5, .nodes = {GraphNode{5}}, .waits = false};
  driver.Capture(kStream, &frontier);
  EXPECT_EQ(fake_.stream, reinterpret_cast<CUstream>(0x5000));
  EXPECT_EQ(frontier.capture, 17U);
  EXPECT_EQ(frontier.nodes, (std::vector{GraphNode{0x7010}, GraphNode{0x7020}}));
  EXPECT_TRUE(frontier.waits) << "edges without data are plain ones";
  fake_.edges.resize(2);
  driver.Capture(kStream, &frontier);
  EXPECT_TRUE(frontier.waits);
  EXPECT_EQ(frontier.nodes.size(), 2U);
  for (const CUgraphEdgeData& edge : {kLaunchedBy, kBegunBy}) {
    for (const size_t which : {0U, 1U}) {
      fake_.edges = std::vector<CUgraphEdgeData>(2);
      fake_.edges[which] = edge;
      driver.Capture(kStream, &frontier);
      EXPECT_FALSE(frontier.waits);
      EXPECT_EQ(frontier.nodes.size(), 2U);
    }
  }
  fake_.nodes.clear();
  fake_.edges.clear();
  driver.Capture(kStream, &frontier);
  EXPECT_EQ(frontier.capture, 17U);
  EXPECT_TRUE(frontier.nodes.empty());
  EXPECT_TRUE(frontier.waits);
}

TEST_F(CudaDriverTest, AStreamThatDoesNotCaptureStandsNowhere) {
  CudaDriver driver(0, api_);
  const auto expect_nowhere = [&](bool held) {
    Frontier frontier{.capture = 5, .nodes = {GraphNode{5}}, .waits = false, .held = !held};
    driver.Capture(kStream, &frontier);
    EXPECT_EQ(frontier.capture, kNoCapture);
    EXPECT_TRUE(frontier.nodes.empty());
    EXPECT_TRUE(frontier.waits);
    EXPECT_EQ(frontier.held, held);
  };
  fake_.capture = 17;
  fake_.nodes = {Node(1)};
  expect_nowhere(/*held=*/false);
  fake_.capture_status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
  expect_nowhere(/*held=*/true);
  // What is said of the legacy stream while a blocking one captures: events would break that.
  fake_.capture_status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  fake_.failing = {{"cuStreamGetCaptureInfo", CUDA_ERROR_STREAM_CAPTURE_IMPLICIT}};
  expect_nowhere(/*held=*/true);
  EXPECT_TRUE(contexts.empty());
}

TEST_F(CudaDriverTest, TellsAllThatANodeDependsOn) {
  CudaDriver driver(0, api_);
  for (const size_t count : {0U, 1U, 2U, 7U, 8U, 9U, 15U, 16U, 17U, 100U}) {
    fake_.nodes.clear();
    std::vector<GraphNode> expected;
    for (uint64_t i = 0; i < count; ++i) {
      fake_.nodes.push_back(Node(i));
      expected.push_back(GraphNode{0x7000 + 16 * i});
    }
    std::vector<GraphNode> nodes = {GraphNode{5}};
    fake_.edges.clear();
    EXPECT_TRUE(driver.Dependencies(GraphNode{0x8000}, &nodes)) << count;
    EXPECT_EQ(fake_.node, reinterpret_cast<CUgraphNode>(0x8000));
    EXPECT_EQ(nodes, expected);
    fake_.edges.resize(count);
    EXPECT_TRUE(driver.Dependencies(GraphNode{0x8000}, &nodes)) << count;
    // Any one of the edges makes the difference.
    for (size_t i = 0; i < count; ++i) {
      fake_.edges[i] = i % 2 == 0 ? kLaunchedBy : kBegunBy;
      EXPECT_FALSE(driver.Dependencies(GraphNode{0x8000}, &nodes)) << i << " of " << count;
      EXPECT_EQ(nodes, expected);
      fake_.edges[i] = {};
    }
  }
}

}  // namespace
}  // namespace cgp
