// That an execution of the graph would show a race. What the graph says of order cgp_fuzz
// --captures compares with the host driver's graphs; that the edges come first is seen by each
// program that it executes.
#include "testing/capture_dag.h"

#include <gtest/gtest.h>

#include <random>

#include "testing/test_names.h"

namespace cgp {
namespace {

// Each race shows in some order, whichever of the two comes first in the capture.
TEST(CaptureDagTest, SomeOrderShowsARace) {
  uint64_t memory[64] = {};  // one granule
  const auto touch = [&](uint64_t word, bool writes) -> Kernel {
    const auto address = reinterpret_cast<Address>(memory);
    return {{.address = address, .bytes = 512, .requested_bytes = 512, .stream = kA}, word, writes};
  };
  HostGraphs graphs;
  CaptureDag dag(graphs);
  dag.Begin(kA);
  dag.Launch(kA);
  dag.Launch(kA, touch(7, true));
  dag.Wait(kB, dag.At(kA));
  dag.Launch(kB, touch(7, false));
  dag.Launch(kA, touch(8, true));
  std::mt19937_64 random(1);
  int wrong = 0;
  for (int i = 0; i < 40; ++i) {
    if (dag.Run(0, dag.size(), dag.SomeUrgency(0, dag.size(), random))) ++wrong;
  }
  EXPECT_GT(wrong, 4);
  EXPECT_LT(wrong, 40);
}

}  // namespace
}  // namespace cgp
