#include "core/memory/page_space.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "core/base/error.h"
#include "core/memory/range_table.h"

namespace cgp {
namespace {

constexpr FenceId kFenceA{1};
constexpr FenceId kFenceB{2};

struct Piece {
  bool used;
  uint32_t length;
  FenceId fence;
  bool operator==(const Piece&) const = default;
};

Piece Used(uint32_t length) { return {true, length, FenceId::kUsed}; }
Piece Free(uint32_t length, FenceId fence = FenceId::kOpen) { return {false, length, fence}; }

// The page from its first node to its last.
std::vector<Piece> Pieces(const PageSpace& space, PageId page) {
  std::vector<Piece> pieces;
  for (NodeId id = space.first(page); id != NodeId::kNone; id = space.node(id).next) {
    const PageSpace::Node& node = space.node(id);
    pieces.push_back({node.used(), node.length, node.fence});
  }
  return pieces;
}

NodeId NodeAt(const PageSpace& space, PageId page, uint32_t offset) {
  NodeId id = space.first(page);
  while (space.node(id).offset + space.node(id).length <= offset) id = space.node(id).next;
  return id;
}

// One page of 16 granules.
class OnePage : public ::testing::Test {
 protected:
  void SetUp() override {
    space_.AddPage();
    space_.ReserveFence(kFenceB);
  }
  void TearDown() override { space_.Check(); }

  NodeId Take(uint32_t offset, uint32_t length) {
    return space_.Take(NodeAt(space_, kPage, offset), kPage, Granules(offset), Granules(length));
  }
  std::vector<Piece> pieces() const { return Pieces(space_, kPage); }

  static constexpr PageId kPage{0};
  PageSpace space_{Granules(16)};
};

// The first and the last of a list may go, and one may leave by being joined, split or taken.
TEST_F(OnePage, AFenceListsWhatIsBehindIt) {
  const auto behind = [&](FenceId fence) {
    std::vector<NodeId> nodes;
    space_.ForEachBehind(fence, [&](NodeId id) { nodes.push_back(id); });
    std::ranges::sort(nodes);
    return nodes;
  };
  EXPECT_TRUE(behind(FenceId{77}).empty()) << "never reserved";
  std::vector<NodeId> nodes;
  for (uint32_t i = 0; i < 8; ++i) nodes.push_back(Take(2 * i, 2));
  for (const uint32_t i : {0U, 2U, 4U}) space_.Give(nodes[i], kFenceA);
  space_.Give(nodes[6], kFenceB);
  EXPECT_EQ(behind(kFenceA), (std::vector{nodes[0], nodes[2], nodes[4]}));
  space_.Give(nodes[3], kFenceA);
  EXPECT_EQ(behind(kFenceA), (std::vector{nodes[0], nodes[2]})) << "joined";
  const NodeId middle = Take(6, 2);
  EXPECT_EQ(behind(kFenceA).size(), 3u) << "parted again";
  space_.Give(middle, kFenceB);
  EXPECT_EQ(behind(kFenceB), (std::vector{middle, nodes[6]}));
  Take(0, 2);
  EXPECT_EQ(behind(kFenceA).size(), 2u);
  space_.OpenFence(kFenceA);
  EXPECT_TRUE(behind(kFenceA).empty());
  EXPECT_EQ(behind(kFenceB).size(), 2u);
}

TEST_F(OnePage, WhatIsUsedCannotBeTakenNorWhatIsFreeGiven) {
  const NodeId taken = Take(4, 4);
  EXPECT_THROW(space_.Take(taken, kPage, Granules(4), Granules(2)), InternalError);
  EXPECT_THROW(space_.Give(space_.first(kPage), FenceId::kOpen), InternalError);
  EXPECT_EQ(pieces(), (std::vector{Free(4), Used(4), Free(8)}));
}

TEST_F(OnePage, TakingFromANodeThatDoesNotHoldTheOffsetThrows) {
  Take(4, 4);
  EXPECT_THROW(space_.Take(space_.first(kPage), kPage, Granules(8), Granules(2)), InternalError);
  EXPECT_THROW(space_.Take(space_.last(kPage), kPage, Granules(2), Granules(2)), InternalError);
}

TEST_F(OnePage, TakingIntoWhatIsUsedOrBeyondThePageThrows) {
  Take(4, 4);
  EXPECT_THROW(space_.Take(space_.first(kPage), kPage, Granules(0), Granules(5)), InternalError);
  EXPECT_THROW(space_.Take(space_.last(kPage), kPage, Granules(8), Granules(9)), InternalError);
}

TEST_F(OnePage, TakingNothingThrows) {
  EXPECT_THROW(space_.Take(space_.first(kPage), kPage, Granules(0), Granules(0)), InternalError);
  EXPECT_EQ(pieces(), std::vector{Free(16)});
}

TEST(PageSpace, APageHasAtLeastOneGranuleAndFewEnoughToCount) {
  EXPECT_THROW(PageSpace(Granules(0)), InternalError);
  EXPECT_THROW(PageSpace(Granules(0xFFFF'FFFFu)), InternalError);
  EXPECT_THROW(PageSpace(Granules(uint64_t{1} << 32)), InternalError);
  EXPECT_EQ(PageSpace(Granules(0xFFFF'FFFEu)).page_size(), Granules(0xFFFF'FFFEu));
}

}  // namespace
}  // namespace cgp
