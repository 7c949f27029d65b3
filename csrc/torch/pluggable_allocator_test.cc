// The C functions' allocator: eager memory from one pool, captures from others, and no base.
#include <c10/cuda/CUDACachingAllocator.h>
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "testing/host_driver.h"
#include "testing/pool_of.h"
#include "torch/graph_allocator.h"
#include "torch/testing/fake_base_allocator.h"
#include "torch/testing/fake_cuda.h"
#include "torch/testing/fake_faults.h"
#include "torch/testing/pluggable_functions.h"

namespace cgp {

namespace {

using fake_cuda::ActiveCapture;
using fake_cuda::current_device;
using fake_cuda::current_stream;
using fake_cuda::kPage;
using fake_cuda::kPhysicalLimit;
using fake_cuda::SetCapture;
using fake_cuda::Stream;

std::atomic<c10::cuda::CUDACachingAllocator::CUDAAllocator*>& Installed() {
  return c10::cuda::CUDACachingAllocator::allocator;
}

class PluggableAllocatorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    device_ = current_device = fake_cuda::NextDevice();
    current_stream = Stream(1);
    fake_cuda::Reset();
    installed_.its_name = "pluggable";
    Installed().store(&installed_);
  }
  void TearDown() override { Installed().store(native_); }

  PoolSet& set() { return DevicePools::For(device_, PoolsOwner::kPluggableAllocator).set; }
  HostDriver& host() {
    return fake_cuda::HostOf(
        DevicePools::For(device_, PoolsOwner::kPluggableAllocator).driver.inner());
  }
  void* Malloc(size_t bytes, uintptr_t stream = 1) {
    return cudagraph_pool_malloc(bytes, device_, Stream(stream));
  }
  std::optional<PoolId> PoolOf(const void* pointer) {
    return cgp::PoolOf(set(), reinterpret_cast<Address>(pointer));
  }
  uint64_t Reserved() { return set().Usage().reserved_bytes.current; }
  // Until torch calls them it may have none.
  void ShowHooks() { cudagraph_pool_record_stream(this, Stream(2)); }
  static void Free(void* pointer) { cudagraph_pool_free(pointer, 0, 0, nullptr); }
  // What torch.cuda.CUDAGraph does with the hooks.
  void BeginCapture(c10::MempoolId_t id, CaptureId capture, uintptr_t stream = 1) {
    current_stream = Stream(stream);
    cudagraph_pool_begin_allocate_to_pool(
        device_, id, [capture](cudaStream_t asked) { return ActiveCapture(asked) == capture; });
    SetCapture(current_stream, capture);
  }
  void EndCapture(c10::MempoolId_t id, uintptr_t stream = 1) {
    SetCapture(Stream(stream), 0);
    cudagraph_pool_end_allocate_to_pool(device_, id);
  }

  FakeBaseAllocator installed_;  // not "native": a pluggable one
  c10::cuda::CUDACachingAllocator::CUDAAllocator* const native_ = Installed().load();
  c10::DeviceIndex device_ = 0;
  const c10::MempoolId_t id_{0, 1};
  const PoolId pool_{0, 1};
};

TEST_F(PluggableAllocatorTest, EagerMemoryComesFromOnePool) {
  EXPECT_EQ(Malloc(0), nullptr);
  EXPECT_EQ(DevicePools::Find(device_, PoolsOwner::kPluggableAllocator), nullptr);
  void* const first = Malloc(1000);
  void* const second = Malloc(kPage, 2);
  ASSERT_TRUE(PoolOf(first).has_value());
  EXPECT_EQ(PoolOf(first), PoolOf(second));
  size_t bytes = 0;
  EXPECT_EQ(cudagraph_pool_base_alloc(static_cast<char*>(first) + 600, &bytes), first);
  EXPECT_EQ(bytes, 1024U);
  Free(nullptr);
  Free(first);
  EXPECT_THROW(cudagraph_pool_base_alloc(first, &bytes), c10::Error);
  EXPECT_EQ(Malloc(1000), first) << "its stream takes it at once";
  cudagraph_pool_reset();
  EXPECT_GT(Reserved(), 0U) << "the eager pool stays open";
}

TEST_F(PluggableAllocatorTest, FreeingTwiceIsRefused) {
  void* const pointer = Malloc(1000);
  EXPECT_THROW(Free(static_cast<char*>(pointer) + 512), c10::Error);
  Free(pointer);
  EXPECT_THROW(Free(pointer), c10::Error);
  EXPECT_THROW(Free(this), c10::Error);
}

TEST_F(PluggableAllocatorTest, TheFreedIsNotFreeToOthersWhileItsStreamIsAtWork) {
  ShowHooks();
  DevicePools::For(device_, PoolsOwner::kPluggableAllocator);
  host().HoldEvents(true);
  void* const first = Malloc(kPage);
  Free(first);
  Malloc(kPage, 2);
  EXPECT_NE(Malloc(kPage, 2), first);
  EXPECT_EQ(Reserved(), 3 * kPage);
  host().CompleteEvents();
  EXPECT_EQ(Malloc(kPage, 2), first);
}

TEST_F(PluggableAllocatorTest, ARecordedStreamHoldsTheMemory) {
  DevicePools::For(device_, PoolsOwner::kPluggableAllocator);
  host().HoldEvents(true);
  void* const used = Malloc(kPage);
  ShowHooks();
  cudagraph_pool_record_stream(used, Stream(2));
  Free(used);
  EXPECT_NE(Malloc(kPage), used) << "the other stream's work on it may be running";
  host().CompleteEvents();
  EXPECT_NE(Malloc(kPage), nullptr);              // grows or not: what is open by now is anybody's
  cudagraph_pool_record_stream(this, Stream(2));  // not ours: no business of ours
}

TEST_F(PluggableAllocatorTest, ACaptureWithoutHooksIsRefused) {
  SetCapture(Stream(1), 7);
  try {
    Malloc(1000);
    FAIL() << "was allocated";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("pluggable_allocator()"), std::string::npos);
  }
  EXPECT_EQ(DevicePools::Find(device_, PoolsOwner::kPluggableAllocator), nullptr);
  EXPECT_NE(Malloc(1000, 2), nullptr) << "another stream's";
}

TEST_F(PluggableAllocatorTest, ACaptureWithHooksHasAPoolOfItsOwn) {
  void* const eager = Malloc(1000);
  BeginCapture(id_, 7);
  void* const inside = Malloc(1000);
  EXPECT_EQ(PoolOf(inside), pool_);
  EXPECT_EQ(PoolOf(Malloc(1000, 2)), PoolOf(eager));
  const std::thread::id here = std::this_thread::get_id();
  EndCapture(id_);
  EXPECT_EQ(PoolOf(Malloc(1000)), PoolOf(eager));
  cudagraph_pool_begin_allocate_to_pool(
      device_, id_, [here](cudaStream_t) { return std::this_thread::get_id() == here; });
  EXPECT_EQ(PoolOf(Malloc(1000)), pool_) << "a thread warms up in it";
  cudagraph_pool_end_allocate_to_pool(device_, id_);
  EXPECT_EQ(set().UseCount(pool_), 2);
  cudagraph_pool_release_pool(device_, id_);
  cudagraph_pool_release_pool(device_, id_);
  cudagraph_pool_release_pool(device_, id_);  // one too many, as after a capture that failed
  EXPECT_EQ(set().UseCount(pool_), 0);
}

TEST_F(PluggableAllocatorTest, DuringACaptureEagerFencesStayShut) {
  void* const first = Malloc(kPage, 2);
  Free(first);
  BeginCapture(id_, 7);
  Malloc(kPage, 3);
  EXPECT_NE(Malloc(kPage, 3), first) << "a mark of the device would break the capture";
  EndCapture(id_);
  Malloc(kPage, 4);  // grows
  EXPECT_EQ(Malloc(kPage, 3), first);
}

TEST_F(PluggableAllocatorTest, NoRoomIsMadeWithinACaptureThatNobodyToldOf) {
  BeginCapture(id_, 7);
  Free(Malloc(kPhysicalLimit - kPage));
  EndCapture(id_);
  cudagraph_pool_release_pool(device_, id_);
  cudagraph_pool_begin_allocate_to_pool(device_, {0, 2}, [](cudaStream_t) { return true; });
  SetCapture(Stream(1), 8);
  EXPECT_THROW(Malloc(2 * kPage), c10::OutOfMemoryError);
  EXPECT_EQ(Reserved(), kPhysicalLimit - kPage);
  SetCapture(Stream(1), 0);
  EXPECT_NE(Malloc(2 * kPage), nullptr);
  cudagraph_pool_end_allocate_to_pool(device_, {0, 2});
}

TEST_F(PluggableAllocatorTest, BeforeMemoryRunsOutGraphAllocatorsPoolsGiveWay) {
  FakeBaseAllocator base;
  GraphAllocator allocator(base);
  allocator.beginAllocateToPool(device_, id_, [](cudaStream_t) { return true; });
  allocator.allocate(kPage).clear();
  allocator.endAllocateToPool(device_, id_);
  allocator.releasePool(device_, id_);
  const PoolSet& others = DevicePools::For(device_).set;
  ASSERT_TRUE(others.Contains(pool_));
  Malloc(kPhysicalLimit);
  EXPECT_TRUE(others.Contains(pool_));
  BeginCapture({0, 2}, 7);
  EXPECT_THROW(Malloc(kPage, 2), c10::OutOfMemoryError);
  EXPECT_TRUE(others.Contains(pool_)) << "nothing may be unmapped during a capture";
  EndCapture({0, 2});
  EXPECT_THROW(Malloc(kPage), c10::OutOfMemoryError) << "the fake's devices are as many";
  EXPECT_FALSE(others.Contains(pool_));
}

TEST_F(PluggableAllocatorTest, AnAbandonedCaptureMakesWay) {
  BeginCapture(id_, 7);
  Free(Malloc(1000));
  SetCapture(Stream(1), 0);  // it failed, and nobody ends the route
  BeginCapture({0, 2}, 8);
  EXPECT_EQ(PoolOf(Malloc(1000)), (PoolId{0, 2}));
  EXPECT_EQ(set().UseCount(pool_), kGraphReleasesAbandonedPool ? 1 : 0);
  cudagraph_pool_end_allocate_to_pool(device_, id_);  // what its graph may still do, late
  if (kGraphReleasesAbandonedPool) cudagraph_pool_release_pool(device_, id_);
  EndCapture({0, 2});
  cudagraph_pool_reset();
  EXPECT_FALSE(set().Contains(pool_));
}

TEST_F(PluggableAllocatorTest, RefusedScopesAreErrors) {
  BeginCapture(id_, 7);
  current_stream = Stream(2);
  EXPECT_THROW(
      cudagraph_pool_begin_allocate_to_pool(device_, id_, [](cudaStream_t) { return false; }),
      UsageError);
  EXPECT_THROW(cudagraph_pool_begin_allocate_to_pool(-1, id_, [](cudaStream_t) { return false; }),
               UsageError);
  EXPECT_EQ(PoolOf(Malloc(1000)), pool_) << "the first goes on";
  EXPECT_EQ(set().UseCount(pool_), 1);
  EndCapture(id_);
}

TEST_F(PluggableAllocatorTest, AFractionLimitsTheDevice) {
  cudagraph_pool_memory_fraction(0.25, device_);
  void* const all = Malloc(8 * kPage);
  EXPECT_THROW(Malloc(1), c10::OutOfMemoryError);
  cudagraph_pool_memory_fraction(1, device_);
  EXPECT_NE(Malloc(1), nullptr);
  Free(all);
  EXPECT_THROW(cudagraph_pool_memory_fraction(1, -1), UsageError);
}

// Torch tells nobody of captures here, and a mark would end those of all streams. One that is under
// way may be why the memory stays.
TEST_F(PluggableAllocatorTest, AMemPoolsLastSegmentGoesWithoutAMark) {
  Installed().store(native_);
  for (const bool fails : {false, true}) {
    device_ = current_device = fake_cuda::NextDevice();
    void* const segment = Malloc(kPage);
    faults::Arm(faults::Kind::kDriver, fails ? 1 : 0);
    Free(segment);
    EXPECT_EQ(faults::Disarm(), fails);
    EXPECT_EQ(Reserved(), fails ? kPage : 0);
    Malloc(kPage);
    EXPECT_EQ(host().calls()[DriverCall::kRecordDeviceEvent], 0U);
  }
}

// Whose scope ends and begins whenever it has grown; a thread that comes between finds none.
TEST_F(PluggableAllocatorTest, EagerMemoryIsThereAgainAfterACallOfTheDriverThatFailed) {
  bool failed = true;
  for (int64_t number = 1; failed; ++number) {
    device_ = current_device = fake_cuda::NextDevice();
    host().HoldEvents(true);
    ShowHooks();
    Free(Malloc(kPage, 2));
    Malloc(kPage, 3);  // grows, and what the other stream has freed is marked
    faults::Arm(faults::Kind::kDriver, number);
    try {
      Malloc(2 * kPage, 3);
    } catch (const std::exception&) {  // the pool may be closed now
    }
    failed = faults::Disarm();
    EXPECT_NO_THROW(Malloc(kPage, 3)) << "call " << number;
  }
}

TEST_F(PluggableAllocatorTest, ThreadsAllocateWhileThePoolGrows) {
  std::atomic<int> failures{0};
  for (int round = 0; round < 1000; ++round) {
    std::atomic<bool> growing{true};
    std::thread beside([&] {
      while (growing) {
        try {
          Free(Malloc(512, 2));
        } catch (const std::exception&) {
          ++failures;
        }
      }
    });
    std::vector<void*> blocks;
    for (int i = 0; i < 28; ++i) blocks.push_back(Malloc(kPage));
    growing = false;
    beside.join();
    for (void* const block : blocks) Free(block);
    // Begun anew, the pool grows anew.
    set().EndScope({~0ULL, ~0ULL});
    set().Release({~0ULL, ~0ULL});
    cudagraph_pool_reset();
    ASSERT_TRUE(set().ids().empty());
  }
  EXPECT_EQ(failures, 0);
}

}  // namespace
}  // namespace cgp
