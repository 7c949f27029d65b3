// What breaks a page is refused, and changes nothing.
#include "core/memory/page_space.h"

#include <gtest/gtest.h>

#include "core/base/error.h"

namespace cgp {
namespace {

TEST(PageSpace, OnlyWhatANodeHasFreeIsTakenAndWhatIsUsedGiven) {
  constexpr PageId page{0};
  PageSpace space(Granules(16));
  space.AddPage();
  const auto take = [&](NodeId node, uint32_t offset, uint32_t length) {
    return space.Take(node, page, Granules(offset), Granules(length));
  };
  const NodeId taken = take(space.first(page), 4, 4);
  EXPECT_THROW(take(taken, 4, 2), InternalError) << "it is used";
  EXPECT_THROW(take(space.first(page), 8, 2), InternalError) << "of another node";
  EXPECT_THROW(take(space.last(page), 2, 2), InternalError);
  EXPECT_THROW(take(space.first(page), 0, 5), InternalError) << "into what is used";
  EXPECT_THROW(take(space.last(page), 8, 9), InternalError) << "beyond the page";
  EXPECT_THROW(take(space.first(page), 0, 0), InternalError);
  EXPECT_THROW(space.Give(space.first(page), FenceId::kOpen), InternalError) << "it is free";
  space.Check();
  EXPECT_EQ(space.node(space.first(page)).length, 4u);
  EXPECT_EQ(space.node(space.last(page)).length, 8u);
}

TEST(PageSpace, APageHasAtLeastOneGranuleAndFewEnoughToCount) {
  EXPECT_THROW(PageSpace(Granules(0)), InternalError);
  EXPECT_THROW(PageSpace(Granules(0xFFFF'FFFFu)), InternalError);
  EXPECT_THROW(PageSpace(Granules(uint64_t{1} << 32)), InternalError);
  EXPECT_EQ(PageSpace(Granules(0xFFFF'FFFEu)).page_size(), Granules(0xFFFF'FFFEu));
}

}  // namespace
}  // namespace cgp
