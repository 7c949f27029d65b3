// Whose pool is it, and who allocates in it now.
#include <c10/cuda/CUDAStream.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "testing/host_driver.h"
#include "testing/pool_of.h"
#include "torch/graph_allocator.h"
#include "torch/testing/fake_faults.h"
#include "torch/testing/graph_allocator_fixture.h"

namespace cgp {
namespace {

class GraphScopesTest : public GraphAllocatorTest {};

TEST_F(GraphScopesTest, ThreadsCaptureOnTheirPerThreadStreamsAtOnce) {
  const auto pool_of_next = [&] {
    const DataPtr data = allocator_.allocate(1000);
    return cgp::PoolOf(pools(), reinterpret_cast<Address>(data.get()));
  };
  current_stream = cudaStreamPerThread;
  Graph graph(*this, id_, 7);
  graph.Begin();
  std::thread([&] {
    current_device = device_;
    current_stream = cudaStreamPerThread;
    Graph other(*this, {0, 2}, 8);
    other.Begin();
    EXPECT_EQ(pool_of_next(), ToPoolId({0, 2}));
    other.End();
    other.Reset();
  }).join();
  EXPECT_EQ(pool_of_next(), ToPoolId(id_));
  graph.End();
  graph.Reset();
  ExpectNothingIsLeft();
}

// What torch.compile's graph trees do.
TEST_F(GraphScopesTest, ATreeWarmsUpRecordsAndGoesBackInAPoolOfOurs) {
  Graph empty(*this, id_, 7), recording(*this, id_, 8);
  empty.Begin();
  empty.End();
  allocator_.beginAllocateToPool(device_, id_, ThisThread());
  EXPECT_FALSE(allocator_.capturing());
  const DataPtr warmed_up = allocator_.allocate(1000);
  EXPECT_TRUE(IsOurs(warmed_up));
  EXPECT_EQ(warmed_up.get_deleter(), allocator_.raw_deleter());
  allocator_.endAllocateToPool(device_, id_);
  allocator_.releasePool(device_, id_);
  recording.Begin();
  DataPtr output = allocator_.allocate(3000000);
  DataPtr dies = allocator_.allocate(1000);
  recording.End();

  const auto state = allocator_.getCheckpointState(device_, id_);
  void* const died = dies.get();
  dies.clear();
  EXPECT_FALSE(
      allocator_.checkPoolLiveAllocations(device_, id_, {warmed_up.get(), output.get(), died}));
  auto delta = allocator_.setCheckpointPoolState(device_, state);
  EXPECT_EQ(delta.ptrs_freed.size(), 2u);
  EXPECT_TRUE(
      allocator_.checkPoolLiveAllocations(device_, id_, {warmed_up.get(), output.get(), died}));
  ASSERT_EQ(delta.dataptrs_allocd.size(), 3u);
  for (DataPtr& data : delta.dataptrs_allocd) {
    EXPECT_EQ(data.get_deleter(), allocator_.raw_deleter());
    EXPECT_EQ(data.get(), data.get_context());
    EXPECT_EQ(data.device(), c10::Device(c10::kCUDA, device_));
    data.release_context();  // as torch does with those whose storages are gone
  }
  allocator_.raw_delete(died);
  EXPECT_TRUE(allocator_.checkPoolLiveAllocations(device_, id_, {warmed_up.get(), output.get()}));
  EXPECT_FALSE(base_.users.contains(id_));
  EXPECT_EQ(base_.calls["getCheckpointState"], 0);
  Graph third(*this, id_, 9);
  third.Begin();
  EXPECT_THROW(allocator_.getCheckpointState(device_, id_), UsageError);
  EXPECT_THROW(allocator_.setCheckpointPoolState(device_, state), UsageError);
  third.End();
  for (Graph* graph : {&third, &recording, &empty}) graph->Reset();
  allocator_.emptyCache();
  EXPECT_EQ(pools().ids().size(), 1u) << "tensors live in it";
}

// torch compares the deleter of all trees' tensors with one: see the header.
TEST_F(GraphScopesTest, TreesFromBeforeHaveTheDeleterOfNewOnes) {
  const MempoolId_t old{0, 9};
  base_.users[old] = 1;
  allocator_.beginAllocateToPool(device_, old, ThisThread());
  DataPtr output = allocator_.allocate(1000);
  EXPECT_FALSE(IsOurs(output));
  EXPECT_EQ(output.get_deleter(), allocator_.raw_deleter());
  allocator_.endAllocateToPool(device_, old);
  allocator_.releasePool(device_, old);

  auto delta =
      allocator_.setCheckpointPoolState(device_, allocator_.getCheckpointState(device_, old));
  EXPECT_EQ(base_.calls["getCheckpointState"], 1);
  ASSERT_EQ(delta.dataptrs_allocd.size(), 1u);
  EXPECT_EQ(delta.dataptrs_allocd[0].get_deleter(), allocator_.raw_deleter());
  delta.dataptrs_allocd[0].release_context();

  // The base is shown its own deleter, and has the block back.
  const auto id = static_cast<c10::StreamId>(ToStreamId(Stream(2)));
  const c10::Stream stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device_), id);
  allocator_.recordStream(output, c10::cuda::CUDAStream(stream));
  EXPECT_EQ(base_.calls["recordStream"], 1);
  void* const pointer = output.get();
  output.clear();
  EXPECT_FALSE(FakeBaseAllocator::live.contains(pointer));
  EXPECT_EQ(allocator_.allocate(1000).get_deleter(), base_.raw_deleter()) << "eager memory";
}

TEST_F(GraphScopesTest, ARegisteredPoolIsOursFromTheStart) {
  allocator_.scopes().Register(device_, ToPoolId(id_));
  EXPECT_THROW(allocator_.scopes().Register(device_, ToPoolId(id_)), UsageError);
  allocator_.beginAllocateToPool(device_, id_, ThisThread());
  EXPECT_TRUE(IsOurs(allocator_.allocate(1000)));
  allocator_.endAllocateToPool(device_, id_);
  allocator_.releasePool(device_, id_);
  EXPECT_EQ(allocator_.getPoolUseCount(device_, id_), 1);
  allocator_.scopes().takes_captures = false;
  allocator_.scopes().takes_captures = true;
  allocator_.releasePool(device_, id_);
  EXPECT_THROW(allocator_.releasePool(device_, id_), UsageError);
  allocator_.emptyCache();
  EXPECT_TRUE(pools().ids().empty());
}

TEST_F(GraphScopesTest, NestedAndDoubleScopesAreRefusedAndChangeNothing) {
  Graph outer(*this, id_, 7);
  outer.Begin();
  Graph inner(*this, {0, 2}, 8);
  EXPECT_THROW(allocator_.beginAllocateToPool(device_, {0, 2}, inner.Filter()), c10::Error);
  EXPECT_FALSE(pools().Contains({0, 2}));
  current_stream = Stream(2);
  Graph same(*this, id_, 9);
  EXPECT_THROW(allocator_.beginAllocateToPool(device_, id_, same.Filter()), UsageError);
  current_stream = Stream(1);
  EXPECT_EQ(allocator_.getPoolUseCount(device_, id_), 1);
  EXPECT_TRUE(IsOurs(allocator_.allocate(1000)));
  outer.End();
  EXPECT_THROW(allocator_.endAllocateToPool(device_, id_), c10::Error);
  outer.Reset();
  EXPECT_THROW(allocator_.releasePool(device_, id_), UsageError);
}

TEST_F(GraphScopesTest, SwitchedOffNewCapturesGoToTheBaseAndOldPoolsGoOn) {
  Graph first(*this, id_, 7);
  first.Begin();
  const DataPtr inside = allocator_.allocate(1000);
  first.End();
  allocator_.scopes().takes_captures = false;
  Graph second(*this, id_, 8);
  second.Begin();
  EXPECT_TRUE(IsOurs(allocator_.allocate(1000)));
  second.End();
  Graph own(*this, {3, 0}, 9);
  own.Begin();
  EXPECT_FALSE(IsOurs(allocator_.allocate(1000)));
  own.End();
  own.Reset();
  EXPECT_EQ(base_.users.at({3, 0}), 0);
  EXPECT_EQ(allocator_.scopes().counts.while_stopped, 1U);
  allocator_.scopes().takes_captures = false;
}

}  // namespace
}  // namespace cgp
