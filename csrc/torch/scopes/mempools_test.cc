// torch.cuda.MemPools as pools of ours.
#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <thread>

#include "testing/pool_of.h"
#include "torch/graph_allocator.h"
#include "torch/testing/mempools_fixture.h"

namespace cgp {
namespace {

TEST_F(MemPoolTest, OneOfAnotherAllocatorOrFromBeforeIsTheBases) {
  FakeBaseAllocator its_own;
  allocator_.createOrIncrefPool(device_, id_,
                                std::shared_ptr<CUDAAllocator>(&its_own, [](CUDAAllocator*) {}));
  base_.users[other_] = 1;
  allocator_.createOrIncrefPool(device_, other_);
  const MempoolId_t not_taken{0, 3};
  allocator_.scopes().takes_mempools = false;
  allocator_.createOrIncrefPool(device_, not_taken);
  allocator_.scopes().takes_mempools = true;
  allocator_.scopes().takes_captures = false;
  const MempoolId_t disabled{0, 4};
  allocator_.createOrIncrefPool(device_, disabled);
  allocator_.scopes().takes_captures = true;
  for (const MempoolId_t& id : {id_, other_, not_taken, disabled}) {
    Enter(id);
    EXPECT_FALSE(IsOurs(allocator_.allocate(1000)));
    EXPECT_TRUE(base_.open.contains({device_, id}));
    Exit(id);
  }
  EXPECT_TRUE(DevicePools::Find(device_) == nullptr);
}

TEST_F(MemPoolTest, AnotherAllocatorCannotServeAPoolOfOurs) {
  const MemPool mempool(*this, id_);
  EXPECT_THROW(allocator_.createOrIncrefPool(
                   device_, id_, std::shared_ptr<CUDAAllocator>(&base_, [](CUDAAllocator*) {})),
               c10::Error);
  EXPECT_EQ(Users(id_), 1);
}

// transformers' continuous batching warms up in the pool, then captures into it.
TEST_F(MemPoolTest, ACaptureIntoItFindsWhatTheWarmUpLeft) {
  std::optional<MemPool> mempool(std::in_place, *this, id_);
  AllocateIn(id_, 3 * kPage).clear();
  Graph graph(*this, id_, 7), second(*this, id_, 8);
  for (Graph* each : {&graph, &second}) {
    each->Begin();
    const DataPtr inside = allocator_.allocate(3 * kPage);
    EXPECT_EQ(PoolOf(inside), pool_);
    each->End();
  }
  EXPECT_EQ(Reserved(id_), 3 * kPage);
  EXPECT_EQ(Users(id_), 3);
  EXPECT_TRUE(allocator_.scopes().IsMemPool(device_, pool_));
  EXPECT_FALSE(allocator_.scopes().IsMemPool(device_, ToPoolId(other_)));
  EXPECT_EQ(allocator_.scopes().counts.ours, 2u);
  AllocateIn(id_, kPage).clear();
  EXPECT_EQ(Reserved(id_), 4 * kPage) << "apart from the graphs";
  mempool.reset();
  EXPECT_EQ(Reserved(id_), 4 * kPage) << "the graphs need it";
  graph.Reset();
  second.Reset();
}

TEST_F(MemPoolTest, WithNoSplitBlocksShareNoPage) {
  const MemPool mempool(*this, id_, false, true);
  const DataPtr small = AllocateIn(id_, 1000), large = AllocateIn(id_, kPage + 1);
  Graph graph(*this, id_, 7);
  graph.Begin();
  const DataPtr captured = allocator_.allocate(1000);
  allocator_.allocate(3 * kPage).clear();
  graph.End();
  std::set<PageId> pages;
  size_t pieces = 0;
  for (const auto& block : pools().Snapshot(pool_).blocks) {
    for (const PhysicalPiece& piece : block.pieces) {
      pages.insert(piece.page);
      ++pieces;
    }
  }
  EXPECT_EQ(pieces, 4u);
  EXPECT_EQ(pages.size(), pieces);
  // What was asked for is told as it was, by PyTorch's allocator too.
  const PoolStats stats = pools().Stats(pool_);
  EXPECT_EQ(stats.requested_bytes, 1000 + kPage + 1 + 1000);
  EXPECT_EQ(stats.allocated_bytes, 4 * kPage);
  EXPECT_EQ(allocator_.getDeviceStats(device_).requested_bytes[0].current,
            static_cast<int64_t>(stats.requested_bytes));
  Enter(id_);
  EXPECT_THROW(allocator_.allocate(~size_t{0} - 1), c10::OutOfMemoryError);
  Exit(id_);
  graph.Reset();
}

class UseOnOomTest : public MemPoolTest {
 protected:
  void SetUp() override {
    MemPoolTest::SetUp();
    base_.largest = 1000;
  }
  bool Serves() {
    try {
      return IsOurs(allocator_.allocate(kPage));
    } catch (const c10::OutOfMemoryError&) {
      return false;
    }
  }
};

TEST_F(UseOnOomTest, WhatTheBaseHasNotAUseOnOomPoolHas) {
  const MemPool kept(*this, other_), on_oom(*this, id_, true);
  AllocateIn(other_, 3 * kPage).clear();
  AllocateIn(id_, 3 * kPage).clear();
  EXPECT_FALSE(IsOurs(allocator_.allocate(1000)));
  DataPtr served = allocator_.allocate(2 * kPage);
  EXPECT_EQ(PoolOf(served), pool_);
  void* const raw = allocator_.raw_alloc(kPage);
  EXPECT_EQ(cgp::PoolOf(pools(), reinterpret_cast<Address>(raw)), pool_);
  EXPECT_EQ(Users(id_), 1);
  EXPECT_THROW(allocator_.allocate(kPhysicalLimit), c10::OutOfMemoryError);
  EXPECT_EQ(Reserved(id_), 3 * kPage);
  void* const place = served.get();
  served.clear();
  EXPECT_EQ(AllocateIn(id_, 2 * kPage).get(), place);
  allocator_.raw_delete(raw);
  allocator_.setUseOnOOM(device_, id_, false);
  EXPECT_FALSE(Serves());
}

// A replay would write to it.
TEST_F(UseOnOomTest, NotWhileAGraphMayUseItsMemory) {
  const MemPool on_oom(*this, id_, true);
  EXPECT_TRUE(Serves());
  Graph graph(*this, id_, 7), outer(*this, other_, 8);
  graph.Begin();
  EXPECT_FALSE(IsOurs([&] {
    current_stream = Stream(2);
    return allocator_.allocate(1000);
  }()));
  EXPECT_FALSE(Serves());
  current_stream = Stream(1);
  graph.End();
  EXPECT_FALSE(Serves());
  graph.Reset();
  EXPECT_TRUE(Serves());
  outer.Begin();
  Enter(id_);
  allocator_.allocate(1000).clear();
  Exit(id_);
  outer.End();
  EXPECT_FALSE(Serves());
  outer.Reset();
  EXPECT_TRUE(Serves());
}

TEST_F(UseOnOomTest, NotInAPoolThatSomebodyAllocatesIn) {
  const MemPool on_oom(*this, id_, true);
  Enter(id_);
  std::thread([&] {
    current_device = device_;
    current_stream = Stream(2);
    EXPECT_FALSE(Serves());
  }).join();
  Exit(id_);
  SetCapture(Stream(1), 7);  // somebody captures without torch
  EXPECT_FALSE(Serves());
  SetCapture(Stream(1), 0);
  EXPECT_TRUE(Serves());
}

}  // namespace
}  // namespace cgp
