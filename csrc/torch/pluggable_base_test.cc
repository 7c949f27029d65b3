// Around torch's own CUDAPluggableAllocator, which refuses much of what the native one does.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <vector>

#include "torch/graph_allocator.h"
#include "torch/testing/fake_cuda.h"

namespace cgp {
namespace {

using fake_cuda::current_device;
using fake_cuda::current_stream;
using fake_cuda::kPage;
using fake_cuda::SetCapture;
using fake_cuda::Stream;

class PluggableBaseTest : public ::testing::Test {
 protected:
  void SetUp() override {
    device_ = current_device = fake_cuda::NextDevice();
    current_stream = Stream(1);
    fake_cuda::Reset();
  }
  void Begin() {
    allocator_.beginAllocateToPool(
        device_, id_, [](cudaStream_t stream) { return fake_cuda::ActiveCapture(stream) == 7; });
    SetCapture(current_stream, 7);
  }
  void End() {
    SetCapture(current_stream, 0);
    allocator_.endAllocateToPool(device_, id_);
  }
  static bool IsOurs(const DataPtr& data) { return DevicePools::At(data.get()).has_value(); }

  torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator base_{
      [](size_t, int, cudaStream_t) -> void* { return nullptr; },
      [](void*, size_t, int, cudaStream_t) {}};
  GraphAllocator allocator_{base_};
  c10::DeviceIndex device_ = 0;
  const MempoolId_t id_{0, 1};
};

TEST_F(PluggableBaseTest, WhatItDoesNotSupportIsNotNeeded) {
  EXPECT_THROW(allocator_.getDeviceStats(device_), c10::Error) << "what is the base's to say";
  Begin();
  DataPtr inside = allocator_.allocate(1000);
  EXPECT_TRUE(IsOurs(inside));
  End();
  EXPECT_EQ(allocator_.getDeviceStats(device_).allocated_bytes[0].peak, 1024);
  allocator_.resetPeakStats(device_);
  allocator_.resetAccumulatedStats(device_);
  allocator_.setMemoryFraction(0.5, device_);
  EXPECT_EQ(allocator_.getMemoryFraction(device_), 0.5);
  const auto checkpoint = allocator_.getCheckpointState(device_, id_);
  EXPECT_TRUE(allocator_.checkPoolLiveAllocations(device_, id_, {inside.get()}));
  inside.clear();
  auto delta = allocator_.setCheckpointPoolState(device_, checkpoint);
  ASSERT_EQ(delta.dataptrs_allocd.size(), 1U);
  delta.dataptrs_allocd.clear();
  EXPECT_EQ(allocator_.getPoolUseCount(device_, id_), 1);
  allocator_.releasePool(device_, id_);
  allocator_.emptyCache();
  EXPECT_TRUE(DevicePools::For(device_).set.ids().empty());
}

TEST_F(PluggableBaseTest, MemoryThatRunsOutIsOutOfMemory) {
  Begin();
  EXPECT_THROW(allocator_.allocate(fake_cuda::kPhysicalLimit + kPage), c10::OutOfMemoryError);
  End();
  allocator_.releasePool(device_, id_);
}

TEST_F(PluggableBaseTest, ItsHooksAreToldOfCaptures) {
  std::vector<StreamFilter> filters;
  int ended = 0, released = 0;
  base_.set_begin_allocate_to_pool(
      [&](int, MempoolId_t, StreamFilter filter) { filters.push_back(std::move(filter)); });
  base_.set_end_allocate_to_pool_fn([&](int, MempoolId_t) { ++ended; });
  base_.set_release_pool([&](int, MempoolId_t) { ++released; });
  Begin();
  ASSERT_EQ(filters.size(), 1U);
  EXPECT_TRUE(filters[0](current_stream));
  EXPECT_FALSE(filters[0](Stream(2)));
  End();
  EXPECT_EQ(ended, 1);
  allocator_.releasePool(device_, id_);
  EXPECT_EQ(released, 1);
}

TEST_F(PluggableBaseTest, WhatIsOverIsOverWhateverItsHooksSay) {
  base_.set_end_allocate_to_pool_fn([](int, MempoolId_t) { TORCH_CHECK(false, "not ended"); });
  base_.set_release_pool([](int, MempoolId_t) { TORCH_CHECK(false, "not released"); });
  Begin();
  allocator_.allocate(1000).clear();
  EXPECT_NO_THROW(End());
  EXPECT_FALSE(allocator_.capturing());
  EXPECT_NO_THROW(allocator_.releasePool(device_, id_));
  allocator_.emptyCache();
  EXPECT_TRUE(DevicePools::For(device_).set.ids().empty());
}

}  // namespace
}  // namespace cgp
