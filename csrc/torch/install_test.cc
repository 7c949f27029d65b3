// Putting the allocator in and out, from several threads, while others capture and allocate.
#include "torch/install.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "torch/testing/graph_allocator_fixture.h"

namespace cgp {
namespace {

std::atomic<CUDAAllocator*>& Installed() { return c10::cuda::CUDACachingAllocator::allocator; }

class InstallTest : public GraphAllocatorTest {
 protected:
  void SetUp() override {
    GraphAllocatorTest::SetUp();
    before_ = Installed().exchange(&base_);
    allocator_.scopes().takes_captures = false;
  }
  void TearDown() override {
    Installed().store(before_);
    RegisterWithC10(*before_);
  }
  // Of the installed one, as torch does it.
  static bool CaptureOnce(c10::DeviceIndex device, MempoolId_t id, CaptureId capture) {
    CUDAAllocator& begins = *Installed().load();
    begins.beginAllocateToPool(
        device, id, [capture](cudaStream_t stream) { return ActiveCapture(stream) == capture; });
    SetCapture(current_stream, capture);
    bool same = true;
    bool ours = false;
    for (int i = 0; i < 5; ++i) {
      const DataPtr inside = Installed().load()->allocate(700);
      const bool is_ours = DevicePools::At(inside.get()).has_value();
      same = same && (i == 0 || is_ours == ours);
      ours = is_ours;
    }
    SetCapture(current_stream, 0);
    Installed().load()->endAllocateToPool(device, id);
    Installed().load()->releasePool(device, id);
    return same;
  }

  CUDAAllocator* before_ = nullptr;
};

TEST_F(InstallTest, AFailedCaptureDoesNotKeepItIn) {
  Enable({});
  Graph failed(*this, id_, 7);
  failed.Begin();
  EXPECT_THROW(Disable(), std::runtime_error) << "it is under way";
  EXPECT_TRUE(IsEnabled());
  failed.Fail();
  Disable();
  EXPECT_FALSE(IsEnabled());
}

// A capture begins as ours or as the base's, and is so to its end.
TEST_F(InstallTest, CapturesGoOnWhileOthersSwitch) {
  std::atomic<bool> done{false};
  std::atomic<int> mixed{0}, refused{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      current_device = device_;
      current_stream = Stream(static_cast<uintptr_t>(20 + t));
      for (int round = 0; round < 300; ++round) {
        while (pools().Usage().reserved_bytes.current > kPhysicalLimit / 2) {
          Installed().load()->emptyCache();
        }
        const auto number = static_cast<uint64_t>(1000 * (t + 1) + round);
        if (!CaptureOnce(device_, {0, number}, number)) ++mixed;
      }
    });
  }
  std::thread switching([&] {
    current_device = device_;
    while (!done) {
      try {
        Enable({});
        Disable();
      } catch (const std::runtime_error&) {
        ++refused;  // a capture is under way
      }
    }
  });
  for (std::thread& thread : threads) thread.join();
  done = true;
  switching.join();
  EXPECT_EQ(mixed, 0);
  allocator_.emptyCache();
  EXPECT_FALSE(allocator_.capturing());
  EXPECT_TRUE(base_.open.empty());
  EXPECT_TRUE(pools().ids().empty());
  pools().Check();
}

// The pool goes while somebody else is thrown out of a capture in it.
TEST_F(InstallTest, APoolIsReleasedByOthersWhileItsCaptureFails) {
  for (int round = 0; round < 100; ++round) {
    allocator_.scopes().takes_captures = true;
    allocator_.scopes().Register(device_, ToPoolId(id_));
    std::thread releases;
    try {
      Graph graph(*this, id_, static_cast<CaptureId>(5000 + round));
      graph.Begin();
      const DataPtr inside = allocator_.allocate(1000);
      releases = std::thread([&] { allocator_.releasePool(device_, id_); });
      graph.End();
      throw std::runtime_error("mine");
    } catch (const std::runtime_error&) {
      allocator_.releasePool(device_, id_);
    }
    releases.join();
    allocator_.emptyCache();
    ASSERT_TRUE(pools().ids().empty());
  }
}

}  // namespace
}  // namespace cgp
