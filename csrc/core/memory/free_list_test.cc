#include "core/memory/free_list.h"

#include <gtest/gtest.h>

#include <vector>

#include "core/base/error.h"
#include "testing/host_driver.h"

namespace cgp {
namespace {

// Pages, and a free list of them.
class FreeListTest : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_NO_THROW(list_.Check()); }

  void MapNew(uint32_t pages) {
    const MappingPlan plan{.range = {},
                           .handles = std::vector<PageId>(pages, MappingPlan::kNewPage)};
    const VirtualPage first = table_.Map(plan);
    while (space_.page_count() < table_.page_count()) space_.AddPage();
    nodes_.resize(space_.page_count());
    list_.IndexMapping(first, table_.PagesOf(plan), 0);
  }

  void SetFree(PageId page, bool free) {
    const PageId end{Index(page) + 1};
    NodeId& node = nodes_[Index(page)];
    if (free) {
      space_.Give(node, FenceId::kOpen);
      list_.IndexPages(page, end);
    } else {
      list_.UnindexPages(page, end);
      node = space_.Take(space_.first(page), page, Granules(0), space_.page_size());
    }
    EXPECT_EQ(list_.IsWhole(page), free);
  }

  HostDriver driver_{{.granularity = 2048, .map_memory = false}};
  RangeTable table_{driver_, Granules(4)};
  PageSpace space_{Granules(4)};
  FreeList list_{space_, table_, StreamId{1}, FenceId{1}};
  std::vector<NodeId> nodes_;  // of used pages
};

TEST_F(FreeListTest, CheckFindsAChangeThatWasNotLearned) {
  MapNew(1);
  const NodeId taken = space_.Take(space_.first(PageId{0}), PageId{0}, Granules(0), Granules(2));
  EXPECT_THROW(list_.Check(), InternalError);
  space_.Give(taken, FenceId::kOpen);
}

// The bound's life: taking leaves it, looking makes it exact, freeing raises it to the whole range.
TEST_F(FreeListTest, BoundsAreWorkedOutOnlyWhenLookedAt) {
  MapNew(4);
  SetFree(PageId{1}, false);
  EXPECT_EQ(list_.OldestMayHold(4, RangeId{0}), RangeId{0}) << "not looked at yet";
  list_.Runs(RangeId{0});
  EXPECT_EQ(list_.OldestMayHold(3, RangeId{0}), std::nullopt);
  EXPECT_EQ(list_.OldestMayHold(2, RangeId{0}), RangeId{0});
  SetFree(PageId{3}, false);
  SetFree(PageId{3}, true);
  EXPECT_EQ(list_.OldestMayHold(3, RangeId{0}), std::nullopt) << "nobody has looked meanwhile";
  SetFree(PageId{3}, false);
  list_.Runs(RangeId{0});
  SetFree(PageId{3}, true);
  EXPECT_EQ(list_.OldestMayHold(4, RangeId{0}), RangeId{0}) << "what it has become is not known";
  EXPECT_EQ(list_.OldestMayHold(5, RangeId{0}), std::nullopt) << "it has no more pages than this";
}

}  // namespace
}  // namespace cgp
