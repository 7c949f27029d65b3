// Programs in which one thing goes wrong if the core takes one wrong step; all else, random ones
// included, is what cgp_fuzz --captures does with the same session.
#include "testing/capture_session.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace cgp {
namespace {

using Kind = CaptureStep::Kind;

constexpr uint64_t kHalf = 2048;
constexpr uint64_t kPage = 4096;
constexpr uint64_t kBystander = 3;

struct Case {
  const char* name;
  std::vector<CaptureStep> steps;
  // Granules that are reused in the capture that freed them, and of these by another stream.
  uint64_t reused = 0;
  uint64_t across = 0;
};

// Each stream allocates once, so that what follows is exact.
std::vector<CaptureStep> Seen(std::vector<CaptureStep> steps) {
  steps.insert(steps.begin(), {{Kind::kAllocate, 0, 100, kPage},
                               {Kind::kAllocate, 1, 101, kPage},
                               {Kind::kAllocate, 2, 102, kPage},
                               {Kind::kLaunch, 0},
                               {Kind::kLaunch, 1},
                               {Kind::kLaunch, 2}});
  return steps;
}

class CapturedProgram : public ::testing::TestWithParam<Case> {};

TEST_P(CapturedProgram, IsRightInAnyOrderAndReusesWhatItMay) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    CaptureSession session({.streams = 3, .page_bytes = kPage, .seed = seed, .forked = true});
    for (const CaptureStep& step : GetParam().steps) {
      ASSERT_EQ(session.Run(step), "") << ToString(step);
    }
    ASSERT_EQ(session.Finish(), "");
    EXPECT_EQ(session.oracle().reused_granules(), GetParam().reused);
    EXPECT_EQ(session.oracle().reused_across_streams(), GetParam().across);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, CapturedProgram,
    ::testing::Values(
        Case{"OneStream",
             {{Kind::kAllocate, 0, 1, kPage},
              {Kind::kWrite, 0, 1},
              {Kind::kFree, 0, 1},
              {Kind::kAllocate, 0, 2, kPage},
              {Kind::kWrite, 0, 2}},
             8,
             0},
        Case{"AnotherBranch",
             Seen({{Kind::kAllocate, 0, 1, kPage},
                   {Kind::kWrite, 0, 1},
                   {Kind::kFree, 0, 1},
                   {Kind::kAllocate, 1, 2, kPage},
                   {Kind::kWrite, 1, 2}}),
             0, 0},
        Case{"BehindTheFree",
             Seen({{Kind::kAllocate, 0, 1, kPage},
                   {Kind::kWrite, 0, 1},
                   {Kind::kFree, 0, 1},
                   {Kind::kRecord, 0, 1},
                   {Kind::kLaunch, 0},
                   {Kind::kWait, 1, 1},
                   {Kind::kAllocate, 1, 2, kPage},
                   {Kind::kWrite, 1, 2}}),
             8, 8},
        // The event is older than the last kernel on the block.
        Case{"BehindTheAllocationOnly",
             Seen({{Kind::kAllocate, 0, 1, kPage},
                   {Kind::kRecord, 0, 1},
                   {Kind::kWrite, 0, 1},
                   {Kind::kFree, 0, 1},
                   {Kind::kWait, 1, 1},
                   {Kind::kLaunch, 1},
                   {Kind::kAllocate, 1, 2, kPage},
                   {Kind::kWrite, 1, 2}}),
             0, 0},
        Case{"BehindTheHomeButNotTheUse",
             Seen({{Kind::kAllocate, 0, 1, kPage},
                   {Kind::kWrite, 0, 1},
                   {Kind::kRead, 1, 1},
                   {Kind::kFree, 0, 1},
                   {Kind::kAllocate, 0, 2, kPage},
                   {Kind::kWrite, 0, 2},
                   {Kind::kRecord, 0, 1},
                   {Kind::kWait, 2, 1},
                   {Kind::kAllocate, 2, 3, kPage},
                   {Kind::kWrite, 2, 3}}),
             0, 0},
        // The reader stands behind the writer; the home has gone on before the free.
        Case{"BehindTheUseButNotTheHome",
             Seen({{Kind::kAllocate, 0, 1, kPage},
                   {Kind::kWrite, 0, 1},
                   {Kind::kRead, 1, 1},
                   {Kind::kRead, 0, 1},
                   {Kind::kFree, 0, 1},
                   {Kind::kAllocate, 1, 2, kPage},
                   {Kind::kWrite, 1, 2}}),
             0, 0},
        Case{"BehindTwoUses",
             Seen({{Kind::kAllocate, 0, 1, kPage},
                   {Kind::kWrite, 0, 1},
                   {Kind::kRead, 1, 1},
                   {Kind::kRead, 2, 1},
                   {Kind::kFree, 0, 1},
                   {Kind::kRecord, 1, 1},
                   {Kind::kRecord, 2, 2},
                   {Kind::kWait, 0, 1},
                   {Kind::kAllocate, 0, 2, kPage},
                   {Kind::kWait, 0, 2},
                   {Kind::kAllocate, 0, 3, kPage},
                   {Kind::kWrite, 0, 3}}),
             8, 0},
        // What a stream does after the free has nothing to do with the block.
        Case{"TheUserGoesOn",
             Seen({{Kind::kAllocate, 0, 1, kPage},
                   {Kind::kWrite, 0, 1},
                   {Kind::kRead, 1, 1},
                   {Kind::kRecord, 1, 1},
                   {Kind::kFree, 0, 1},
                   {Kind::kLaunch, 1},
                   {Kind::kLaunch, 0},
                   {Kind::kWait, 0, 1},
                   {Kind::kLaunch, 0},
                   {Kind::kAllocate, 0, 2, kPage},
                   {Kind::kWrite, 0, 2}}),
             8, 0},
        // A node has two predecessors, and the fence is behind the second one.
        Case{"BehindTheSecondPredecessor",
             Seen({{Kind::kAllocate, 1, 1, kPage},
                   {Kind::kWrite, 1, 1},
                   {Kind::kFree, 0, 1},
                   {Kind::kRecord, 1, 1},
                   {Kind::kWait, 0, 1},
                   {Kind::kLaunch, 0},
                   {Kind::kLaunch, 0},
                   {Kind::kAllocate, 0, 2, kPage},
                   {Kind::kWrite, 0, 2}}),
             8, 8},
        Case{"AJoinThatComesLate",
             Seen({{Kind::kAllocate, 0, 1, kPage},
                   {Kind::kWrite, 0, 1},
                   {Kind::kFree, 0, 1},
                   {Kind::kRecord, 0, 1},
                   {Kind::kAllocate, 1, 2, kPage},
                   {Kind::kLaunch, 1},
                   {Kind::kWait, 1, 1},
                   {Kind::kAllocate, 1, 3, kPage},
                   {Kind::kWrite, 1, 3}}),
             8, 8},
        // Neighbours behind fences of two streams, both behind the one that asks.
        Case{"AStretchOfSeveralFences",
             Seen({{Kind::kAllocate, 0, 1, kHalf},
                   {Kind::kWrite, 0, 1},
                   {Kind::kAllocate, 1, 2, kHalf},
                   {Kind::kWrite, 1, 2},
                   {Kind::kFree, 0, 1},
                   {Kind::kFree, 0, 2},
                   {Kind::kRecord, 0, 1},
                   {Kind::kRecord, 1, 2},
                   {Kind::kWait, 2, 1},
                   {Kind::kAllocate, 2, 3, kPage - 512},
                   {Kind::kWait, 2, 2},
                   {Kind::kAllocate, 2, 4, kPage - 512},
                   {Kind::kWrite, 2, 4}}),
             7, 7},
        Case{"AProgrammaticLaunchProvesNothing",
             Seen({{Kind::kAllocate, 0, 1, kPage},
                   {Kind::kWrite, 0, 1},
                   {Kind::kFree, 0, 1},
                   {Kind::kRecord, 0, 1},
                   {Kind::kWait, 1, 1},
                   {Kind::kLaunchEarly, 1},
                   {Kind::kLaunch, 1},
                   {Kind::kAllocate, 1, 2, kPage},
                   {Kind::kWrite, 1, 2}}),
             0, 0},
        // The stream stood behind the block's last node, and then launched what does not wait for it.
        Case{"AProgrammaticLaunchAfterTheStreamHasAsked",
             Seen({{Kind::kAllocate, 0, 1, kHalf},
                   {Kind::kAllocate, 0, 2, kHalf},
                   {Kind::kWrite, 0, 1},
                   {Kind::kFree, 0, 1},
                   {Kind::kRecord, 0, 1},
                   {Kind::kWait, 1, 1},
                   {Kind::kAllocate, 1, 3, kPage},
                   {Kind::kLaunchEarly, 1},
                   {Kind::kAllocate, 1, 4, kHalf},
                   {Kind::kWrite, 1, 4}}),
             0, 0},
        Case{"AProgrammaticEventProvesNothing",
             Seen({{Kind::kAllocate, 0, 1, kPage},
                   {Kind::kWrite, 0, 1},
                   {Kind::kFree, 0, 1},
                   {Kind::kRecord, 0, 1},
                   {Kind::kWaitEarly, 1, 1},
                   {Kind::kAllocate, 1, 2, kPage},
                   {Kind::kWrite, 1, 2}}),
             0, 0},
        Case{"ItsOwnBytesAStreamTakesWhateverItLaunches",
             Seen({{Kind::kAllocate, 1, 1, kPage},
                   {Kind::kWrite, 1, 1},
                   {Kind::kFree, 0, 1},
                   {Kind::kLaunchEarly, 1},
                   {Kind::kAllocate, 1, 2, kPage},
                   {Kind::kWrite, 1, 2}}),
             8, 0},
        Case{"AStreamThatIsNotCaptured",
             Seen({{Kind::kAllocate, 0, 1, kPage},
                   {Kind::kWrite, 0, 1},
                   {Kind::kUse, kBystander, 1},
                   {Kind::kFree, 0, 1},
                   {Kind::kAllocate, 0, 2, kPage},
                   {Kind::kNextGraph},
                   {Kind::kAllocate, 0, 3, kPage},
                   {Kind::kWrite, 0, 3},
                   {Kind::kProgress},
                   {Kind::kAllocate, 0, 4, kPage},
                   {Kind::kWrite, 0, 4}}),
             0, 0},
        // Their nodes have the numbers of those of the graph before, on other streams.
        Case{"NodesOfAGraphThatIsOver",
             Seen({{Kind::kAllocate, 0, 1, kPage},
                   {Kind::kWrite, 0, 1},
                   {Kind::kFree, 0, 1},
                   {Kind::kRecord, 0, 1},
                   {Kind::kWait, 1, 1},
                   {Kind::kAllocate, 1, 2, kPage},
                   {Kind::kFree, 0, 2},
                   {Kind::kNextGraph},
                   {Kind::kAllocate, 0, 3, kPage},
                   {Kind::kAllocate, 1, 4, kPage},
                   {Kind::kWrite, 1, 4},
                   {Kind::kWrite, 0, 3},
                   {Kind::kFree, 0, 3},
                   {Kind::kFree, 0, 4},
                   {Kind::kAllocate, 1, 5, kPage},
                   {Kind::kAllocate, 0, 6, kPage},
                   {Kind::kWrite, 1, 5},
                   {Kind::kWrite, 0, 6}}),
             24, 8}),
    [](const auto& one) { return std::string(one.param.name); });

}  // namespace
}  // namespace cgp
