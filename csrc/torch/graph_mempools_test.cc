// torch.cuda.MemPools as pools of ours.
#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "torch/graph_allocator.h"
#include "torch/graph_allocator_fixture.h"

namespace cgp {
namespace {

class MemPoolTest : public GraphAllocatorTest {
 protected:
  // What at::cuda::MemPool does, in its order. An error in its destructor ends the process.
  class MemPool {
   public:
    MemPool(MemPoolTest& test, MempoolId_t id, bool use_on_oom = false, bool no_split = false)
        : test_(test), id_(id) {
      test.allocator_.createOrIncrefPool(test.device_, id);
      if (use_on_oom) test.allocator_.setUseOnOOM(test.device_, id, true);
      if (no_split) test.allocator_.setNoSplit(test.device_, id);
    }
    ~MemPool() {
      test_.allocator_.setUseOnOOM(test_.device_, id_, false);
      test_.allocator_.releasePool(test_.device_, id_);
      test_.allocator_.emptyCache(id_);
    }
    MemPool(const MemPool&) = delete;
    MemPool& operator=(const MemPool&) = delete;

   private:
    MemPoolTest& test_;
    const MempoolId_t id_;
  };

  void TearDown() override {
    allocator_.emptyCache();
    EXPECT_TRUE(pools().ids().empty());
    EXPECT_FALSE(allocator_.capturing());
    EXPECT_TRUE(base_.open.empty());
    pools().Check();
  }

  // torch.cuda.use_mem_pool
  void Enter(MempoolId_t id) { allocator_.beginAllocateToPool(device_, id, ThisThread()); }
  void Exit(MempoolId_t id) {
    allocator_.endAllocateToPool(device_, id);
    allocator_.releasePool(device_, id);
  }

  DataPtr AllocateIn(MempoolId_t id, size_t bytes) {
    Enter(id);
    DataPtr data = allocator_.allocate(bytes);
    Exit(id);
    EXPECT_EQ(PoolOf(data), ToPoolId(id));
    return data;
  }
  std::optional<PoolId> PoolOf(const DataPtr& data) {
    return pools().PoolOf(reinterpret_cast<Address>(data.get()));
  }
  uint64_t Reserved(MempoolId_t id) {
    return pools().Contains(ToPoolId(id)) ? pools().Stats(ToPoolId(id)).reserved_bytes : 0;
  }
  int Users(MempoolId_t id) { return allocator_.getPoolUseCount(device_, id); }

  const MempoolId_t other_{0, 2};
  const PoolId pool_ = ToPoolId(id_);
};

TEST_F(MemPoolTest, EagerWorkAllocatesInAPoolOfOurs) {
  DataPtr lives;
  {
    const MemPool mempool(*this, id_);
    EXPECT_EQ(Users(id_), 1);
    Enter(id_);
    EXPECT_EQ(Users(id_), 2);
    EXPECT_FALSE(allocator_.capturing());
    DataPtr dies = allocator_.allocate(3 * kPage);
    lives = allocator_.allocate(kPage);
    std::thread([&] {
      current_device = device_;
      EXPECT_FALSE(IsOurs(allocator_.allocate(1000))) << "it is one thread's";
    }).join();
    Exit(id_);
    EXPECT_EQ(Users(id_), 1);
    EXPECT_EQ(PoolOf(lives), pool_);
    EXPECT_FALSE(IsOurs(allocator_.allocate(1000)));
    dies.clear();
    allocator_.emptyCache();
    EXPECT_EQ(Reserved(id_), 4 * kPage) << "it has a user";
  }
  EXPECT_EQ(Reserved(id_), kPage);
  EXPECT_TRUE(base_.users.empty());
  EXPECT_EQ(base_.calls["setUseOnOOM"] + base_.calls["emptyCache"], 1) << "emptyCache() of all";
}

TEST_F(MemPoolTest, OneOfAnotherAllocatorOrFromBeforeIsTheBases) {
  FakeBaseAllocator its_own;
  allocator_.createOrIncrefPool(device_, id_,
                                std::shared_ptr<CUDAAllocator>(&its_own, [](CUDAAllocator*) {}));
  base_.users[other_] = 1;
  allocator_.createOrIncrefPool(device_, other_);
  const MempoolId_t not_taken{0, 3};
  allocator_.SetTakesMemPools(false);
  allocator_.createOrIncrefPool(device_, not_taken);
  allocator_.SetTakesMemPools(true);
  allocator_.StopTakingCaptures([] {});
  const MempoolId_t disabled{0, 4};
  allocator_.createOrIncrefPool(device_, disabled);
  allocator_.TakeCaptures();
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
  EXPECT_TRUE(allocator_.IsMemPool(device_, pool_));
  EXPECT_FALSE(allocator_.IsMemPool(device_, ToPoolId(other_)));
  EXPECT_EQ(allocator_.capture_counts().ours, 2u);
  AllocateIn(id_, kPage).clear();  // behind the replays
  mempool.reset();
  EXPECT_EQ(Reserved(id_), 3 * kPage) << "the graphs need it";
  graph.Reset();
  second.Reset();
}

// Stock: use_count > 0.
TEST_F(MemPoolTest, ItIsCapturedIntoAgainAfterItsLastGraphAndAfterItself) {
  std::optional<MemPool> mempool(std::in_place, *this, id_);
  for (CaptureId capture = 7; capture < 10; ++capture) {
    Graph graph(*this, id_, capture);
    graph.Begin();
    EXPECT_EQ(PoolOf(allocator_.allocate(1000)), pool_);
    graph.End();
    graph.Reset();
    if (capture == 8) mempool.reset();
  }
}

// Stock: captures_underway.empty().
TEST_F(MemPoolTest, ItMayGoInTheMiddleOfACapture) {
  std::optional<MemPool> captured(std::in_place, *this, id_), beside(std::in_place, *this, other_);
  AllocateIn(other_, kPage).clear();
  Graph graph(*this, id_, 7);
  graph.Begin();
  const DataPtr inside = allocator_.allocate(kPage);
  captured.reset();
  std::thread([&] { beside.reset(); }).join();
  EXPECT_EQ(Reserved(other_), kPage) << "for later";
  EXPECT_EQ(PoolOf(allocator_.allocate(kPage)), pool_);
  graph.End();
  allocator_.emptyCache();
  EXPECT_EQ(Reserved(other_), 0u);
  EXPECT_EQ(Reserved(id_), 2 * kPage);
  graph.Reset();
}

TEST_F(MemPoolTest, ACaptureMayFailInIt) {
  const MemPool mempool(*this, id_);
  {
    Graph failed(*this, id_, 7);
    failed.Begin();
    allocator_.allocate(1000).clear();
    failed.Fail();
  }
  const DataPtr eager = AllocateIn(id_, 1000);
  Graph next(*this, id_, 8);
  next.Begin();
  EXPECT_EQ(PoolOf(allocator_.allocate(1000)), pool_);
  next.End();
  next.Reset();
  if (kGraphReleasesAbandonedPool) {
    allocator_.endAllocateToPool(device_, id_);
    allocator_.releasePool(device_, id_);
  }
  EXPECT_EQ(Users(id_), 1);
}

TEST_F(MemPoolTest, ItGivesBackItsOwnMemoryAlone) {
  std::optional<MemPool> mempool(std::in_place, *this, id_);
  AllocateIn(id_, kPage).clear();
  Graph graph(*this, other_, 7);
  graph.Begin();
  allocator_.allocate(kPage).clear();
  graph.End();
  graph.Reset();
  mempool.reset();
  EXPECT_EQ(Reserved(id_), 0u);
  EXPECT_EQ(Reserved(other_), kPage);
}

TEST_F(MemPoolTest, ItGoesAlsoWhereTheDriverFails) {
  std::optional<MemPool> mempool(std::in_place, *this, id_);
  AllocateIn(id_, kPage).clear();
  faults::Arm(faults::Kind::kDriver, 1);
  mempool.reset();
  EXPECT_TRUE(faults::Disarm());
  EXPECT_EQ(Reserved(id_), kPage) << "for the next time";
}

TEST_F(MemPoolTest, ItsSnapshotShowsItAlone) {
  const MemPool mempool(*this, id_), other(*this, other_);
  const DataPtr inside = AllocateIn(id_, kPage), elsewhere = AllocateIn(other_, kPage);
  for (const bool with_traces : {true, false}) {
    const auto segments = allocator_.snapshot(id_, with_traces).segments;
    ASSERT_EQ(segments.size(), 1u);
    EXPECT_EQ(segments[0].address, reinterpret_cast<size_t>(inside.get()));
    EXPECT_EQ(segments[0].owner_private_pool_id, id_);
  }
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
  Enter(id_);
  EXPECT_THROW(allocator_.allocate(~size_t{0} - 1), c10::OutOfMemoryError);
  Exit(id_);
  graph.Reset();
}

class LendingTest : public MemPoolTest {
 protected:
  void SetUp() override {
    MemPoolTest::SetUp();
    base_.largest = 1000;
  }
  bool Lends() {
    try {
      return IsOurs(allocator_.allocate(kPage));
    } catch (const c10::OutOfMemoryError&) {
      return false;
    }
  }
};

TEST_F(LendingTest, WhatTheBaseHasNotAUseOnOomPoolLends) {
  const MemPool kept(*this, other_), lends(*this, id_, true);
  AllocateIn(other_, 3 * kPage).clear();
  AllocateIn(id_, 3 * kPage).clear();
  EXPECT_FALSE(IsOurs(allocator_.allocate(1000)));
  DataPtr lent = allocator_.allocate(2 * kPage);
  EXPECT_EQ(PoolOf(lent), pool_);
  void* const raw = allocator_.raw_alloc(kPage);
  EXPECT_EQ(pools().PoolOf(reinterpret_cast<Address>(raw)), pool_);
  EXPECT_EQ(Users(id_), 1);
  EXPECT_THROW(allocator_.allocate(kPhysicalLimit), c10::OutOfMemoryError);
  EXPECT_EQ(Reserved(id_), 3 * kPage);
  void* const place = lent.get();
  lent.clear();
  EXPECT_EQ(AllocateIn(id_, 2 * kPage).get(), place);
  allocator_.raw_delete(raw);
  allocator_.setUseOnOOM(device_, id_, false);
  EXPECT_FALSE(Lends());
}

TEST_F(LendingTest, ItLendsWholePagesWithNoSplit) {
  base_.largest = 10;
  const MemPool lends(*this, id_, true, true);
  const DataPtr lent = allocator_.allocate(1000);
  EXPECT_EQ(pools().At(reinterpret_cast<Address>(lent.get()))->block.bytes, kPage);
}

// A replay would write to it.
TEST_F(LendingTest, NotWhileAGraphMayUseItsMemory) {
  const MemPool lends(*this, id_, true);
  EXPECT_TRUE(Lends());
  Graph graph(*this, id_, 7), outer(*this, other_, 8);
  graph.Begin();
  EXPECT_FALSE(IsOurs([&] {
    current_stream = Stream(2);
    return allocator_.allocate(1000);
  }()));
  EXPECT_FALSE(Lends());
  current_stream = Stream(1);
  graph.End();
  EXPECT_FALSE(Lends());
  graph.Reset();
  EXPECT_TRUE(Lends());
  outer.Begin();
  Enter(id_);
  allocator_.allocate(1000).clear();
  Exit(id_);
  outer.End();
  EXPECT_FALSE(Lends());
  outer.Reset();
  EXPECT_TRUE(Lends());
}

TEST_F(LendingTest, NotInAPoolThatSomebodyAllocatesIn) {
  const MemPool lends(*this, id_, true);
  Enter(id_);
  std::thread([&] {
    current_device = device_;
    current_stream = Stream(2);
    EXPECT_FALSE(Lends());
  }).join();
  Exit(id_);
  SetCapture(Stream(1), 7);  // somebody captures without torch
  EXPECT_FALSE(Lends());
  SetCapture(Stream(1), 0);
  EXPECT_TRUE(Lends());
}

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
};

TEST_F(NestedTest, InACaptureTheNewestTakesWhatIsCaptured) {
  const MemPool mempool(*this, id_);
  Graph graph(*this, other_, 7);
  graph.Begin();
  Enter(id_);
  EXPECT_EQ(Users(id_), 2);
  EXPECT_EQ(PoolOf(allocator_.allocate(kPage)), pool_);
  current_stream = Stream(9);
  EXPECT_FALSE(IsOurs(allocator_.allocate(1000))) << "is not captured";
  current_stream = Stream(1);
  Exit(id_);
  EXPECT_EQ(Users(id_), 1);
  EXPECT_EQ(PoolOf(allocator_.allocate(1000)), ToPoolId(other_));
  AllocateNested(id_).clear();
  graph.End();
  EXPECT_EQ(allocator_.capture_counts().ours, 1u);
  EXPECT_FALSE(allocator_.capturing());
  AllocateIn(id_, kPage).clear();
  graph.Reset();
}

// Nothing in the graph orders them.
TEST_F(NestedTest, WhatItFreesOtherStreamsDoNotGet) {
  HostGraphs& nodes = fake_cuda::HostOf(DevicePools::For(device_).driver().inner()).graphs();
  const StreamId main = ToStreamId(Stream(1)), side = ToStreamId(Stream(2));
  const MemPool mempool(*this, id_);
  Graph graph(*this, other_, 7);
  graph.Begin();
  const CaptureId capture = nodes.Begin(main);
  nodes.Launch(main);
  nodes.Wait(side, nodes.Record(main));
  SetCapture(Stream(2), 7);
  current_stream = Stream(2);
  DataPtr data = AllocateNested(id_);
  void* const place = data.get();
  nodes.Launch(side);
  data.clear();
  current_stream = Stream(1);
  const DataPtr beside = AllocateNested(id_);
  EXPECT_NE(beside.get(), place);
  nodes.Wait(main, nodes.Record(side));
  EXPECT_EQ(AllocateNested(id_).get(), place) << "joined";
  nodes.End(capture);
  SetCapture(Stream(2), 0);
  graph.End();
  graph.Reset();
}

// A conditional node's, which is a capture of its own and ends before the graph's.
TEST_F(NestedTest, WhatItFreesInABodyOtherStreamsDoNotGet) {
  HostGraphs& nodes = fake_cuda::HostOf(DevicePools::For(device_).driver().inner()).graphs();
  const StreamId main = ToStreamId(Stream(1)), side = ToStreamId(Stream(2));
  const MemPool mempool(*this, id_);
  Graph graph(*this, other_, 7);
  graph.Begin();
  const CaptureId capture = nodes.Begin(main);
  nodes.Launch(main);
  nodes.Wait(side, nodes.Record(main));
  SetCapture(Stream(2), 7);
  allocator_.endAllocateToPool(device_, other_);
  Graph body(*this, other_, 70);
  allocator_.beginAllocateToPool(device_, other_, body.Filter());
  const CaptureId bodys = nodes.Begin(ToStreamId(Stream(4)));
  current_stream = Stream(4);
  SetCapture(Stream(4), 70);
  DataPtr data = AllocateNested(id_);
  void* const place = data.get();
  nodes.Launch(ToStreamId(Stream(4)));
  data.clear();
  nodes.End(bodys);
  SetCapture(Stream(4), 0);
  current_stream = Stream(1);
  allocator_.endAllocateToPool(device_, other_);
  allocator_.beginAllocateToPool(device_, other_, graph.Filter());
  nodes.Launch(main);
  current_stream = Stream(2);
  EXPECT_NE(AllocateNested(id_).get(), place);
  current_stream = Stream(1);
  nodes.End(capture);
  SetCapture(Stream(2), 0);
  graph.End();
  for (int user = 0; user < 3; ++user) graph.Reset();
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

TEST_F(NestedTest, AnotherThreadsCaptureDoesNotGoOnWithAScope) {
  const MemPool mempool(*this, id_);
  Graph graph(*this, other_, 7);
  graph.Begin();
  AllocateNested(id_).clear();
  std::thread([&] {
    current_device = device_;
    current_stream = Stream(2);
    Graph beside(*this, {0, 3}, 8);
    beside.Begin();
    EXPECT_THROW(Enter(id_), c10::Error);
    beside.End();
    beside.Reset();
  }).join();
  AllocateNested(id_).clear();
  graph.End();
  graph.Reset();
}

// Its MemPools have several scopes at once: those that captures may go on with, and an open one.
TEST_F(NestedTest, TheBasesScopesEndWithTheirOwnCaptures) {
  allocator_.SetTakesMemPools(false);
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

TEST_F(NestedTest, ItsMemoryIsKeptForEachGraphOfTheThreadThatUsesIt) {
  std::optional<MemPool> mempool(std::in_place, *this, id_);
  Graph first(*this, other_, 7), second(*this, {0, 3}, 8);
  first.Begin();
  AllocateNested(id_).clear();
  current_stream = Stream(2);
  second.Begin();
  AllocateNested(id_).clear();
  second.End();
  current_stream = Stream(1);
  first.End();
  first.Reset();
  mempool.reset();
  allocator_.emptyCache();
  EXPECT_EQ(Reserved(id_), kPage);
  second.Reset();
  allocator_.emptyCache();
  EXPECT_EQ(Reserved(id_), 0u);
}

// It lasts as long as the last of them.
TEST_F(NestedTest, WhatItFreesInTheOtherGraphOfItsThreadOtherStreamsDoNotGet) {
  HostGraphs& nodes = fake_cuda::HostOf(DevicePools::For(device_).driver().inner()).graphs();
  const StreamId main = ToStreamId(Stream(2)), side = ToStreamId(Stream(3));
  const MemPool mempool(*this, id_);
  Graph first(*this, other_, 7), second(*this, {0, 3}, 8);
  first.Begin();
  AllocateNested(id_).clear();
  current_stream = Stream(2);
  second.Begin();
  const CaptureId capture = nodes.Begin(main);
  nodes.Launch(main);
  nodes.Wait(side, nodes.Record(main));
  SetCapture(Stream(3), 8);
  DataPtr data = AllocateNested(id_);
  void* const place = data.get();
  nodes.Launch(main);
  data.clear();
  current_stream = Stream(1);
  first.End();
  current_stream = Stream(3);
  EXPECT_NE(AllocateNested(id_).get(), place);
  nodes.End(capture);
  SetCapture(Stream(3), 0);
  current_stream = Stream(2);
  second.End();
  first.Reset();
  second.Reset();
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
