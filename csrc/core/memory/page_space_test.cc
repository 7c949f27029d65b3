#include "core/memory/page_space.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
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

// The page from its first node to its last, and backwards the same.
std::vector<Piece> Pieces(const PageSpace& space, PageId page) {
  std::vector<Piece> pieces;
  for (NodeId id = space.first(page); id != NodeId::kNone; id = space.node(id).next) {
    const PageSpace::Node& node = space.node(id);
    pieces.push_back({node.used(), node.length, node.fence});
  }
  std::vector<Piece> backwards;
  for (NodeId id = space.last(page); id != NodeId::kNone; id = space.node(id).prev) {
    const PageSpace::Node& node = space.node(id);
    backwards.insert(backwards.begin(), {node.used(), node.length, node.fence});
  }
  EXPECT_EQ(pieces, backwards);
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

TEST_F(OnePage, IsFreeAtFirst) {
  EXPECT_EQ(space_.page_size(), Granules(16));
  EXPECT_EQ(space_.page_count(), 1u);
  EXPECT_EQ(space_.free(), Granules(16));
  EXPECT_EQ(pieces(), std::vector{Free(16)});
}

TEST_F(OnePage, TakingFromTheMiddleSplitsTwice) {
  const NodeId taken = Take(4, 3);
  EXPECT_EQ(space_.node(taken).offset, 4u);
  EXPECT_EQ(space_.node(taken).length, 3u);
  EXPECT_EQ(pieces(), (std::vector{Free(4), Used(3), Free(9)}));
  EXPECT_EQ(space_.free(), Granules(13));
}

TEST_F(OnePage, TakingAllAndGivingItBack) {
  const NodeId taken = Take(0, 16);
  EXPECT_EQ(pieces(), std::vector{Used(16)});
  EXPECT_EQ(space_.free(), Granules(0));
  EXPECT_EQ(space_.Give(taken, FenceId::kOpen), taken);
  EXPECT_EQ(pieces(), std::vector{Free(16)});
}

TEST_F(OnePage, UsedNeighboursAreNotJoined) {
  Take(0, 4);
  Take(4, 4);
  EXPECT_EQ(pieces(), (std::vector{Used(4), Used(4), Free(8)}));
}

TEST_F(OnePage, GivingJoinsBothNeighboursOfTheSameFence) {
  const NodeId a = Take(0, 4);
  const NodeId b = Take(4, 4);
  const NodeId c = Take(8, 4);
  EXPECT_EQ(space_.Give(a, kFenceA), a);
  EXPECT_EQ(space_.Give(c, kFenceA), c);
  EXPECT_EQ(space_.Give(b, kFenceA), a) << "the first of them is the node that holds it all";
  EXPECT_EQ(pieces(), (std::vector{Free(12, kFenceA), Free(4)}));
}

TEST_F(OnePage, GivingDoesNotJoinAcrossFences) {
  const NodeId a = Take(0, 4);
  const NodeId b = Take(4, 4);
  const NodeId c = Take(8, 8);
  space_.Give(a, kFenceA);
  space_.Give(c, FenceId::kOpen);
  EXPECT_EQ(space_.Give(b, kFenceB), b);
  EXPECT_EQ(pieces(), (std::vector{Free(4, kFenceA), Free(4, kFenceB), Free(8)}));
}

TEST_F(OnePage, TakingAcrossFencesLeavesEachRestItsOwnFence) {
  const NodeId a = Take(0, 4);
  const NodeId b = Take(4, 4);
  space_.Give(a, kFenceA);
  space_.Give(b, kFenceB);
  const NodeId taken = Take(2, 8);
  EXPECT_EQ(pieces(), (std::vector{Free(2, kFenceA), Used(8), Free(6)}));
  space_.Give(taken, kFenceB);
  Take(0, 6);
  EXPECT_EQ(pieces(), (std::vector{Used(6), Free(4, kFenceB), Free(6)}));
}

TEST_F(OnePage, OpeningAFenceJoinsAndTheFirstNodeSurvives) {
  const NodeId a = Take(0, 4);
  const NodeId b = Take(4, 4);
  const NodeId c = Take(8, 4);
  space_.Give(a, kFenceA);
  space_.Give(b, FenceId::kOpen);
  space_.Give(c, kFenceB);
  space_.OpenFence(kFenceA);
  EXPECT_EQ(pieces(), (std::vector{Free(8), Free(4, kFenceB), Free(4)}));
  EXPECT_EQ(space_.first(kPage), a);
  space_.OpenFence(kFenceB);
  EXPECT_EQ(pieces(), std::vector{Free(16)});
  EXPECT_EQ(space_.first(kPage), a);
}

TEST_F(OnePage, OpeningNothingChangesNothing) {
  space_.Give(Take(0, 4), kFenceA);
  space_.OpenFence(kFenceB);
  EXPECT_EQ(pieces(), (std::vector{Free(4, kFenceA), Free(12)}));
}

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

TEST(PageSpace, PagesOfOneGranule) {
  PageSpace space(Granules(1));
  for (int i = 0; i < 3; ++i) space.AddPage();
  const NodeId taken = space.Take(space.first(PageId{1}), PageId{1}, Granules(0), Granules(1));
  EXPECT_EQ(space.free(), Granules(2));
  space.ReserveFence(kFenceA);
  space.Give(taken, kFenceA);
  space.Check();
  EXPECT_EQ(Pieces(space, PageId{1}), std::vector{Free(1, kFenceA)});
}

// What each granule of each page is.
class Model {
 public:
  static constexpr int kUsed = -1;

  explicit Model(uint32_t page) : page_(page) {}

  void AddPage() { cells_.resize(cells_.size() + page_, 0); }

  void Set(PageId page, uint32_t offset, uint32_t length, int what) {
    std::fill_n(cells_.begin() + Index(page) * page_ + offset, length, what);
  }

  void Open(int fence) { std::replace(cells_.begin(), cells_.end(), fence, 0); }
  void Hold(uint32_t end, int fence) {
    std::replace_if(
        cells_.begin(), cells_.begin() + end * page_, [](int what) { return what != kUsed; },
        fence);
  }

  bool IsFree(uint32_t page) const { return FreeFrom(PageId{page}, 0, page_) == page_; }
  void Renumber(const std::vector<uint32_t>& number) {
    std::vector<int> left;
    for (std::size_t i = 0; i < cells_.size(); ++i) {
      if (number[i / page_] != RangeTable::Renumbering::kGone) left.push_back(cells_[i]);
    }
    cells_ = left;
  }

  // The longest length at most `wanted` that is free from `offset` on: of the page, or, if that is
  // all of it, of whole pages.
  uint32_t FreeFrom(PageId page, uint32_t offset, uint32_t wanted) const {
    const std::size_t begin = Index(page) * page_ + offset;
    uint32_t length = 0;
    while (length < wanted && begin + length < cells_.size() && cells_[begin + length] != kUsed) {
      ++length;
    }
    if (offset == 0 && length >= page_) return length / page_ * page_;
    return std::min(length, page_ - offset);
  }

  // Used nodes are cut where the space cuts them; free ones are as long as they can be.
  void ExpectEqual(const PageSpace& space) const {
    ASSERT_EQ(space.page_count(), cells_.size() / page_);
    uint64_t free = 0;
    std::size_t end = 0;
    int before = kUsed;
    uint32_t length_before = 0;
    space.ForEachNode([&](NodeId id) {
      const PageSpace::Node& node = space.node(id);
      ASSERT_EQ(Index(node.page) * page_ + node.offset, end);
      const int what = node.used() ? kUsed : static_cast<int>(node.fence);
      for (uint32_t i = 0; i < node.length; ++i) ASSERT_EQ(cells_[end + i], what) << end + i;
      const bool of_pages = node.length >= page_ && length_before >= page_;
      ASSERT_FALSE(what != kUsed && what == before && (node.offset > 0 || of_pages))
          << "neighbours not joined at " << end;
      end += node.length;
      before = what;
      length_before = node.length;
      free += node.used() ? 0 : node.length;
    });
    ASSERT_EQ(end, cells_.size());
    ASSERT_EQ(space.free(), Granules(free));
    for (uint32_t p = 0; p < space.page_count(); ++p) {
      const PageSpace::Node& node = space.node(space.first(PageId{p}));
      ASSERT_LE(Index(node.page), p);
      ASSERT_TRUE(Index(node.page) == p || p < Index(space.end(space.first(PageId{p}))));
    }
    for (int fence = 1; fence < 4; ++fence) {
      uint64_t behind = 0;
      space.ForEachBehind(static_cast<FenceId>(fence), [&](NodeId id) {
        ASSERT_EQ(static_cast<int>(space.node(id).fence), fence);
        behind += space.node(id).length;
      });
      ASSERT_EQ(behind, static_cast<uint64_t>(std::ranges::count(cells_, fence)));
    }
  }

 private:
  uint32_t page_;
  std::vector<int> cells_;
};

class PageSpaceAgainstModel : public ::testing::TestWithParam<uint32_t> {
 protected:
  struct State {
    PageSpace space;
    Model model;
    std::vector<NodeId> used;
  };

  uint32_t Below(std::size_t limit) { return static_cast<uint32_t>(random_() % limit); }

  void TakeSomething(State& state) {
    const PageId page{Below(state.space.page_count())};
    const bool pages = Below(2) == 0;
    const uint32_t offset = pages ? 0 : Below(GetParam());
    const uint32_t wanted = 1 + Below(pages ? 4 * GetParam() : GetParam());
    const uint32_t length = state.model.FreeFrom(page, offset, wanted);
    if (length == 0) return;
    state.used.push_back(state.space.Take(NodeAt(state.space, page, offset), page, Granules(offset),
                                          Granules(length)));
    state.model.Set(page, offset, length, Model::kUsed);
  }

  void GiveSomething(State& state) {
    if (state.used.empty()) return;
    std::swap(state.used[Below(state.used.size())], state.used.back());
    const PageSpace::Node node = state.space.node(state.used.back());
    const auto fence = static_cast<int>(Below(4));
    state.space.ReserveFence(static_cast<FenceId>(fence));
    const NodeId given = state.space.Give(state.used.back(), static_cast<FenceId>(fence));
    state.used.pop_back();
    state.model.Set(node.page, node.offset, node.length, fence);
    const PageSpace::Node& holder = state.space.node(given);
    const auto begin = [](const PageSpace::Node& of) {
      return Index(of.page) * GetParam() + of.offset;
    };
    EXPECT_LE(begin(holder), begin(node));
    EXPECT_GE(begin(holder) + holder.length, begin(node) + node.length);
  }

  void Step(State& state) {
    const uint32_t choice = Below(100);
    if (choice < 2 && state.space.page_count() < 12) {
      state.space.ReservePages(1);
      state.space.AddPage();
      state.model.AddPage();
    } else if (choice < 50) {
      TakeSomething(state);
    } else if (choice < 95) {
      GiveSomething(state);
    } else if (choice == 95) {
      const uint32_t fence = 1 + Below(3);
      state.space.ReserveFence(FenceId{fence});
      const uint32_t end = Below(state.space.page_count() + 1);
      state.space.ReservePages(0);
      state.space.Hold(PageId{end}, FenceId{fence});
      state.model.Hold(end, static_cast<int>(fence));
    } else if (choice == 96) {
      std::vector<uint32_t> number;
      uint32_t left = 0;
      for (uint32_t p = 0; p < state.space.page_count(); ++p) {
        const bool goes = p > 0 && state.model.IsFree(p) && Below(3) == 0;
        number.push_back(goes ? RangeTable::Renumbering::kGone : left++);
      }
      state.space.Renumber(number);
      state.model.Renumber(number);
    } else {
      const uint32_t fence = 1 + Below(3);
      state.space.OpenFence(FenceId{fence});
      state.model.Open(static_cast<int>(fence));
    }
  }

  std::mt19937 random_{GetParam()};
};

// A copy is a checkpoint: from time to time the state goes back to one.
TEST_P(PageSpaceAgainstModel, RandomOperationsAndRestores) {
  State state{PageSpace(Granules(GetParam())), Model(GetParam()), {}};
  state.space.AddPage();
  state.model.AddPage();
  State checkpoint = state;
  for (int step = 0; step < 4000; ++step) {
    if (Below(200) == 0) checkpoint = state;
    if (Below(200) == 0) state = checkpoint;
    Step(state);
    ASSERT_NO_THROW(state.space.Check()) << "step " << step;
    state.model.ExpectEqual(state.space);
    if (HasFatalFailure()) FAIL() << "at step " << step;
  }
  checkpoint.model.ExpectEqual(checkpoint.space);
}

INSTANTIATE_TEST_SUITE_P(PageSizes, PageSpaceAgainstModel, ::testing::Values(1u, 2u, 4u, 16u, 64u));

}  // namespace
}  // namespace cgp
