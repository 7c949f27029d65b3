// The launches of one graph do not overlap, whichever executables they ran on and on whatever
// streams.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "exec/exec_cache_fixture.h"
#include "testing/driver_watch.h"

namespace cgp {

namespace {

using ::testing::Contains;
using ::testing::IsEmpty;
using ::testing::Not;

TEST_F(ExecCacheTest, BehindALaunchOnAStreamThatMayBeGone) {
  host_.HoldEvents(true);
  MakeCache(1);
  const GraphNumber graph = Add(Graph{10});
  const GraphNumber other = Add(Graph{11});
  Launch(graph, kA, /*lasts=*/false);
  Launch(other, kA, /*lasts=*/false);
  events_.Disarm();
  Launch(graph, kB);
  EXPECT_EQ(host_.waits(), (std::vector{HostDriver::Wait{kB, kA}}));
  EXPECT_THAT(events_.calls(), Not(Contains(DriverCall::kRecordEvent)));
  Launch(other, kB);
  // It has the same name, but may be another stream.
  Launch(graph, kA, /*lasts=*/false);
  EXPECT_THAT(host_.waits(), Contains(HostDriver::Wait{kA, kA}));
}

TEST_F(ExecCacheTest, AStreamThatACaptureHoldsDoesNotWaitAndHidesNothing) {
  host_.HoldEvents(true);
  MakeCache(1);  // one executable for two graphs that are alike
  const GraphNumber graph = Add(Graph{10});
  Launch(graph, kA);
  Launch(Add(Graph{11}), kA);
  const CaptureId capture = host_.graphs().Begin(kB);
  const GraphExec exec = Launch(graph, kB);
  EXPECT_THAT(host_.waits(), IsEmpty());
  host_.graphs().End(capture);
  EXPECT_EQ(Launch(Add(Graph{12}), kB), exec) << "it has not been launched yet";
  Launch(graph, kC);
  EXPECT_THAT(host_.waits(), Contains(HostDriver::Wait{kC, kA}));
}

// --- On a device whose streams get on at random ---

class RandomLaunches {
 public:
  RandomLaunches(std::optional<size_t> max_execs, uint64_t seed)
      : random_(seed),
        cache_(std::make_unique<FakeGraphDriver>(book_), watch_, max_execs,
               /*budget_bytes=*/max_execs ? seed % 6 : 0, std::chrono::milliseconds(0)) {
    for (uint64_t i = 0; i < 6; ++i) {
      book_.SetKind(Graph{i}, i < 4 ? "like" : "other");
      graphs_.push_back(cache_.Add(Graph{i}));
    }
  }

  void Run(int steps) {
    for (int step = 0; step < steps; ++step) {
      const StreamId stream = kStreams[random_() % kStreams.size()];
      if (random_() % 3 == 0) {
        watch_.Progress(stream, 1 + random_() % 4);
      } else if (random_() % 8 == 0) {
        cache_.Prepare(graphs_[random_() % graphs_.size()], {stream, true});
        Submit(book_.uploads().back().first, stream, nullptr);
      } else {
        Launch(random_() % graphs_.size(), stream);
      }
    }
    watch_.FinishAll();
    EXPECT_EQ(out_of_order_, 0);
    EXPECT_THAT(watch_.violations(), IsEmpty());
  }

 private:
  static constexpr std::array kStreams = {kA, kB, kC};

  void Launch(size_t index, StreamId stream) {
    const GraphExec exec = cache_.Lease(graphs_[index], stream);
    const uint64_t turn = ++launched_[index];
    Submit(exec, stream, [this, index, turn] {
      if (++done_[index] != turn) ++out_of_order_;
    });
    cache_.Return(graphs_[index], {stream, random_() % 4 != 0});
  }

  // Behind what the executable did before, launch or upload, as CUDA orders it.
  void Submit(GraphExec exec, StreamId stream, std::function<void()> action) {
    const std::optional<std::pair<StreamId, uint64_t>> before = last_of_[exec];
    const uint64_t work = watch_.Submit(stream, [this, before, action = std::move(action)] {
      if (before) watch_.Finish(before->first, before->second);
      if (action) action();
    });
    last_of_[exec] = {stream, work};
  }

  std::mt19937_64 random_;
  HostDriver host_{{.granularity = 4096, .map_memory = false}};
  DriverWatch watch_{host_};
  GraphBook book_;
  ExecCache cache_;
  std::vector<GraphNumber> graphs_;
  std::map<GraphExec, std::optional<std::pair<StreamId, uint64_t>>> last_of_;
  std::array<uint64_t, 6> launched_{};
  std::array<uint64_t, 6> done_{};
  int out_of_order_ = 0;
};

TEST(ExecCacheRandomOrderTest, TheLaunchesOfAGraphAreDoneInTurn) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(seed);
    const size_t limit = seed % 4;
    RandomLaunches(limit == 0 ? std::nullopt : std::optional(limit), seed).Run(400);
    if (::testing::Test::HasFailure()) break;
  }
}

}  // namespace
}  // namespace cgp
