#include "testing/capture_dag.h"

#include <gtest/gtest.h>

#include <vector>

namespace cgp {
namespace {

constexpr StreamId kA{1};
constexpr StreamId kB{2};

class CaptureDagTest : public ::testing::Test {
 protected:
  CaptureDagTest() {
    dag_.Begin(kA, 1);
    root_ = dag_.LaunchNothing(kA, false);
    dag_.Wait(kB, dag_.At(kA));
    a_ = dag_.LaunchNothing(kA, false);
    b_ = dag_.LaunchNothing(kB, false);
  }

  // Of one word.
  Kernel Touch(uint64_t word, bool writes) {
    const auto address = reinterpret_cast<Address>(&memory_);
    return {.block = {.address = address, .bytes = 8, .requested_bytes = 8, .stream = kA},
            .word = word,
            .writes = writes};
  }

  uint64_t memory_ = 0;
  CaptureDag dag_;
  CaptureDag::Node root_ = 0;
  CaptureDag::Node a_ = 0;
  CaptureDag::Node b_ = 0;
};

TEST_F(CaptureDagTest, AStreamIsBehindWhatItAndItsForkDid) {
  EXPECT_TRUE(dag_.RunsBehind(kB, {root_, b_}));
  EXPECT_TRUE(dag_.ProvesBehind(kB, {root_, b_}));
  EXPECT_FALSE(dag_.RunsBehind(kB, {a_}));
  EXPECT_FALSE(dag_.ProvesBehind(kB, {root_, a_}));
  dag_.Wait(kB, dag_.At(kA));
  EXPECT_TRUE(dag_.RunsBehind(kB, {a_, b_}));
  EXPECT_TRUE(dag_.ProvesBehind(kB, {a_, b_}));
  EXPECT_FALSE(dag_.RunsBehind(kA, {b_}));
  EXPECT_FALSE(dag_.LastRunsBehind(kB, {a_})) << "it has launched nothing since";
  dag_.LaunchNothing(kB, false);
  EXPECT_TRUE(dag_.LastRunsBehind(kB, {a_}));
}

TEST_F(CaptureDagTest, AProgrammaticNodeIsBehindItsOwnStreamOnlyAndProvesNothing) {
  dag_.Wait(kB, dag_.At(kA));
  const CaptureDag::Node early = dag_.LaunchNothing(kB, true);
  EXPECT_TRUE(dag_.RunsBehind(kB, {root_, b_, early}));
  EXPECT_FALSE(dag_.RunsBehind(kB, {a_}));
  EXPECT_FALSE(dag_.ProvesBehind(kB, {early}));
  const CaptureDag::Node later = dag_.LaunchNothing(kB, false);
  EXPECT_TRUE(dag_.RunsBehind(kB, {early, later, b_}));
  EXPECT_FALSE(dag_.RunsBehind(kB, {a_}));
  EXPECT_FALSE(dag_.ProvesBehind(kB, {later}));
  dag_.Wait(kA, dag_.At(kB));
  EXPECT_FALSE(dag_.ProvesBehind(kA, {a_})) << "nor to whoever stands behind it";
}

TEST_F(CaptureDagTest, WhatWaitsForAProgrammaticEventWaitsForNothing) {
  CaptureDag::Point event = dag_.At(kA);
  event.waits = false;
  dag_.Wait(kB, event);
  EXPECT_FALSE(dag_.RunsBehind(kB, {a_}));
  EXPECT_TRUE(dag_.RunsBehind(kB, {b_}));
  EXPECT_FALSE(dag_.ProvesBehind(kB, {b_}));
}

TEST_F(CaptureDagTest, RunsTheMostUrgentNodeThatIsReady) {
  const CaptureDag::Node first = dag_.Launch(kA, Touch(7, true));
  const CaptureDag::Node second = dag_.Launch(kB, Touch(7, false));
  std::vector<uint64_t> urgency(dag_.size(), 5);
  EXPECT_EQ(dag_.Run(0, dag_.size(), urgency), second) << "as late captured, as soon run";
  urgency[second] = 0;
  EXPECT_EQ(dag_.Run(0, dag_.size(), urgency), std::nullopt);
  dag_.Wait(kA, dag_.At(kB));
  const CaptureDag::Node third = dag_.Launch(kA, Touch(8, true));
  urgency = {5, 5, 5, 0, 5, 9};
  ASSERT_EQ(third, 5U);
  memory_ = 7;
  EXPECT_EQ(dag_.Run(0, dag_.size(), urgency), std::nullopt) << "the edges come first";
  EXPECT_EQ(memory_, 8U);
  EXPECT_LT(first, second);
}

TEST_F(CaptureDagTest, EndedCapturesStayToBeRun) {
  dag_.EndCaptures();
  EXPECT_EQ(dag_.At(kA).capture, kNoCapture);
  const size_t size = dag_.size();
  dag_.Begin(kA, 2);
  const CaptureDag::Node node = dag_.Launch(kA, Touch(9, true));
  EXPECT_EQ(node, size);
  EXPECT_EQ(dag_.Run(size, dag_.size(), {1}), std::nullopt);
  EXPECT_EQ(memory_, 9U);
}

// Each race shows in some order, whichever of the two comes first in the capture.
TEST_F(CaptureDagTest, SomeOrderShowsARace) {
  dag_.Launch(kA, Touch(7, true));
  dag_.Wait(kB, dag_.At(kA));
  dag_.Launch(kB, Touch(7, false));
  dag_.Launch(kA, Touch(8, true));
  std::mt19937_64 random(1);
  int wrong = 0;
  for (int i = 0; i < 40; ++i) {
    if (dag_.Run(0, dag_.size(), dag_.SomeUrgency(0, dag_.size(), random))) ++wrong;
  }
  EXPECT_GT(wrong, 4);
  EXPECT_LT(wrong, 40);
}

}  // namespace
}  // namespace cgp
