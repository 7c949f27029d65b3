// torch.cuda.MemPools that are used within a capture: what dies there, and how long their scopes
// last.
#include <gtest/gtest.h>

#include <optional>
#include <thread>

#include "torch/testing/mempools_fixture.h"

namespace cgp {
namespace {

class NestedTest : public MemPoolTest {
 protected:
  // use_mem_pool() in a capture.
  DataPtr AllocateNested(MempoolId_t id) {
    Enter(id);
    DataPtr data = allocator_.allocate(kPage);
    EXPECT_EQ(PoolOf(data), ToPoolId(id));
    Exit(id);
    return data;
  }

  HostGraphs& nodes() {
    return fake_cuda::HostOf(DevicePools::For(device_).driver.inner()).graphs();
  }
  // `main` captures, as `id`, and `side` goes on behind its first node.
  CaptureId Fork(cudaStream_t main, cudaStream_t side, CaptureId id) {
    const CaptureId capture = nodes().Begin(ToStreamId(main));
    nodes().Launch(ToStreamId(main));
    nodes().Wait(ToStreamId(side), nodes().Record(ToStreamId(main)));
    SetCapture(side, id);
    return capture;
  }
  void End(CaptureId capture, cudaStream_t side) {
    nodes().End(capture);
    SetCapture(side, 0);
  }
};

// A conditional node's, which is a capture of its own and ends before the graph's.
TEST_F(NestedTest, WhatItFreesInABodyOtherStreamsDoNotGet) {
  const MemPool mempool(*this, id_);
  Graph graph(*this, other_, 7);
  graph.Begin();
  const CaptureId capture = Fork(Stream(1), Stream(2), 7);
  allocator_.endAllocateToPool(device_, other_);
  Graph body(*this, other_, 70);
  allocator_.beginAllocateToPool(device_, other_, body.Filter());
  const CaptureId bodys = nodes().Begin(ToStreamId(Stream(4)));
  current_stream = Stream(4);
  SetCapture(Stream(4), 70);
  DataPtr data = AllocateNested(id_);
  void* const place = data.get();
  nodes().Launch(ToStreamId(Stream(4)));
  data.clear();
  End(bodys, Stream(4));
  current_stream = Stream(1);
  allocator_.endAllocateToPool(device_, other_);
  allocator_.beginAllocateToPool(device_, other_, graph.Filter());
  nodes().Launch(ToStreamId(Stream(1)));
  current_stream = Stream(2);
  EXPECT_NE(AllocateNested(id_).get(), place);
  current_stream = Stream(1);
  End(capture, Stream(2));
  graph.End();
  graph.Reset();
}

TEST_F(NestedTest, ScopesThatAreStillOpenEndWithTheCapture) {
  const MemPool mempool(*this, id_);
  for (const bool fails : {false, true}) {
    Graph graph(*this, other_, fails ? 8 : 7);
    graph.Begin();
    Enter(id_);
    const DataPtr inside = allocator_.allocate(1000);
    if (fails) {
      graph.Fail();
    } else {
      graph.End();
      EXPECT_FALSE(allocator_.capturing());
    }
    EXPECT_FALSE(IsOurs(allocator_.allocate(1000)));
    Graph next(*this, other_, fails ? 18 : 17);  // on the same stream
    next.Begin();
    EXPECT_EQ(Users(id_), 2);
    next.End();
    next.Reset();
    Exit(id_);
    EXPECT_EQ(Users(id_), 1);
    if (!fails) graph.Reset();
  }
  if (kGraphReleasesAbandonedPool) {
    allocator_.endAllocateToPool(device_, other_);
    allocator_.releasePool(device_, other_);
  }
}

// Its MemPools have several scopes at once: those that captures may go on with, and an open one.
TEST_F(NestedTest, TheBasesScopesEndWithTheirOwnCaptures) {
  allocator_.scopes().takes_mempools = false;
  allocator_.createOrIncrefPool(device_, id_);
  Graph graph(*this, other_, 7);
  graph.Begin();
  Enter(id_);
  Exit(id_);
  std::thread([&] {
    current_device = device_;
    current_stream = Stream(2);
    Graph beside(*this, {0, 3}, 8);
    beside.Begin();
    Enter(id_);
    Exit(id_);
    EXPECT_TRUE(IsOurs(allocator_.allocate(1000))) << "else the graph gets eager memory";
    beside.End();
    beside.Reset();
  }).join();
  Enter(id_);
  EXPECT_FALSE(IsOurs(allocator_.allocate(1000)));
  Exit(id_);
  graph.End();
  graph.Reset();
  allocator_.releasePool(device_, id_);
}

// A replay writes to it.
TEST_F(NestedTest, ItsMemoryIsKeptForTheGraph) {
  for (const bool bases : {false, true}) {
    if (bases) base_.users[other_] = 1;
    Graph graph(*this, other_, bases ? 8 : 7);
    graph.Begin();
    {
      const MemPool mempool(*this, id_);
      AllocateNested(id_).clear();
      AllocateNested(id_).clear();
    }
    graph.End();
    allocator_.emptyCache();
    EXPECT_EQ(Reserved(id_), kPage);
    graph.Reset();
    if (bases) allocator_.releasePool(device_, other_);
    allocator_.emptyCache();
    EXPECT_EQ(Reserved(id_), 0u);
  }
}

TEST_F(NestedTest, AScopeInItsOwnPoolWhileItIsPausedTakesNoUserFromAGraph) {
  Graph graph(*this, other_, 7);
  graph.Begin();
  allocator_.allocate(kPage).clear();
  allocator_.endAllocateToPool(device_, other_);
  for (int times = 0; times < 2; ++times) AllocateNested(other_).clear();
  allocator_.beginAllocateToPool(device_, other_, ThisThread());
  EXPECT_EQ(Users(other_), 1);
  graph.End();
  allocator_.emptyCache();
  EXPECT_EQ(Reserved(other_), kPage) << "its replays write there";
  graph.Reset();
  allocator_.emptyCache();
  EXPECT_EQ(Reserved(other_), 0u);
}

TEST_F(NestedTest, AnotherGraphOfItsThreadDoesNotGoOnWithAGraphsPausedRoute) {
  Graph graph(*this, other_, 7), beside(*this, {0, 3}, 8);
  graph.Begin();
  allocator_.allocate(kPage).clear();
  allocator_.endAllocateToPool(device_, other_);
  current_stream = Stream(2);
  beside.Begin();
  EXPECT_THROW(Enter(other_), UsageError) << "nothing would keep its memory for the other";
  beside.End();
  current_stream = Stream(1);
  allocator_.beginAllocateToPool(device_, other_, graph.Filter());
  graph.End();
  EXPECT_EQ(Users(other_), 1);
  graph.Reset();
  beside.Reset();
}

TEST_F(NestedTest, TwoPoolsMayHaveMemoryOfEachOthersGraphs) {
  std::optional<MemPool> first(std::in_place, *this, id_), second(std::in_place, *this, other_);
  Graph in_first(*this, id_, 7), in_second(*this, other_, 8);
  in_first.Begin();
  AllocateNested(other_).clear();
  in_first.End();
  in_second.Begin();
  AllocateNested(id_).clear();
  in_second.End();
  first.reset();
  second.reset();
  in_first.Reset();
  allocator_.emptyCache();
  EXPECT_EQ(Reserved(id_), kPage);
  in_second.Reset();
}

}  // namespace
}  // namespace cgp
