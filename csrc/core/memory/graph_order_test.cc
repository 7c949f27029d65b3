#include "core/memory/graph_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <vector>

#include "core/base/units.h"
#include "driver/host_driver.h"
#include "testing/faulty_driver.h"

namespace cgp {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr StreamId kA{1};
constexpr StreamId kB{2};
constexpr StreamId kC{3};
constexpr auto kProgrammatic = HostGraphs::LaunchKind::kProgrammatic;

std::vector<NodeNumber> News(GraphOrder& order, GraphOrder::Reach& reach,
                             const Frontier& frontier) {
  std::vector<NodeNumber> news;
  order.Advance(reach, frontier, &news);
  return news;
}

class GraphOrderTest : public ::testing::Test {
 protected:
  GraphOrderTest() : capture_(graphs_.Begin(kA)) {}

  GraphNode Launch(StreamId stream, HostGraphs::LaunchKind kind = HostGraphs::LaunchKind::kPlain) {
    launched_.push_back(graphs_.Launch(stream, kind));
    return launched_.back();
  }
  void Join(StreamId stream, StreamId other) { graphs_.Wait(stream, graphs_.Record(other)); }

  // What the stream newly reaches where it stands now.
  std::vector<GraphNode> Advance(GraphOrder::Reach& reach, StreamId stream) {
    return Advance(reach, graphs_.Record(stream));
  }
  std::vector<GraphNode> Advance(GraphOrder::Reach& reach, const Frontier& frontier) {
    std::vector<GraphNode> nodes;
    for (const NodeNumber number : News(order_, reach, frontier)) {
      for (const GraphNode node : launched_) {
        if (order_.NumberOf(capture_, node) == number) nodes.push_back(node);
      }
    }
    return nodes;
  }
  bool Reaches(const GraphOrder::Reach& reach, GraphNode node) {
    return reach.Contains(order_.NumberOf(capture_, node));
  }

  HostDriver host_{{.granularity = 4096, .map_memory = false}};
  FaultyDriver driver_{host_};
  HostGraphs& graphs_ = host_.graphs();
  const CaptureId capture_;
  GraphOrder order_{driver_};
  std::vector<GraphNode> launched_;
};

TEST_F(GraphOrderTest, NodesAreNumberedAsTheyAreMet) {
  EXPECT_EQ(order_.node_count(), 0u);
  for (uint32_t i = 0; i < 3000; ++i) {
    EXPECT_EQ(order_.NumberOf(capture_, GraphNode{7000 - 2 * i}), NodeNumber{i});
  }
  EXPECT_EQ(order_.node_count(), 3000u);
  for (uint32_t i = 0; i < 3000; ++i) {
    EXPECT_EQ(order_.NumberOf(capture_, GraphNode{7000 - 2 * i}), NodeNumber{i}) << "met before";
  }
  EXPECT_EQ(order_.node_count(), 3000u);
  EXPECT_THAT(driver_.calls(), IsEmpty());
}

TEST_F(GraphOrderTest, AStreamThatHasCapturedNothingReachesNothing) {
  GraphOrder::Reach reach;
  EXPECT_THAT(Advance(reach, kA), IsEmpty());
  EXPECT_THAT(News(order_, reach, Frontier{}), IsEmpty()) << "nor does one that is not capturing";
  EXPECT_FALSE(reach.Contains(NodeNumber{0}));
  EXPECT_FALSE(reach.Contains(NodeNumber{1000000}));
}

TEST_F(GraphOrderTest, ReachesAChainToItsBeginning) {
  const GraphNode first = Launch(kA);
  const GraphNode second = Launch(kA);
  const GraphNode third = Launch(kA);
  GraphOrder::Reach reach;
  EXPECT_THAT(Advance(reach, kA), UnorderedElementsAre(first, second, third));
  EXPECT_THAT(Advance(reach, kA), IsEmpty()) << "each node is news once";
  const GraphNode fourth = Launch(kA);
  EXPECT_THAT(Advance(reach, kA), ElementsAre(fourth));
  for (const GraphNode node : launched_) EXPECT_TRUE(Reaches(reach, node));
}

TEST_F(GraphOrderTest, ABranchDoesNotReachWhatTheOtherCapturesAfterTheFork) {
  const GraphNode root = Launch(kA);
  Join(kB, kA);
  const GraphNode a = Launch(kA);
  const GraphNode b = Launch(kB);
  GraphOrder::Reach of_a;
  GraphOrder::Reach of_b;
  EXPECT_THAT(Advance(of_a, kA), UnorderedElementsAre(root, a));
  EXPECT_THAT(Advance(of_b, kB), UnorderedElementsAre(root, b));
  EXPECT_FALSE(Reaches(of_a, b));
  EXPECT_FALSE(Reaches(of_b, a));
}

TEST_F(GraphOrderTest, AStreamStandsBehindAnEventAsSoonAsItWaits) {
  Launch(kA);
  Join(kB, kA);
  GraphOrder::Reach of_a;
  Advance(of_a, kA);
  const GraphNode b1 = Launch(kB);
  const GraphNode b2 = Launch(kB);
  Join(kA, kB);
  EXPECT_THAT(Advance(of_a, kA), UnorderedElementsAre(b1, b2)) << "before it captures anything";
  const GraphNode b3 = Launch(kB);
  EXPECT_THAT(Advance(of_a, kA), IsEmpty());
  EXPECT_FALSE(Reaches(of_a, b3)) << "captured after the event";
}

TEST_F(GraphOrderTest, AJoinReachesEveryPredecessor) {
  const GraphNode a = Launch(kA);
  const GraphNode a2 = Launch(kA);
  graphs_.Wait(kB, Frontier{.capture = graphs_.Record(kA).capture, .nodes = {}});
  graphs_.Wait(kC, Frontier{.capture = graphs_.Record(kA).capture, .nodes = {}});
  const GraphNode b = Launch(kB);
  const GraphNode c = Launch(kC);
  Join(kA, kB);
  Join(kA, kC);
  const GraphNode join = Launch(kA);
  GraphOrder::Reach reach;
  EXPECT_THAT(Advance(reach, kA), UnorderedElementsAre(join, a2, a, b, c));
}

TEST_F(GraphOrderTest, ADiamondsNodesAreNewsOnce) {
  const GraphNode root = Launch(kA);
  Join(kB, kA);
  const GraphNode left = Launch(kA);
  const GraphNode right = Launch(kB);
  Join(kA, kB);
  const GraphNode end = Launch(kA);
  GraphOrder::Reach reach;
  EXPECT_THAT(Advance(reach, kA), UnorderedElementsAre(end, left, right, root));
}

// However many streams ask, and however often.
TEST_F(GraphOrderTest, ANodeIsAskedOnceWhatItDependsOn) {
  GraphOrder::Reach reaches[3];
  graphs_.Wait(kB, graphs_.Record(kA));
  graphs_.Wait(kC, graphs_.Record(kA));
  constexpr uint64_t kNodes = 300;
  for (uint64_t i = 0; i < kNodes; i += 3) {
    for (const StreamId stream : {kA, kB, kC}) Launch(stream);
    Join(kB, kA);
    Join(kC, kB);
    Join(kA, kC);
    for (const StreamId stream : {kA, kB, kC}) {
      News(order_, reaches[Index(stream) - 1], graphs_.Record(stream));
    }
  }
  EXPECT_EQ(order_.node_count(), kNodes);
  EXPECT_THAT(driver_.calls(), Each(DriverCall::kDependencies));
  EXPECT_EQ(driver_.call_count(), kNodes);
  for (uint32_t i = 0; i < kNodes; ++i) EXPECT_TRUE(reaches[0].Contains(NodeNumber{i}));
}

// A launch that does not wait may end before what stands in front of it is complete, and so may all
// that comes after it.
TEST_F(GraphOrderTest, AProgrammaticEdgeEmptiesTheReachForGood) {
  const GraphNode before = Launch(kA);
  GraphOrder::Reach early;
  EXPECT_THAT(Advance(early, kA), ElementsAre(before));
  const GraphNode node = Launch(kA, kProgrammatic);
  GraphOrder::Reach late;
  EXPECT_THAT(Advance(late, kA), IsEmpty());
  EXPECT_TRUE(Reaches(early, before)) << "it has not been told yet";
  EXPECT_FALSE(early.stopped());
  EXPECT_THAT(Advance(early, kA), IsEmpty());
  EXPECT_TRUE(early.stopped());
  EXPECT_TRUE(late.stopped());
  const GraphNode behind = Launch(kA);
  for (GraphOrder::Reach* const reach : {&early, &late}) {
    EXPECT_THAT(Advance(*reach, kA), IsEmpty());
    for (const GraphNode one : {before, node, behind}) EXPECT_FALSE(Reaches(*reach, one));
  }
}

TEST_F(GraphOrderTest, AProgrammaticEdgeStopsOnlyThoseBehindIt) {
  Join(kB, kA);
  Launch(kA);
  Launch(kA, kProgrammatic);
  const GraphNode b = Launch(kB);
  GraphOrder::Reach of_a;
  GraphOrder::Reach of_b;
  EXPECT_THAT(Advance(of_a, kA), IsEmpty());
  EXPECT_THAT(Advance(of_b, kB), ElementsAre(b));
  Join(kB, kA);
  Launch(kB);
  EXPECT_FALSE(of_b.stopped());
  EXPECT_THAT(Advance(of_b, kB), IsEmpty());
  EXPECT_TRUE(of_b.stopped());
  EXPECT_FALSE(Reaches(of_b, b));
}

// Somewhere behind a join, on whichever of the branches.
TEST_F(GraphOrderTest, WhatASearchFoundBeforeItMetAProgrammaticEdgeIsNotReached) {
  Join(kB, kA);
  const GraphNode a = Launch(kA);
  const GraphNode b = Launch(kB);
  Launch(kB, kProgrammatic);
  Join(kA, kB);
  const GraphNode join = Launch(kA);
  GraphOrder::Reach reach;
  EXPECT_THAT(Advance(reach, kA), IsEmpty());
  for (const GraphNode node : {a, b, join}) EXPECT_FALSE(Reaches(reach, node));
}

// What comes next will not wait for the frontier: a programmatic event was waited for.
TEST_F(GraphOrderTest, SoDoesAProgrammaticFrontier) {
  const GraphNode node = Launch(kA);
  GraphOrder::Reach reach;
  Frontier frontier = graphs_.Record(kA);
  EXPECT_THAT(Advance(reach, frontier), ElementsAre(node));
  frontier.waits = false;
  EXPECT_THAT(Advance(reach, frontier), IsEmpty());
  EXPECT_TRUE(reach.stopped());
  EXPECT_FALSE(Reaches(reach, node));
  frontier.waits = true;
  EXPECT_THAT(Advance(reach, frontier), IsEmpty());
}

TEST_F(GraphOrderTest, AFailingDriverLeavesTheReachAsItWas) {
  const GraphNode old = Launch(kA);
  GraphOrder::Reach reach;
  Advance(reach, kA);
  std::vector<GraphNode> news;
  for (int i = 0; i < 4; ++i) {
    Join(kB, kA);
    news.push_back(Launch(kA));
    news.push_back(Launch(kB));
    Join(kA, kB);
  }
  // What a call before the failing one has said is known when it is tried again: each time the
  // first call fails is a call further.
  for (std::size_t failures = 0; failures < news.size(); ++failures) {
    GraphOrder order(driver_);
    GraphOrder::Reach fresh;
    driver_.Arm({.call_number = failures + 1, .only = DriverCall::kDependencies});
    EXPECT_THROW(News(order, fresh, graphs_.Record(kA)), DriverError);
    for (uint32_t i = 0; i < order.node_count(); ++i) EXPECT_FALSE(fresh.Contains(NodeNumber{i}));
    driver_.Disarm();
    EXPECT_THAT(News(order, fresh, graphs_.Record(kA)), testing::SizeIs(news.size() + 1));
    EXPECT_EQ(driver_.call_count(), news.size() + 1 - failures) << "what is known is not asked";

    driver_.Arm({.call_number = 1, .only = DriverCall::kDependencies});
    EXPECT_THROW(Advance(reach, kA), DriverError);
    EXPECT_TRUE(Reaches(reach, old));
    for (const GraphNode node : news) EXPECT_FALSE(Reaches(reach, node));
  }
  driver_.Disarm();
  EXPECT_THAT(Advance(reach, kA), testing::UnorderedElementsAreArray(news));
}

TEST_F(GraphOrderTest, ClearForgetsAllNodes) {
  Launch(kA);
  const GraphNode last = Launch(kA);
  GraphOrder::Reach reach;
  Advance(reach, kA);
  order_.Clear();
  EXPECT_EQ(order_.node_count(), 0u);
  EXPECT_EQ(order_.NumberOf(capture_, last), NodeNumber{0});
  driver_.Disarm();
  GraphOrder::Reach later;
  EXPECT_THAT(News(order_, later, graphs_.Record(kA)), testing::SizeIs(2));
  EXPECT_EQ(driver_.call_count(), 2u) << "what they depended on is forgotten too";
}

// Random forks, joins and launches on a few streams, each asked at random times, against the
// closure of all edges.
class GraphOrderAgainstClosure : public GraphOrderTest,
                                 public ::testing::WithParamInterface<uint32_t> {
 protected:
  uint32_t Below(uint32_t limit) { return static_cast<uint32_t>(random_() % limit); }
  StreamId AnyStream() { return StreamId{1 + Below(kStreams)}; }

  void LaunchSomewhere() {
    const StreamId stream = AnyStream();
    const Frontier frontier = graphs_.Record(stream);
    std::set<GraphNode> before(frontier.nodes.begin(), frontier.nodes.end());
    for (const GraphNode node : frontier.nodes) {
      before.insert(before_[node].begin(), before_[node].end());
    }
    before_[Launch(stream)] = before;
  }

  void ExpectReach(StreamId stream) {
    const Frontier frontier = graphs_.Record(stream);
    for (const GraphNode node : frontier.nodes) {
      expected_[stream].insert(node);
      expected_[stream].insert(before_[node].begin(), before_[node].end());
    }
    for (const NodeNumber number : News(order_, reaches_[stream], frontier)) {
      ASSERT_TRUE(news_[stream].insert(number).second) << "news twice";
    }
    for (const GraphNode node : launched_) {
      const bool reached = expected_[stream].contains(node);
      ASSERT_EQ(Reaches(reaches_[stream], node), reached);
      ASSERT_EQ(news_[stream].contains(order_.NumberOf(capture_, node)), reached);
    }
  }

  static constexpr uint32_t kStreams = 5;
  std::mt19937 random_{GetParam()};
  std::map<GraphNode, std::set<GraphNode>> before_;
  std::map<StreamId, std::set<GraphNode>> expected_;
  std::map<StreamId, std::set<NodeNumber>> news_;
  std::map<StreamId, GraphOrder::Reach> reaches_;
};

TEST_P(GraphOrderAgainstClosure, RandomGraphs) {
  for (uint32_t s = 2; s <= kStreams; ++s) Join(StreamId{s}, kA);
  std::vector<Frontier> events;
  for (int step = 0; step < 300; ++step) {
    const uint32_t choice = Below(10);
    if (choice < 5) {
      LaunchSomewhere();
    } else if (choice < 6) {
      events.push_back(graphs_.Record(AnyStream()));
    } else if (choice < 8 && !events.empty()) {
      graphs_.Wait(AnyStream(), events[Below(static_cast<uint32_t>(events.size()))]);
    } else {
      ExpectReach(AnyStream());
    }
    if (HasFatalFailure()) FAIL() << "at step " << step;
  }
  EXPECT_LE(driver_.call_count(), launched_.size());
}

INSTANTIATE_TEST_SUITE_P(Seeds, GraphOrderAgainstClosure, ::testing::Range(0u, 20u));

}  // namespace
}  // namespace cgp
