#include "torch/scopes/annexes.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <list>
#include <map>
#include <set>
#include <vector>

#include "torch/testing/graph_allocator_fixture.h"

namespace cgp {
namespace {

class AnnexesTest : public GraphAllocatorTest {
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

TEST_F(AnnexesTest, WhatACaptureAsksTheBaseForIsKeptForItsGraph) {
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
  const MempoolId_t annex = PoolOf(direct);
  EXPECT_NE(annex, (MempoolId_t{0, 0}));
  EXPECT_NE(annex, id_) << "the base does not know whose pool it is";
  for (const DataPtr* elsewhere : {&eager, &passed_on, &after}) {
    EXPECT_EQ(PoolOf(*elsewhere), (MempoolId_t{0, 0}));
  }
  EXPECT_EQ(UsersOf(annex), 1);
  graph.Reset();
  EXPECT_EQ(UsersOf(annex), 0) << "the base may have it back";
}

TEST_F(AnnexesTest, GraphsOfAPoolShareItsAnnexAndOthersHaveTheirOwn) {
  Graph first(*this, id_, 7), second(*this, id_, 8), stranger(*this, {0, 2}, 9);
  std::vector<MempoolId_t> annexes;
  for (Graph* graph : {&first, &second, &stranger}) {
    graph->Begin();
    annexes.push_back(PoolOf(AllocateAtTheBase()));
    graph->End();
  }
  EXPECT_EQ(annexes[0], annexes[1]);
  EXPECT_NE(annexes[0], annexes[2]);
  first.Reset();
  EXPECT_GT(UsersOf(annexes[0]), 0) << "the second graph needs it";
  second.Reset();
  EXPECT_EQ(UsersOf(annexes[0]), 0);
  EXPECT_GT(UsersOf(annexes[2]), 0);
  // The native allocator does not reopen what nobody holds.
  Graph third(*this, id_, 10);
  third.Begin();
  EXPECT_NE(PoolOf(AllocateAtTheBase()), annexes[0]);
  third.End();
}

TEST_F(AnnexesTest, CapturesAtOnceDoNotMeet) {
  Graph first(*this, id_, 7), second(*this, {0, 2}, 8);
  first.Begin();
  current_stream = Stream(2);
  second.Begin();
  const MempoolId_t of_second = PoolOf(AllocateAtTheBase());
  current_stream = Stream(1);
  EXPECT_NE(PoolOf(AllocateAtTheBase()), of_second);
  second.End();
  EXPECT_NE(PoolOf(AllocateAtTheBase()), (MempoolId_t{0, 0})) << "the first one goes on";
  first.End();
}

TEST_F(AnnexesTest, WhileThePoolHasAUserTheAnnexStays) {
  allocator_.scopes().Register(device_, ToPoolId(id_));
  Graph graph(*this, id_, 7);
  graph.Begin();
  const MempoolId_t annex = PoolOf(AllocateAtTheBase());
  graph.End();
  graph.Reset();
  EXPECT_GT(UsersOf(annex), 0);
  allocator_.releasePool(device_, id_);
  EXPECT_EQ(UsersOf(annex), 0);
}

// A release is no reason to take the annex from a capture that goes on.
TEST_F(AnnexesTest, AnOpenScopeKeepsTheAnnex) {
  Graph graph(*this, id_, 7);
  graph.Begin();
  const MempoolId_t annex = PoolOf(AllocateAtTheBase());
  graph.Reset();
  EXPECT_EQ(PoolOf(AllocateAtTheBase()), annex);
  EXPECT_GT(UsersOf(annex), 0);
  graph.End();
  EXPECT_EQ(UsersOf(annex), 0);
}

TEST_F(AnnexesTest, EagerScopesHaveNone) {
  allocator_.beginAllocateToPool(device_, id_, ThisThread());
  const DataPtr direct = AllocateAtTheBase();
  EXPECT_EQ(PoolOf(direct), (MempoolId_t{0, 0}));
  allocator_.endAllocateToPool(device_, id_);
  EXPECT_TRUE(base_.users.empty());
}

// Around the body of a conditional node, say.
TEST_F(AnnexesTest, APausedCaptureGoesOnInItsAnnex) {
  Graph graph(*this, id_, 7);
  graph.Begin();
  const MempoolId_t annex = PoolOf(AllocateAtTheBase());
  allocator_.endAllocateToPool(device_, id_);
  allocator_.beginAllocateToPool(device_, id_, graph.Filter());
  EXPECT_EQ(PoolOf(AllocateAtTheBase()), annex);
  graph.End();
  graph.Reset();
  EXPECT_EQ(UsersOfAll(), 0);
  EXPECT_TRUE(base_.open.empty());
}

TEST_F(AnnexesTest, AFailedCapturesAnnexIsGivenBack) {
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

TEST_F(AnnexesTest, ABaseThatRefusesLeavesNoCapture) {
  base_.refuses_to_begin = true;
  Graph graph(*this, id_, 7);
  EXPECT_THROW(graph.Begin(), c10::Error);
  EXPECT_FALSE(allocator_.capturing());
  EXPECT_FALSE(pools().Contains(ToPoolId(id_)));
  base_.refuses_to_begin = false;
  graph.Begin();
  EXPECT_NE(PoolOf(AllocateAtTheBase()), (MempoolId_t{0, 0}));
  graph.End();
  graph.Reset();
  EXPECT_EQ(UsersOfAll(), 0);
}

// The other way round: storages keep us, too, when captures are the base's again.
TEST_F(AnnexesTest, WhatABasesCaptureAsksUsForIsTheBases) {
  allocator_.scopes().takes_captures = false;
  Graph graph(*this, id_, 7);
  graph.Begin();
  EXPECT_EQ(PoolOf(allocator_.allocate(1000)), id_);
  EXPECT_EQ(PoolOf(AllocateAtTheBase()), id_);
  graph.End();
}

TEST_F(AnnexesTest, ACheckpointIsOfTheAnnexToo) {
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

// torch's hash table doubles with each name that hashes as another one, up to all of the memory.
TEST_F(AnnexesTest, NamesOfAnnexesHashApart) {
  std::list<Graph> graphs;
  std::set<size_t> hashes;
  for (uint64_t pool = 1; pool <= 100; ++pool) {
    Graph& graph = graphs.emplace_back(*this, MempoolId_t{0, pool}, 100 + pool);
    graph.Begin();
    hashes.insert(c10::MempoolIdHash{}(PoolOf(AllocateAtTheBase())));
    graph.End();
  }
  EXPECT_EQ(hashes.size(), 100U);
}

TEST_F(AnnexesTest, SnapshotsShowAnAnnexUnderItsPoolsName) {
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
