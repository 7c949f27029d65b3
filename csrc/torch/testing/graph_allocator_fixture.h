// What the tests of GraphAllocator start from: it, around a base of plain host memory, on a device
// of its own; and graphs that do to it what torch's do.
#pragma once

#include <gtest/gtest.h>

#include <thread>

#include "core/base/error.h"
#include "torch/graph_allocator.h"
#include "torch/testing/fake_base_allocator.h"
#include "torch/testing/fake_cuda.h"

namespace cgp {

using fake_cuda::ActiveCapture;
using fake_cuda::current_device;
using fake_cuda::current_stream;
using fake_cuda::kPage;
using fake_cuda::kPhysicalLimit;
using fake_cuda::SetCapture;
using fake_cuda::Stream;

inline StreamFilter ThisThread() {
  return
      [id = std::this_thread::get_id()](cudaStream_t) { return std::this_thread::get_id() == id; };
}

class GraphAllocatorTest : public ::testing::Test {
 protected:
  // What torch.cuda.CUDAGraph does, in its order, of releases before 2.14.
  class Graph {
   public:
    Graph(GraphAllocatorTest& test, MempoolId_t id, CaptureId capture_id)
        : test_(test), id_(id), capture_id_(capture_id) {}

    void Begin() {
      test_.allocator_.beginAllocateToPool(test_.device_, id_, Filter());
      stream_ = current_stream;
      SetCapture(stream_, capture_id_);
    }
    void End() {
      SetCapture(stream_, 0);
      test_.allocator_.endAllocateToPool(test_.device_, id_);
    }
    // Something that no capture survives happened.
    void Fail() {
      SetCapture(stream_, 0);
      gone_ = true;
    }
    void Reset() { test_.allocator_.releasePool(test_.device_, id_); }
    StreamFilter Filter() {
      return [this](cudaStream_t stream) {
        EXPECT_FALSE(gone_) << "the filter of a graph that is gone was asked";
        return ActiveCapture(stream) != 0 && ActiveCapture(stream) == capture_id_;
      };
    }

   private:
    GraphAllocatorTest& test_;
    MempoolId_t id_;
    CaptureId capture_id_;
    cudaStream_t stream_ = nullptr;
    bool gone_ = false;
  };

  void SetUp() override {
    device_ = current_device = fake_cuda::NextDevice();
    current_stream = Stream(1);
    fake_cuda::Reset();
  }

  PoolSet& pools() { return DevicePools::For(device_).set; }
  void ExpectNothingIsLeft() {
    allocator_.emptyCache();
    EXPECT_TRUE(pools().ids().empty());
    EXPECT_FALSE(allocator_.capturing());
    EXPECT_TRUE(base_.open.empty());
    pools().Check();
  }
  static bool IsOurs(const DataPtr& data) { return DevicePools::At(data.get()).has_value(); }
  static PoolId ToPoolId(MempoolId_t id) { return {id.first, id.second}; }

  FakeBaseAllocator base_;
  GraphAllocator allocator_{base_};
  c10::DeviceIndex device_ = 0;
  const MempoolId_t id_{0, 1};
};

}  // namespace cgp
