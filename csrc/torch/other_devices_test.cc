// What other devices do with our memory: use it on their streams, reach it as peers, copy it.
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "torch/testing/graph_allocator_fixture.h"
#include "torch/testing/pluggable_functions.h"

namespace cgp {
namespace {

// Any but the default stream, whose id is 0, is one of somebody else's: those of torch need a GPU.
c10::cuda::CUDAStream TorchStream(c10::DeviceIndex device, cudaStream_t stream) {
  const c10::Device of(c10::kCUDA, device);
  const auto id = static_cast<c10::StreamId>(reinterpret_cast<uintptr_t>(stream));
  return c10::cuda::CUDAStream(c10::Stream(c10::Stream::UNSAFE, of, id));
}

class OtherDevicesTest : public GraphAllocatorTest {
 protected:
  HostDriver& host() { return fake_cuda::HostOf(DevicePools::For(device_).driver.inner()); }

  // The bytes of a block that is freed after its use on the other device's stream wait for a mark,
  // which covers that device (CudaDriverTest).
  void ExpectHeldBy(cudaStream_t stream) {
    allocator_.beginAllocateToPool(device_, id_, ThisThread());
    DataPtr used = allocator_.allocate(kPage);
    void* const where = used.get();
    allocator_.recordStream(used, TorchStream(other_, stream));
    host().HoldEvents(true);
    used.clear();
    const DataPtr meanwhile = allocator_.allocate(kPage);
    EXPECT_NE(meanwhile.get(), where) << "the other device's work on it may be running";
    const auto next_scope = [&] {
      allocator_.endAllocateToPool(device_, id_);
      allocator_.beginAllocateToPool(device_, id_, ThisThread());
    };
    next_scope();
    const DataPtr still = allocator_.allocate(kPage);
    EXPECT_NE(still.get(), where) << "nor does the end of the scope end it";
    host().CompleteEvents();
    next_scope();
    EXPECT_EQ(allocator_.allocate(kPage).get(), where);
    allocator_.endAllocateToPool(device_, id_);
    host().HoldEvents(false);
  }

  const c10::DeviceIndex other_ = fake_cuda::NextDevice();
};

TEST_F(OtherDevicesTest, AStreamOfAnotherDeviceHoldsWhatItUses) { ExpectHeldBy(Stream(2)); }

// As a value it is this device's default stream too, which allocated the block.
TEST_F(OtherDevicesTest, SoDoesItsDefaultStream) {
  current_stream = nullptr;
  ExpectHeldBy(nullptr);
}

// The base's plain copy knows addresses of cudaMalloc alone where devices are no peers.
TEST_F(OtherDevicesTest, CopiesOfOursBetweenDevicesThatAreNoPeersAreNotTheBases) {
  Graph graph(*this, id_, 7);
  graph.Begin();
  DataPtr ours = allocator_.allocate(1000);
  graph.End();
  const DataPtr bases = allocator_.allocate(1000);
  const auto passed_on = [&](void* to, const void* from, int from_device, bool peers) {
    base_.calls["memcpyAsync"] = 0;
    allocator_.memcpyAsync(to, device_, from, from_device, 8, Stream(1), peers);
    return base_.calls["memcpyAsync"] == 1;
  };
  EXPECT_FALSE(passed_on(ours.get(), bases.get(), other_, false));
  EXPECT_FALSE(passed_on(bases.get(), ours.get(), other_, false));
  EXPECT_TRUE(passed_on(ours.get(), bases.get(), other_, true));
  EXPECT_TRUE(passed_on(ours.get(), bases.get(), device_, false));
  EXPECT_TRUE(passed_on(bases.get(), bases.get(), other_, false));
  // A graph may go on using what nobody holds.
  void* const freed = ours.get();
  ours.clear();
  EXPECT_FALSE(passed_on(freed, bases.get(), other_, false));
  EXPECT_FALSE(passed_on(bases.get(), static_cast<char*>(freed) + kPage - 8, other_, false));
  EXPECT_THROW(allocator_.shareIpcHandle(freed), c10::Error);
  graph.Reset();
  allocator_.emptyCache();
  EXPECT_TRUE(passed_on(freed, bases.get(), other_, false)) << "the addresses are given back";
}

// To give memory back is to wait for the device. Another one may be at work that waits in turn for
// what this thread does next, as collectives do.
TEST_F(OtherDevicesTest, RoomIsMadeOnTheDeviceThatIsShortOfItAlone) {
  const c10::DeviceIndex here = device_;
  const auto leave_a_page = [&](c10::DeviceIndex device) {
    device_ = current_device = device;
    Graph graph(*this, id_, 7);
    graph.Begin();
    allocator_.allocate(1000).clear();
    graph.End();
    graph.Reset();
  };
  const auto held = [](c10::DeviceIndex device) {
    return DevicePools::For(device).set.Usage().reserved_bytes.current;
  };
  leave_a_page(other_);
  leave_a_page(here);
  const auto callback = c10::FreeCudaMemoryCallbacksRegistry()->Create("cudagraph_pool");
  EXPECT_TRUE(callback->Execute());
  EXPECT_FALSE(callback->Execute());
  EXPECT_EQ(held(here), 0U);
  EXPECT_EQ(held(other_), kPage);

  leave_a_page(here);
  allocator_.beginAllocateToPool(here, {0, 2}, ThisThread());
  EXPECT_THROW(allocator_.allocate(kPhysicalLimit + 1), c10::OutOfMemoryError);
  allocator_.endAllocateToPool(here, {0, 2});
  allocator_.releasePool(here, {0, 2});
  EXPECT_EQ(held(here), 0U);
  EXPECT_EQ(held(other_), kPage);
  allocator_.emptyCache();
  EXPECT_EQ(held(other_), 0U);
}

// Nobody names a CUDAPluggableAllocator's peers.
TEST_F(OtherDevicesTest, DevicesOfTheCFunctionsReachEachOther) {
  const auto host_of = [](c10::DeviceIndex device) -> HostDriver& {
    return fake_cuda::HostOf(
        DevicePools::For(device, PoolsOwner::kPluggableAllocator).driver.inner());
  };
  void* const first = cudagraph_pool_malloc(kPage, device_, Stream(1));
  void* const second = cudagraph_pool_malloc(kPage, other_, Stream(1));
  const auto address = [](void* pointer) { return reinterpret_cast<Address>(pointer); };
  EXPECT_TRUE(host_of(device_).CanAccess(address(first), kPage, other_))
      << "what was mapped before the other device came";
  EXPECT_TRUE(host_of(other_).CanAccess(address(second), kPage, device_));
  cudagraph_pool_free(first, kPage, device_, Stream(1));
  cudagraph_pool_free(second, kPage, other_, Stream(1));
}

}  // namespace
}  // namespace cgp
