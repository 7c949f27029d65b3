#include "testing/capture_trace.h"

#include <gmock/gmock.h>

#include <fstream>
#include <stdexcept>

namespace cgp {
namespace {

std::string Written(const std::string& text) {
  const std::string path = testing::TempDir() + "capture_trace_test.txt";
  std::ofstream(path) << text;
  return path;
}

TEST(CaptureTraceTest, SaysWhichLineIsNone) {
  for (const char* text :
       {"alloc 1 2 3\n", "graph 1\nalloc 1 0 0\n", "graph 1\nfoo 1\n", "graph 1\nwait 1\n"}) {
    EXPECT_THROW(ReadTrace(Written(text)), std::runtime_error) << text;
  }
}

TEST(CaptureTraceTest, InAnotherOrderLateFreesFollowTheGraphOfTheBlock) {
  const CaptureTrace trace =
      ReadTrace(Written("graph 1\nalloc 1 1 0\ngraph 2\nfree 1\nalloc 2 1 0\ngraph 3\nfree 2\n"));
  const CaptureTrace turned = InOrder(trace, {1, 0, 2});
  const auto blocks = [&](std::size_t graph) {
    std::vector<uint64_t> numbers;
    for (const TraceEvent& event : turned[graph].events) numbers.push_back(event.block);
    return numbers;
  };
  EXPECT_EQ(turned[0].key, 2u);
  EXPECT_EQ(MostLiveBytes(trace), 512u);
  EXPECT_THAT(blocks(0), testing::ElementsAre(2));
  EXPECT_THAT(blocks(1), testing::ElementsAre(2, 1));  // block 2 is freed, then block 1 made
  EXPECT_THAT(blocks(2), testing::ElementsAre(1));
}

}  // namespace
}  // namespace cgp
