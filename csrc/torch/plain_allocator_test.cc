// The C functions without a GPU: as the process's allocator, and behind the segments of MemPools.
#include "torch/plain_allocator.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "torch/fake_base_allocator.h"
#include "torch/fake_cuda.h"
#include "torch/graph_allocator.h"

namespace cgp {
namespace {

using fake_cuda::kPage;
using fake_cuda::Stream;

class PlainAllocatorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    static c10::DeviceIndex next_device = 40;  // beside those of the other tests
    device_ = fake_cuda::current_device = next_device++;
    fake_cuda::current_stream = Stream(1);
    fake_cuda::Reset();
  }
  PoolSet& pools() { return DevicePools::For(device_, PoolsOwner::kPlainAllocator).set(); }

  PlainAllocator& plain_ = PlainAllocator::Get();
  c10::DeviceIndex device_ = 0;
};

// Where the base has a segment from, its first block starts where the segment does.
TEST_F(PlainAllocatorTest, ASegmentOfAMemPoolIsNotGraphAllocators) {
  FakeBaseAllocator base;
  GraphAllocator allocator(base);
  DevicePools::For(device_);
  void* const segment = plain_.Malloc(kPage, device_, Stream(1));
  EXPECT_EQ(pools().TotalStats().reserved_bytes, kPage);
  EXPECT_FALSE(DevicePools::Owns(segment));
  EXPECT_THROW(allocator.raw_delete(segment), c10::Error) << "the base was not asked";
  EXPECT_EQ(pools().TotalStats().live_blocks, 1U);
  EXPECT_EQ(allocator.getDeviceStats(device_).reserved_bytes[0].current, 0);
  for (const auto& shown : allocator.snapshot({0, 0}, false).segments) {
    EXPECT_NE(shown.device, device_);
  }
  EXPECT_THROW(allocator.shareIpcHandle(segment), c10::Error);
  // It goes when the base gives it back.
  plain_.Free(segment);
  EXPECT_TRUE(pools().ids().empty());
}

// Whose scope ends and begins whenever it has grown; a thread that comes between finds none.
TEST_F(PlainAllocatorTest, ThreadsAllocateWhileThePoolGrows) {
  FakeBaseAllocator other;  // is not "native": the C functions are the process's allocator
  auto& installed = c10::cuda::CUDACachingAllocator::allocator;
  auto* const before = installed.exchange(&other);
  std::atomic<int> failures{0};
  for (int round = 0; round < 1000; ++round) {
    std::atomic<bool> growing{true};
    std::thread beside([&] {
      while (growing) {
        try {
          plain_.Free(plain_.Malloc(512, device_, Stream(2)));
        } catch (const std::exception&) {
          ++failures;
        }
      }
    });
    std::vector<void*> blocks;
    for (int i = 0; i < 28; ++i) blocks.push_back(plain_.Malloc(kPage, device_, Stream(1)));
    growing = false;
    beside.join();
    for (void* const block : blocks) plain_.Free(block);
    // Begun anew, the pool grows anew.
    pools().EndScope({~0ULL, ~0ULL});
    pools().Release({~0ULL, ~0ULL});
    plain_.Reset();
    ASSERT_TRUE(pools().ids().empty());
  }
  installed.store(before);
  EXPECT_EQ(failures, 0);
}

}  // namespace
}  // namespace cgp
