// Which route takes an allocation, and what it takes to find out.
#include "torch/scopes/routes.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "torch/testing/fake_cuda.h"

namespace cgp {
namespace {

using fake_cuda::SetCapture;
using fake_cuda::Stream;

constexpr c10::DeviceIndex kDevice = 0;
constexpr PoolId kOne{0, 1};
constexpr PoolId kTwo{0, 2};

class RouteTableTest : public ::testing::Test {
 protected:
  void SetUp() override { fake_cuda::Reset(); }

  // A graph's filter: it asks CUDA which capture the stream is in.
  StreamFilter InCapture(CaptureId id) {
    return [this, id](cudaStream_t stream) {
      ++filter_calls_;
      return fake_cuda::ActiveCapture(stream) == id;
    };
  }

  static Route CaptureRoute(PoolId id, StreamFilter filter, cudaStream_t origin) {
    DevicePools& pools = DevicePools::For(kDevice);
    return {{id, ScopeKind::kCapture, &pools, false, origin}, kDevice, {}, std::move(filter)};
  }

  std::optional<PoolId> Match(cudaStream_t stream) {
    const auto target = table_.Match(kDevice, stream);
    return target ? std::optional(target->id) : std::nullopt;
  }

  bool Resume(PoolId id, StreamFilter filter, cudaStream_t stream) {
    return table_.Resume(CaptureRoute(id, std::move(filter), stream), stream, false, [] {});
  }

  RouteTable table_;
  std::atomic<int> filter_calls_{0};
};

TEST_F(RouteTableTest, AnOverCaptureIsNotMistakenForTheNextOnItsStream) {
  bool alive = true;
  const StreamFilter filter = InCapture(7);
  table_.Add(CaptureRoute(
      kOne,
      [&](cudaStream_t stream) {
        EXPECT_TRUE(alive) << "the filter of a graph that is gone was asked";
        return filter(stream);
      },
      Stream(1)));
  SetCapture(Stream(1), 7);
  SetCapture(Stream(2), 7);
  EXPECT_EQ(Match(Stream(1)), kOne);
  EXPECT_EQ(Match(Stream(2)), kOne);
  // It failed, nobody ended the route, and the graph is gone.
  alive = false;
  SetCapture(Stream(1), 0);
  SetCapture(Stream(2), 0);
  EXPECT_EQ(Match(Stream(1)), std::nullopt);
  EXPECT_EQ(Match(Stream(2)), std::nullopt);
  // Somebody captures on the same streams without torch.
  SetCapture(Stream(1), 8);
  SetCapture(Stream(2), 8);
  EXPECT_EQ(Match(Stream(2)), std::nullopt);
  EXPECT_EQ(Match(Stream(1)), std::nullopt);
}

TEST_F(RouteTableTest, ARouteThatComesShowsWhichCapturesAreOver) {
  bool alive = true;
  const auto gone = [&](cudaStream_t stream) {
    EXPECT_TRUE(alive) << "the filter of a graph that is gone was asked";
    return fake_cuda::ActiveCapture(stream) == 7;
  };
  table_.Add(CaptureRoute(kOne, gone, Stream(1)));
  SetCapture(Stream(1), 7);
  EXPECT_EQ(Match(Stream(1)), kOne);
  alive = false;
  SetCapture(Stream(1), 0);
  table_.Add(CaptureRoute(kTwo, InCapture(8), Stream(2)));
  for (uintptr_t i = 1; i <= 2; ++i) SetCapture(Stream(i), 8);
  EXPECT_EQ(Match(Stream(3)), std::nullopt);
  const auto abandoned = table_.FindAbandoned([](const Route&) { return true; });
  ASSERT_TRUE(abandoned.has_value());
  EXPECT_EQ(abandoned->id, kOne);
}

TEST_F(RouteTableTest, AFilterByThreadIsHeeded) {
  table_.Add(CaptureRoute(kOne, InCapture(7), Stream(1)));
  SetCapture(Stream(1), 7);
  EXPECT_EQ(Match(Stream(1)), kOne);
  const auto this_thread = [id = std::this_thread::get_id()](cudaStream_t) {
    return std::this_thread::get_id() == id;
  };
  table_.Add(CaptureRoute(kTwo, this_thread, Stream(1)));  // a pool within the capture
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(Match(Stream(1)), kTwo);
    std::thread([&] {
      for (int i = 0; i < 2; ++i) EXPECT_EQ(Match(Stream(1)), kOne) << "another thread's";
    }).join();
  }
  table_.Remove(kDevice, kTwo);
  EXPECT_EQ(Match(Stream(1)), kOne);
}

TEST_F(RouteTableTest, OnlyItsThreadKnowsWhatItsPerThreadStreamCaptures) {
  table_.Add(CaptureRoute(kOne, InCapture(7), cudaStreamPerThread));
  const auto in_another_thread = [&](std::optional<PoolId> joined) {
    std::thread([&] {
      EXPECT_EQ(Match(Stream(2)), std::nullopt);
      EXPECT_EQ(Match(cudaStreamPerThread), std::nullopt) << "a stream of its own";
      EXPECT_EQ(Match(Stream(1)), joined);
      EXPECT_TRUE(table_.IsBeingCaptured(kDevice, kOne));
      EXPECT_FALSE(table_.FindAbandoned([](const Route&) { return true; }));
    }).join();
  };
  in_another_thread(std::nullopt);
  SetCapture(cudaStreamPerThread, 7);
  SetCapture(Stream(1), 7);
  in_another_thread(kOne);
  EXPECT_EQ(Match(cudaStreamPerThread), kOne);
  EXPECT_EQ(Match(Stream(1)), kOne);
  SetCapture(Stream(2), 8);  // a capture of somebody else
  const int asked = filter_calls_;
  std::thread([&] { EXPECT_EQ(Match(Stream(2)), std::nullopt); }).join();
  EXPECT_EQ(filter_calls_, asked) << "the graph may be gone";
}

class PausedRouteTest : public RouteTableTest {
 protected:
  void SetUp() override {
    RouteTableTest::SetUp();
    table_.Add(CaptureRoute(kOne, InCapture(7), Stream(1)));
    SetCapture(Stream(1), 7);
    ASSERT_TRUE(table_.Pause(kDevice, kOne));
  }
  bool Resume(cudaStream_t stream, CaptureId filters) {
    return RouteTableTest::Resume(kOne, InCapture(filters), stream);
  }
};

TEST_F(PausedRouteTest, AnotherGraphDoesNotResumeIt) {
  EXPECT_FALSE(Resume(Stream(2), 8)) << "about to begin a capture in the same thread";
  SetCapture(Stream(2), 8);
  std::thread([&] {
    EXPECT_FALSE(Resume(Stream(2), 8)) << "captures on another stream";
    EXPECT_FALSE(Resume(Stream(3), 9)) << "is about to";
  }).join();
  EXPECT_EQ(Match(Stream(2)), std::nullopt);
  EXPECT_TRUE(table_.Pause(kDevice, kOne)) << "it still stands";
}

TEST_F(PausedRouteTest, ItsCaptureDoesFromAnyThread) {
  SetCapture(Stream(2), 7);
  std::thread([&] { EXPECT_TRUE(Resume(Stream(2), 70)); }).join();
  SetCapture(Stream(3), 70);
  EXPECT_EQ(Match(Stream(3)), kOne);
  EXPECT_FALSE(Resume(Stream(1), 7)) << "it is not paused";
}

TEST_F(PausedRouteTest, ItsInvalidatedCaptureDoes) {
  fake_cuda::Invalidate(Stream(1));
  EXPECT_TRUE(Resume(Stream(1), 70)) << "torch ends a body whose capture failed";
  ASSERT_TRUE(table_.Pause(kDevice, kOne));
  std::thread([&] { EXPECT_FALSE(Resume(Stream(2), 8)); }).join();
}

TEST_F(RouteTableTest, ThreadsAskWhileRoutesComeAndGo) {
  constexpr int kThreads = 3;
  SetCapture(Stream(1), 7);
  table_.Add(CaptureRoute(kOne, InCapture(7), Stream(1)));
  std::atomic<bool> done = false;
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      while (!done) {
        const auto found = Match(Stream(1));
        if (found != kOne && found != kTwo) ++wrong;
      }
    });
  }
  for (int round = 0; round < 500; ++round) {
    table_.Add(CaptureRoute(kTwo, InCapture(7), Stream(1)));
    if (Match(Stream(1)) != kTwo) ++wrong;
    table_.Remove(kDevice, kTwo);
    if (Match(Stream(1)) != kOne) ++wrong;
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace cgp
