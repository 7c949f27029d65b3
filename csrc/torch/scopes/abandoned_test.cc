// Captures that nobody ended: failed ones, and those that another thread is about to end.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "torch/graph_allocator.h"
#include "torch/testing/graph_allocator_fixture.h"

namespace cgp {
namespace {

class AbandonedCaptureTest : public GraphAllocatorTest {
 protected:
  void TearDown() override { ExpectNothingIsLeft(); }
  void Capture(MempoolId_t id) {
    Graph graph(*this, id, ++last_capture_);
    graph.Begin();
    EXPECT_TRUE(IsOurs(allocator_.allocate(1000)));
    graph.End();
    graph.Reset();
  }
  int Users(MempoolId_t id) { return pools().UseCount(ToPoolId(id)); }

  const MempoolId_t other_{0, 2};
  CaptureId last_capture_ = 0;
};

// The thread that began it goes on meanwhile.
TEST_F(AbandonedCaptureTest, OneThatAnotherThreadIsAboutToEndIsNotLost) {
  Graph graph(*this, id_, 7);
  graph.Begin();
  DataPtr inside = allocator_.allocate(1000);
  SetCapture(Stream(1), 0);  // the other thread has ended the capture, and comes for the route next
  allocator_.emptyCache();
  EXPECT_FALSE(allocator_.capturing()) << "it would keep the base from giving memory back";
  EXPECT_TRUE(base_.open.empty());
  EXPECT_EQ(Users(id_), 1);
  EXPECT_TRUE(fake_cuda::ended_host_routes().empty());
  std::thread([&] { allocator_.endAllocateToPool(device_, id_); }).join();
  allocator_.emptyCache();
  EXPECT_TRUE(pools().Contains(ToPoolId(id_))) << "its graph lives";
  inside.clear();
  graph.Reset();
  EXPECT_THROW(allocator_.endAllocateToPool(device_, id_), c10::Error) << "ended once";
}

// CUDA refuses to wait for the device until the end of a capture is complete, a moment after its
// stream has stopped capturing.
TEST_F(AbandonedCaptureTest, WhileOneIsBeingEndedNothingIsGivenBack) {
  Capture(other_);
  HostDriver& host = fake_cuda::HostOf(DevicePools::For(device_).driver.inner());
  const CaptureId capture = host.graphs().Begin(StreamId{1});
  EXPECT_NO_THROW(allocator_.emptyCache());
  EXPECT_GT(pools().TrimmableBytes(), 0U);
  host.graphs().End(capture);
  allocator_.emptyCache();
  EXPECT_EQ(pools().TrimmableBytes(), 0U);
}

// Two threads use one stream, as those of torch.cuda.graph() do that name none.
class AwaitedTest : public AbandonedCaptureTest {
 protected:
  // What another thread does with the stream. This one goes on once that is well under way.
  std::thread Beside(const std::function<void()>& function) {
    std::atomic<bool> runs{false};
    std::thread other([this, &runs, function] {
      current_stream = Stream(1);
      current_device = device_;
      runs = true;
      function();
    });
    while (!runs) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    return other;
  }
};

TEST_F(AwaitedTest, OneThatIsAboutToEndOnTheStreamDoesEnd) {
  for (const MempoolId_t& next : {id_, other_}) {
    Graph first(*this, id_, 7), second(*this, next, 8);
    allocator_.beginAllocateToPool(device_, id_, first.Filter());
    SetCapture(Stream(1), 7);
    DataPtr of_first = allocator_.allocate(1000);
    SetCapture(Stream(1), 0);
    std::thread other = Beside([&] {
      second.Begin();
      EXPECT_TRUE(IsOurs(allocator_.allocate(1000)));
      second.End();
    });
    allocator_.endAllocateToPool(device_, id_);
    other.join();
    EXPECT_EQ(Users(id_), next == id_ ? 2 : 1) << "both graphs live";
    second.Reset();
    allocator_.emptyCache();
    EXPECT_EQ(Users(id_), 1);
    of_first.clear();
    first.Reset();
    allocator_.emptyCache();
  }
}

}  // namespace
}  // namespace cgp
