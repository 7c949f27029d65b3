// A search ends, and partials are mapped for a block so that what is left of them is a partial
// again. How well blocks are placed cgp_quality judges.
#include "core/placement/placement.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/memory/shared_space.h"
#include "testing/host_driver.h"

namespace cgp {
namespace {

constexpr uint32_t kP = 4;  // granules of a page

class PlacementTest : public ::testing::Test {
 protected:
  static constexpr Granules kPageSize{kP};

  // A new range of new pages that look like this: '.' is a free granule and 'x' a used one.
  void MapNew(const std::vector<std::string>& pages) {
    const uint32_t first_page = bytes_.space().page_count();
    bytes_.Map({.range = {}, .handles = std::vector(pages.size(), MappingPlan::kNewPage)});
    for (uint32_t i = 0; i < pages.size(); ++i) {
      for (uint32_t g = 0; g < kP; ++g) {
        if (pages[i][g] == 'x') Take(PageId{first_page + i}, g);
      }
    }
  }
  void Take(PageId page, uint32_t offset) {
    Site site{{ranges_.vpages_of(page).front(), offset}};
    bytes_.ReserveTake();
    bytes_.Take(site, Granules(1));
  }
  GrowthPlan Plan(uint64_t length) {
    return PlanGrowth(list_, Granules(length), Slack::kNone, /*several_streams=*/false);
  }

  HostDriver driver_{{.granularity = kP * kGranuleBytes, .map_memory = false}};
  RangeTable ranges_{driver_, kPageSize};
  SharedSpace bytes_{ranges_};
  FreeList& list_ = bytes_.AddFreeList(StreamId{1}, FenceId{1});
};

// More ranges in vain than a search looks at: then a range with a page more will do.
TEST_F(PlacementTest, ALongSearchSettlesForAWholePageMore) {
  for (int i = 0; i < 100; ++i) MapNew({"....", "xxxx"});
  MapNew({"xxx.", "....", "xxxx"});  // is exact, and passed over
  MapNew({"....", "....", "xxxx"});
  for (uint32_t r = 0; r < ranges_.range_count(); ++r) list_.Runs(RangeId{r});
  const auto found = FindMapped(list_, Granules(5), Slack::kOnePage);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->vpage, ranges_.range(RangeId{101}).begin());
  EXPECT_FALSE(FindMapped(list_, Granules(5), Slack::kNone));
}

TEST_F(PlacementTest, OfATailAllIsTakenAndTheLastPageIsLeftATail) {
  MapNew({"xxxx", "....", "xxxx"});
  MapNew({"xxxx", "x...", "xxxx"});
  const GrowthPlan plan = Plan(kP + 1);
  EXPECT_EQ(plan.mapping.handles, (std::vector{PageId{4}, PageId{1}}));
  EXPECT_EQ(plan.start, 1);
}

TEST_F(PlacementTest, OfAHeadAllIsTakenAndTheFirstPageIsLeftAHead) {
  MapNew({"xxxx", "....", "xxxx"});
  MapNew({"xxxx", "...x", "xxxx"});
  const GrowthPlan plan = Plan(kP + 1);
  EXPECT_EQ(plan.mapping.handles, (std::vector{PageId{1}, PageId{4}}));
  EXPECT_EQ(plan.start, 2);
}

}  // namespace
}  // namespace cgp
