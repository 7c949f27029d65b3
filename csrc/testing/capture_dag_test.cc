// That an execution of the graph would show a race; what the graph says of order cgp_fuzz --captures compares with
// the host driver's graphs.
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

  // Of one granule.
  Kernel Touch(uint64_t word, bool writes) {
    const auto address = reinterpret_cast<Address>(memory_);
    return {.block = {.address = address, .bytes = 512, .requested_bytes = 512, .stream = kA},
            .word = word,
            .writes = writes};
  }

  uint64_t memory_[64] = {};
  CaptureDag dag_;
  CaptureDag::Node root_ = 0;
  CaptureDag::Node a_ = 0;
  CaptureDag::Node b_ = 0;
};

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
  memory_[0] = memory_[63] = 7;
  EXPECT_EQ(dag_.Run(0, dag_.size(), urgency), std::nullopt) << "the edges come first";
  EXPECT_EQ(memory_[0], 8U);
  EXPECT_LT(first, second);
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
