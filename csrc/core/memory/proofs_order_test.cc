#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <new>
#include <random>
#include <set>
#include <vector>

#include "core/base/units.h"
#include "core/memory/proofs.h"
#include "driver/faulty_driver.h"
#include "testing/allocation_faults.h"
#include "testing/host_driver.h"

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

std::vector<GraphOrder::Step> Steps(GraphOrder& order, GraphOrder::Reach& reach,
                                    const Frontier& frontier) {
  std::vector<GraphOrder::Step> steps;
  order.Advance(reach, frontier, &steps);
  return steps;
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
    const GraphOrder::Reach old = reach;
    const std::vector<GraphOrder::Step> steps = Steps(order_, reach, frontier);
    std::vector<GraphNode> news;
    for (const GraphNode node : launched_) {
      const PathPosition position = order_.PositionOf(capture_, node);
      const bool is_new = reach.Contains(position) && !old.Contains(position);
      if (is_new) news.push_back(node);
      const auto tells = std::ranges::count_if(steps, [&](const GraphOrder::Step& step) {
        return step.path == position.path && step.before <= position.index &&
               reach.Contains(position);
      });
      EXPECT_EQ(is_new, tells > 0);
    }
    return news;
  }
  bool Reaches(const GraphOrder::Reach& reach, GraphNode node) {
    return reach.Contains(order_.PositionOf(capture_, node));
  }

  HostDriver host_{{.granularity = 4096, .map_memory = false}};
  FaultyDriver driver_{host_};
  HostGraphs& graphs_ = host_.graphs();
  const CaptureId capture_;
  GraphOrder order_{driver_};
  std::vector<GraphNode> launched_;
};

TEST_F(GraphOrderTest, WhatAStreamCapturesStandsOnOnePath) {
  for (uint32_t i = 0; i < 3000; ++i) Launch(kA);
  for (uint32_t i = 0; i < 3000; i += 7) {
    EXPECT_EQ(order_.PositionOf(capture_, launched_[i]), (PathPosition{PathId{0}, i}));
  }
  EXPECT_EQ(order_.path_count(), 1u);
}

// So that what a reach costs does not grow with the forks and joins of a capture.
TEST_F(GraphOrderTest, StreamsThatForkAndJoinAllTheTimeMakeAPathEach) {
  for (int i = 0; i < 100; ++i) {
    for (const StreamId stream : {kB, kC}) Join(stream, kA);
    for (const StreamId stream : {kA, kB, kC}) Launch(stream);
    for (const StreamId stream : {kB, kC}) Join(kA, stream);
    if (i % 2 == 0) Launch(kA);
    order_.PositionOf(capture_, graphs_.Record(i % 3 == 0 ? kA : kB).nodes.front());
  }
  EXPECT_LE(order_.path_count(), 3u);
}

TEST_F(GraphOrderTest, AStreamThatHasCapturedNothingReachesNothing) {
  GraphOrder::Reach reach;
  EXPECT_THAT(Advance(reach, kA), IsEmpty());
  EXPECT_THAT(Advance(reach, Frontier{}), IsEmpty()) << "nor does one that is not capturing";
  EXPECT_FALSE(reach.Contains({PathId{0}, 0}));
  EXPECT_FALSE(reach.Contains({PathId{1000000}, 1000000}));
}

TEST_F(GraphOrderTest, ReachesAPathToItsBeginning) {
  const GraphNode first = Launch(kA);
  const GraphNode second = Launch(kA);
  const GraphNode third = Launch(kA);
  GraphOrder::Reach reach;
  EXPECT_THAT(Advance(reach, kA), UnorderedElementsAre(first, second, third));
  EXPECT_THAT(Advance(reach, kA), IsEmpty()) << "each node is news once";
  const GraphNode fourth = Launch(kA);
  EXPECT_THAT(Advance(reach, kA), ElementsAre(fourth));
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
      Steps(order_, reaches[static_cast<std::size_t>(stream) - 1], graphs_.Record(stream));
    }
  }
  for (const GraphNode node : launched_) EXPECT_TRUE(Reaches(reaches[0], node));
  EXPECT_THAT(driver_.calls(), Each(DriverCall::kDependencies));
  EXPECT_EQ(driver_.call_count(), kNodes);
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
  EXPECT_FALSE(early.stopped);
  EXPECT_THAT(Advance(early, kA), IsEmpty());
  EXPECT_TRUE(early.stopped);
  EXPECT_TRUE(late.stopped);
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
  EXPECT_FALSE(of_b.stopped);
  EXPECT_THAT(Advance(of_b, kB), IsEmpty());
  EXPECT_TRUE(of_b.stopped);
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
  EXPECT_TRUE(reach.stopped);
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
  // Whichever of the calls fails.
  for (std::size_t failures = 0; failures < news.size(); ++failures) {
    GraphOrder order(driver_);
    GraphOrder::Reach fresh;
    driver_.Arm({.call_number = failures + 1, .only = DriverCall::kDependencies});
    EXPECT_THROW(Steps(order, fresh, graphs_.Record(kA)), DriverError);
    driver_.Disarm();
    for (const GraphNode node : launched_) {
      EXPECT_FALSE(fresh.Contains(order.PositionOf(capture_, node)));
    }
    Steps(order, fresh, graphs_.Record(kA));
    for (const GraphNode node : launched_) {
      EXPECT_TRUE(fresh.Contains(order.PositionOf(capture_, node)));
    }

    driver_.Arm({.call_number = 1, .only = DriverCall::kDependencies});
    EXPECT_THROW(Advance(reach, kA), DriverError);
    driver_.Disarm();
    EXPECT_TRUE(Reaches(reach, old));
  }
  EXPECT_THAT(Advance(reach, kA), testing::UnorderedElementsAreArray(news));
}

// Whichever allocation fails: a node that was not met leaves none of what it depends on to the one
// that takes its place on the path.
TEST_F(GraphOrderTest, ANodeThatWasNotMetLeavesNothingToTheNext) {
  Join(kB, kA);
  const GraphNode a = Launch(kA);
  const GraphNode b = Launch(kB);
  Join(kC, kA);
  Launch(kC);
  Join(kA, kB);
  const GraphNode join = Launch(kA);
  for (uint64_t number = 1; number > 0; ++number) {
    GraphOrder order(driver_);
    for (const GraphNode node : {a, b}) order.PositionOf(capture_, node);
    try {
      const AllocationFault fault(number);
      order.PositionOf(capture_, join);
      EXPECT_GT(number, 1u);
      return;
    } catch (const std::bad_alloc&) {
    }
    GraphOrder::Reach of_c;
    Steps(order, of_c, graphs_.Record(kC));
    EXPECT_TRUE(of_c.Contains(order.PositionOf(capture_, a)));
    EXPECT_FALSE(of_c.Contains(order.PositionOf(capture_, b))) << "allocation " << number;
  }
}

TEST_F(GraphOrderTest, ClearForgetsAllNodes) {
  Launch(kA);
  const GraphNode last = Launch(kA);
  GraphOrder::Reach reach;
  Advance(reach, kA);
  order_.Clear();
  EXPECT_EQ(order_.path_count(), 0u);
  driver_.Disarm();
  EXPECT_EQ(order_.PositionOf(capture_, last), (PathPosition{PathId{0}, 1}));
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
    for (const GraphNode node : Advance(reaches_[stream], frontier)) {
      ASSERT_TRUE(news_[stream].insert(node).second) << "news twice";
    }
    ASSERT_EQ(news_[stream], expected_[stream]);
  }

  static constexpr uint32_t kStreams = 5;
  std::mt19937 random_{GetParam()};
  std::map<GraphNode, std::set<GraphNode>> before_;
  std::map<StreamId, std::set<GraphNode>> expected_;
  std::map<StreamId, std::set<GraphNode>> news_;
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
