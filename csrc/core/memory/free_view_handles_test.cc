#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/memory/free_view.h"
#include "core/placement/placement_test_pool.h"

namespace cgp {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class FreeViewHandlesTest : public SmallPool {
 protected:
  static Edge EdgeOf(uint64_t length, uint32_t handle) { return {length, PageId{handle}}; }

  // Granule by granule.
  void Compare() {
    std::set<Edge> heads;
    std::set<Edge> tails;
    std::set<WholeHandle> wholes;
    for (PageId handle{0}; Index(handle) < ranges_.page_count();
         handle = ranges_.handle_end(handle)) {
      std::vector<bool> free;
      for (uint32_t p = Index(handle); p < Index(ranges_.handle_end(handle)); ++p) {
        for (uint32_t g = 0; g < kP; ++g) free.push_back(IsFree(PageId{p}, g));
      }
      const auto head = std::ranges::find(free, false) - free.begin();
      const auto tail = std::find(free.rbegin(), free.rend(), false) - free.rbegin();
      if (head == std::ssize(free)) {
        wholes.insert({ranges_.handle_pages(handle), handle});
        continue;
      }
      if (head > 0) heads.insert({static_cast<uint64_t>(head), handle});
      if (tail > 0) tails.insert({static_cast<uint64_t>(tail), handle});
    }
    const FreeHandles& handles = view_.Handles();
    ASSERT_EQ(handles.heads, heads);
    ASSERT_EQ(handles.tails, tails);
    ASSERT_TRUE(std::ranges::equal(handles.wholes, wholes, [](const auto& a, const auto& b) {
      return a.pages == b.pages && a.handle == b.handle;
    }));
    ASSERT_NO_THROW(view_.Check());
  }
};

TEST_F(FreeViewHandlesTest, AreThoseOfTheView) {
  EXPECT_THAT(view_.Handles().wholes, IsEmpty());
  MapNew({"..xx", "xx.x", "...."});
  MapNewHandle({"....", ".xx.", "...."});
  EXPECT_THAT(view_.Handles().heads, ElementsAre(EdgeOf(2, 0), EdgeOf(5, 3)));
  EXPECT_THAT(view_.Handles().tails, ElementsAre(EdgeOf(5, 3)));
  ASSERT_EQ(view_.Handles().wholes.size(), 1U);
  EXPECT_EQ(view_.Handles().wholes.begin()->handle, PageId{2});
}

TEST_F(FreeViewHandlesTest, TheLargestWholeHandleComesFirstAndOfEqualsTheOldest) {
  MapNew({"...."});
  MapNewHandle({"....", "...."});
  MapNew({"...."});
  std::vector<PageId> order;
  for (const WholeHandle& whole : view_.Handles().wholes) order.push_back(whole.handle);
  EXPECT_THAT(order, ElementsAre(PageId{1}, PageId{0}, PageId{3}));
}

TEST_F(FreeViewHandlesTest, WhatAnotherStreamFreedIsNotOffered) {
  MapNew({"...."});
  Take(PageId{0}, 0, kP);
  bytes_.ReserveFence(FenceId{2});
  bytes_.Give({{}, used_.back()}, kPageSize, FenceId{2});
  used_.pop_back();
  EXPECT_THAT(view_.Handles().wholes, IsEmpty());
  EXPECT_THAT(view_.Handles().heads, IsEmpty());
}

TEST_F(FreeViewHandlesTest, FollowWhatIsTakenGivenAndMapped) {
  std::mt19937 random(1);
  const auto below = [&](std::size_t count) {
    return std::uniform_int_distribution<std::size_t>(0, count - 1)(random);
  };
  MapNew({"....", "...."});
  for (int step = 0; step < 3000; ++step) {
    if (step % 300 == 0) MapNewHandle(std::vector<std::string>(1 + below(4), "...."));
    const PageId page{static_cast<uint32_t>(below(space_.page_count()))};
    const auto offset = static_cast<uint32_t>(below(kP));
    uint32_t length = 0;
    while (offset + length < kP && IsFree(page, offset + length)) ++length;
    if (length > 0) {
      Take(page, offset, 1 + static_cast<uint32_t>(below(length)));
    } else if (!used_.empty()) {
      Give(below(used_.size()));
    }
    if (step % 4 == 0) {
      ASSERT_NO_FATAL_FAILURE(Compare()) << "step " << step;
    }
    ASSERT_NO_THROW(view_.Check());
  }
}

}  // namespace
}  // namespace cgp
