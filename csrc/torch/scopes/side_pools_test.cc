#include "torch/scopes/side_pools.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <list>
#include <map>
#include <set>

#include "torch/testing/graph_allocator_fixture.h"

namespace cgp {
namespace {

class SidePoolsTest : public GraphAllocatorTest {
 protected:
  // What a storage from before enable() does.
  DataPtr AllocateAtTheBase() { return base_.allocate(1000); }
  // Of the base; {0, 0}: eager memory.
  MempoolId_t PoolOf(const DataPtr& data) const {
    const auto pool = base_.pool_of.find(data.get());
    return pool == base_.pool_of.end() ? MempoolId_t{0, 0} : pool->second;
  }
  int UsersOf(MempoolId_t pool) const {
    const auto users = base_.users.find(pool);
    return users == base_.users.end() ? 0 : users->second;
  }
  int UsersOfAll() const {
    int sum = 0;
    for (const auto& [pool, users] : base_.users) sum += users;
    return sum;
  }
};

TEST_F(SidePoolsTest, WhatACaptureAsksTheBaseForIsKeptForItsGraph) {
  Graph graph(*this, id_, 7);
  graph.Begin();
  const DataPtr direct = AllocateAtTheBase();
  const DataPtr ours = allocator_.allocate(1000);
  current_stream = Stream(2);
  const DataPtr eager = AllocateAtTheBase();
  const DataPtr passed_on = allocator_.allocate(1000);
  current_stream = Stream(1);
  graph.End();
  const DataPtr after = AllocateAtTheBase();

  EXPECT_TRUE(IsOurs(ours));
  const MempoolId_t side_pool = PoolOf(direct);
  EXPECT_NE(side_pool, (MempoolId_t{0, 0}));
  EXPECT_NE(side_pool, id_) << "the base does not know whose pool it is";
  for (const DataPtr* elsewhere : {&eager, &passed_on, &after}) {
    EXPECT_EQ(PoolOf(*elsewhere), (MempoolId_t{0, 0}));
  }
  EXPECT_EQ(UsersOf(side_pool), 1);
  graph.Reset();
  EXPECT_EQ(UsersOf(side_pool), 0) << "the base may have it back";
}

TEST_F(SidePoolsTest, AFailedCapturesSidePoolIsGivenBack) {
  Graph failed(*this, id_, 7);
  failed.Begin();
  const DataPtr direct = AllocateAtTheBase();
  failed.Fail();
  EXPECT_EQ(PoolOf(AllocateAtTheBase()), (MempoolId_t{0, 0})) << "and its filter is not asked";
  allocator_.scopes().EndFailed(device_, id_);
  EXPECT_TRUE(base_.open.empty());
  if (kGraphReleasesAbandonedPool) failed.Reset();
  EXPECT_EQ(UsersOfAll(), 0);
}

TEST_F(SidePoolsTest, ACheckpointIsOfTheSidePoolToo) {
  Graph graph(*this, id_, 7);
  graph.Begin();
  const DataPtr ours = allocator_.allocate(1000);
  graph.End();
  EXPECT_TRUE(allocator_.checkPoolLiveAllocations(device_, id_, {ours.get()}));
  allocator_.getCheckpointState(device_, id_);
  EXPECT_EQ(base_.calls["getCheckpointState"], 0) << "nothing is there";

  Graph next(*this, id_, 8);
  next.Begin();
  const DataPtr direct = AllocateAtTheBase();
  next.End();
  EXPECT_TRUE(allocator_.checkPoolLiveAllocations(device_, id_, {ours.get(), direct.get()}));
  EXPECT_FALSE(allocator_.checkPoolLiveAllocations(device_, id_, {ours.get()}));
  EXPECT_FALSE(allocator_.checkPoolLiveAllocations(device_, id_, {direct.get()}));
  const auto checkpoint = allocator_.getCheckpointState(device_, id_);
  auto delta = allocator_.setCheckpointPoolState(device_, checkpoint);
  const std::set<void*> both{ours.get(), direct.get()};
  EXPECT_EQ(std::set<void*>(delta.ptrs_freed.begin(), delta.ptrs_freed.end()), both);
  std::set<void*> allocated;
  for (DataPtr& data : delta.dataptrs_allocd) {
    allocated.insert(data.get());
    EXPECT_EQ(IsOurs(data), data.get() == ours.get());
    data.release_context();  // as torch does with what lives on
  }
  EXPECT_EQ(allocated, both);
  graph.Reset();
  next.Reset();
  EXPECT_THROW(allocator_.setCheckpointPoolState(device_, checkpoint), c10::Error);
  EXPECT_EQ(pools().Usage().all.count.current, 1U);
}

TEST_F(SidePoolsTest, SnapshotsShowASidePoolUnderItsPoolsName) {
  Graph graph(*this, id_, 7), stranger(*this, {0, 2}, 8);
  graph.Begin();
  const DataPtr direct = AllocateAtTheBase();
  const DataPtr ours = allocator_.allocate(1000);
  graph.End();
  stranger.Begin();
  const DataPtr of_stranger = AllocateAtTheBase();
  stranger.End();
  const auto shown = [&](MempoolId_t id) {
    std::map<size_t, MempoolId_t> pools;
    for (const auto& segment : allocator_.snapshot(id).segments) {
      if (segment.device == device_ ||
          base_.pool_of.contains(reinterpret_cast<void*>(segment.address)))
        pools[segment.address] = segment.owner_private_pool_id;
    }
    return pools;
  };
  const auto address = [](const DataPtr& data) { return reinterpret_cast<size_t>(data.get()); };
  EXPECT_EQ(shown(id_),
            (std::map<size_t, MempoolId_t>{{address(direct), id_}, {address(ours), id_}}));
  auto all = shown({0, 0});
  EXPECT_EQ(all.at(address(direct)), id_);
  EXPECT_EQ(all.at(address(of_stranger)), (MempoolId_t{0, 2}));
  graph.Reset();
  EXPECT_EQ(shown({0, 0}).at(address(direct)), id_) << "as long as the base shows it";
}

}  // namespace
}  // namespace cgp
