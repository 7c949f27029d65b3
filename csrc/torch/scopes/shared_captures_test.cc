// Captures that share a pool, each under a name of its own.
#include <gtest/gtest.h>

#include <vector>

#include "testing/pool_of.h"
#include "torch/testing/graph_allocator_fixture.h"

namespace cgp {
namespace {

constexpr MempoolId_t kFirst{7, 0}, kSecond{8, 0};

class SharedCapturesTest : public GraphAllocatorTest {
 protected:
  void SetUp() override {
    GraphAllocatorTest::SetUp();
    allocator_.scopes().shares_captures = true;
  }
  std::optional<PoolId> PoolOf(const DataPtr& data) {
    return cgp::PoolOf(pools(), reinterpret_cast<Address>(data.get()));
  }
  // Allocates and frees that in a capture of its own.
  void Capture(Graph& graph, size_t bytes) {
    graph.Begin();
    allocator_.allocate(bytes).clear();
    graph.End();
  }
};

TEST_F(SharedCapturesTest, OneAfterTheOtherTheyShareAPool) {
  Graph first(*this, kFirst, 7), second(*this, kSecond, 8);
  Capture(first, 3 * kPage);
  second.Begin();
  const DataPtr inside = allocator_.allocate(3 * kPage);
  EXPECT_EQ(PoolOf(inside), CaptureScopes::kShared);
  second.End();
  EXPECT_EQ(pools().Usage().reserved_bytes.current, 3 * kPage) << "the first one's memory";
  EXPECT_EQ(pools().ids(), std::vector{CaptureScopes::kShared});
  EXPECT_FALSE(allocator_.snapshot(kFirst, false).segments.empty());
  EXPECT_TRUE(allocator_.checkPoolLiveAllocations(device_, kFirst, {inside.get()}));
  EXPECT_FALSE(base_.users.contains(kFirst));
  EXPECT_FALSE(base_.users.contains(kSecond));
}

TEST_F(SharedCapturesTest, NamedPoolsAndSwitchedOffOnesAreNotShared) {
  Graph named(*this, id_, 7), anonymous(*this, kFirst, 8), off(*this, kSecond, 9);
  Capture(named, 1000);
  EXPECT_EQ(pools().ids(), std::vector{ToPoolId(id_)});
  Capture(anonymous, 1000);
  allocator_.scopes().shares_captures = false;
  Capture(off, 1000);
  EXPECT_TRUE(pools().Contains(CaptureScopes::kShared));
  EXPECT_TRUE(pools().Contains(ToPoolId(kSecond)));
  EXPECT_FALSE(pools().Contains(ToPoolId(kFirst)));
}

TEST_F(SharedCapturesTest, TwoAtOnceFillPoolsOfTheirOwn) {
  Graph first(*this, kFirst, 7), second(*this, kSecond, 8);
  first.Begin();
  current_stream = Stream(2);
  second.Begin();
  const DataPtr in_second = allocator_.allocate(1000);
  current_stream = Stream(1);
  const DataPtr in_first = allocator_.allocate(1000);
  EXPECT_EQ(PoolOf(in_first), CaptureScopes::kShared);
  EXPECT_EQ(PoolOf(in_second), ToPoolId(kSecond));
  first.End();
  EXPECT_TRUE(allocator_.capturing());
  second.End();
  second.Reset();
  EXPECT_EQ(pools().UseCount(ToPoolId(kSecond)), 0);
  EXPECT_EQ(pools().UseCount(CaptureScopes::kShared), 1);
  Graph again(*this, {9, 0}, 9);
  Capture(again, 1000);
  EXPECT_EQ(pools().UseCount(CaptureScopes::kShared), 2);
}

}  // namespace
}  // namespace cgp
