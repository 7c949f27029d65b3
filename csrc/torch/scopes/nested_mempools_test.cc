// torch.cuda.MemPools that are used within a capture: what dies there, and how long their scopes
// last.
#include <gtest/gtest.h>

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
};

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

}  // namespace
}  // namespace cgp
