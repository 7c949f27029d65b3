#include "core/memory/free_view.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "core/base/error.h"
#include "core/memory/free_view_test_fit.h"
#include "testing/host_driver.h"

namespace cgp {
namespace {

constexpr uint32_t kPageGranules = 8;
constexpr PageId kNew = MappingPlan::kNewPage;
constexpr FenceId kFenceA{1};
constexpr FenceId kFenceB{2};
constexpr FenceId kFenceHeld{3};  // nobody's own

struct Chain {
  uint32_t offset;
  uint32_t length;
  bool operator==(const Chain&) const = default;
};

// A space and its ranges, and several views over them: of streams A and B, and of everyone else.
class FreeViewTest : public ::testing::Test {
 protected:
  FreeViewTest() {
    for (const FenceId own : {kFenceA, kFenceB, FenceId::kOpen}) AddView(own);
  }

  void TearDown() override { Check(); }

  void AddView(FenceId own) {
    views_.push_back(std::make_unique<FreeView>(space_, ranges_, StreamId{Index(own)}, own));
  }
  FreeView& view_a() { return *views_[0]; }
  FreeView& view_b() { return *views_[1]; }
  FreeView& view_open() { return *views_[2]; }

  void Check() const {
    ASSERT_NO_THROW(space_.Check());
    for (const auto& view : views_) ASSERT_NO_THROW(view->Check());
  }

  SlotId Map(const MappingPlan& plan) {
    const uint32_t old_pages = space_.page_count();
    const SlotId first = ranges_.Map(plan);
    while (space_.page_count() < ranges_.page_count()) space_.AddPage();
    const auto count = ranges_.PagesOf(plan);
    for (const auto& view : views_) view->IndexMapping(first, count, old_pages);
    return first;
  }
  void MapNewPages(uint32_t count) { Map({.range = {}, .handles = std::vector(count, kNew)}); }

  NodeId NodeAt(PageId page, uint32_t offset) const {
    NodeId id = space_.first(page);
    while (space_.node(id).offset + space_.node(id).length <= offset) id = space_.node(id).next;
    return id;
  }

  // Forgets and learns the neighbours with what changes: a view that cannot see what is taken may
  // see them.
  template <typename Change>
  NodeId ChangeSpace(PageId page, uint32_t offset, uint32_t length, Change&& change) {
    const NodeId within = NodeAt(page, offset);
    const PageSpace::Node& last = space_.node(NodeAt(page, offset + length - 1));
    const NodeId prev = space_.node(within).prev;
    const uint32_t from = prev == NodeId::kNone ? 0 : space_.node(prev).offset;
    const uint32_t to = std::min(kPageGranules - 1, last.offset + last.length);
    for (const auto& view : views_) view->UnindexNodes(page, NodeAt(page, from), NodeAt(page, to));
    const NodeId changed = change(within);
    for (const auto& view : views_) view->IndexNodes(page, NodeAt(page, from), NodeAt(page, to));
    return changed;
  }

  NodeId Take(PageId page, uint32_t offset, uint32_t length) {
    return ChangeSpace(page, offset, length, [&](NodeId within) {
      return space_.Take(within, page, Granules(offset), Granules(length));
    });
  }

  void Give(NodeId used, FenceId fence) {
    const PageSpace::Node node = space_.node(used);
    space_.ReserveFence(fence);
    ChangeSpace(node.page, node.offset, node.length,
                [&](NodeId) { return space_.Give(used, fence); });
  }

  void MarkLarge(PageId page, bool large) {
    for (const auto& view : views_) view->UnindexNodes(page, space_.first(page), space_.last(page));
    large ? space_.AddLargePiece(page) : space_.DropLargePiece(page);
    for (const auto& view : views_) view->IndexNodes(page, space_.first(page), space_.last(page));
  }

  void OpenFence(FenceId fence) {
    space_.OpenFence(fence);
    for (const auto& view : views_) view->Rebuild();
  }

  // The chains of a page as its nodes say.
  std::vector<Chain> Chains(const FreeView& view, PageId page) const {
    std::vector<Chain> chains;
    for (NodeId id = space_.first(page); id != NodeId::kNone; id = space_.node(id).next) {
      PageSpace::Node node = space_.node(id);
      node.length = std::min(node.length, kPageGranules);
      if (node.used() || (node.fence != FenceId::kOpen && node.fence != view.own_fence())) continue;
      if (!chains.empty() && chains.back().offset + chains.back().length == node.offset) {
        chains.back().length += node.length;
      } else {
        chains.push_back({node.offset, node.length});
      }
    }
    return chains;
  }

  // Every answer of the view against the chains.
  void ExpectAsBruteForce(FreeView& view) {
    // Where small blocks are alone, and elsewhere.
    std::set<uint32_t> lengths[2];
    std::vector<PageId> whole;
    for (uint32_t p = 0; p < space_.page_count(); ++p) {
      const PageId page{p};
      const std::vector<Chain> chains = Chains(view, page);
      const bool is_whole = !chains.empty() && chains[0].length == kPageGranules;
      ASSERT_EQ(view.IsWhole(page), is_whole);
      if (is_whole) whole.push_back(page);
      const bool has_head = !chains.empty() && chains.front().offset == 0;
      const bool has_tail =
          !chains.empty() && chains.back().offset + chains.back().length == kPageGranules;
      ASSERT_EQ(view.Head(page), Granules(has_head ? chains.front().length : 0));
      ASSERT_EQ(view.Tail(page), Granules(has_tail ? chains.back().length : 0));
      for (const Chain& chain : chains) {
        ASSERT_EQ(view.ChainLength(NodeAt(page, chain.offset)), Granules(chain.length));
        if (!is_whole) lengths[space_.holds_large(page)].insert(chain.length);
      }
    }
    ASSERT_EQ(view.whole_page_count(), whole.size());
    for (uint32_t p = 0; p < space_.page_count(); ++p) {
      ASSERT_EQ(view.NextWhole(PageId{p}), FirstFrom(whole, p));
    }
    for (uint32_t length = 1; length < kPageGranules; ++length) {
      const bool large = lengths[0].lower_bound(length) == lengths[0].end();
      const auto best = lengths[large].lower_bound(length);
      const std::optional<NodeId> found = BestFit(view, Granules(length));
      ASSERT_EQ(found.has_value(), best != lengths[large].end()) << "length " << length;
      if (!found) continue;
      const PageSpace::Node& node = space_.node(*found);
      ASSERT_EQ(space_.holds_large(node.page), large);
      const Chain chain{node.offset, *best};
      ASSERT_EQ(std::ranges::count(Chains(view, node.page), chain), 1) << "length " << length;
    }
  }

  static std::optional<PageId> FirstFrom(const std::vector<PageId>& pages, uint32_t from) {
    const auto found = std::ranges::lower_bound(pages, PageId{from});
    return found == pages.end() ? std::nullopt : std::optional(*found);
  }

  HostDriver driver_{{.granularity = kPageGranules * kGranuleBytes, .map_memory = false}};
  PageSpace space_{Granules(kPageGranules)};
  RangeTable ranges_{driver_, Granules(kPageGranules)};
  std::vector<std::unique_ptr<FreeView>> views_;
};

TEST_F(FreeViewTest, OfAnEmptySpaceHasNothing) {
  EXPECT_EQ(view_a().whole_page_count(), 0u);
  EXPECT_EQ(view_a().NextWhole(PageId{0}), std::nullopt);
  EXPECT_EQ(BestFit(view_a(), Granules(1)), std::nullopt);
}

TEST_F(FreeViewTest, WholePagesAreNotInTheBins) {
  MapNewPages(2);
  EXPECT_EQ(view_a().whole_page_count(), 2u);
  EXPECT_EQ(BestFit(view_a(), Granules(1)), std::nullopt);
  Take(PageId{0}, 0, 1);
  EXPECT_EQ(view_a().whole_page_count(), 1u);
  EXPECT_EQ(view_a().NextWhole(PageId{0}), PageId{1});
  EXPECT_EQ(BestFit(view_a(), Granules(7)), NodeAt(PageId{0}, 1));
}

TEST_F(FreeViewTest, BestFitIsTheShortestThatIsLongEnough) {
  MapNewPages(2);
  Take(PageId{0}, 3, 5);  // leaves 3
  Take(PageId{1}, 0, 3);  // leaves 5
  EXPECT_EQ(BestFit(view_a(), Granules(1)), NodeAt(PageId{0}, 0));
  EXPECT_EQ(BestFit(view_a(), Granules(3)), NodeAt(PageId{0}, 0));
  EXPECT_EQ(BestFit(view_a(), Granules(4)), NodeAt(PageId{1}, 3));
  EXPECT_EQ(BestFit(view_a(), Granules(6)), std::nullopt);
}

TEST_F(FreeViewTest, BestFitIsBesideSmallBlocksIfItCan) {
  MapNewPages(2);
  Take(PageId{0}, 4, 4);  // leaves 4
  Take(PageId{1}, 6, 2);  // leaves 6
  MarkLarge(PageId{0}, true);
  EXPECT_EQ(BestFit(view_a(), Granules(4)), NodeAt(PageId{1}, 0)) << "though longer";
  MarkLarge(PageId{1}, true);
  EXPECT_EQ(BestFit(view_a(), Granules(4)), NodeAt(PageId{0}, 0));
  MarkLarge(PageId{0}, false);
  EXPECT_EQ(BestFit(view_a(), Granules(5)), NodeAt(PageId{1}, 0)) << "where nothing else holds it";
}

TEST_F(FreeViewTest, OnlyTheOwnerSeesWhatIsBehindItsFence) {
  MapNewPages(1);
  const NodeId middle = Take(PageId{0}, 3, 2);
  Give(middle, kFenceA);
  EXPECT_TRUE(view_a().IsWhole(PageId{0})) << "one chain, whatever its fences";
  EXPECT_FALSE(view_b().IsWhole(PageId{0}));
  EXPECT_EQ(view_b().Head(PageId{0}), Granules(3));
  EXPECT_EQ(view_b().Tail(PageId{0}), Granules(3));
  EXPECT_EQ(BestFit(view_b(), Granules(4)), std::nullopt);
  EXPECT_EQ(view_a().FreeAtEnd(RangeId{0}, /*at_front=*/true), 1u);
  EXPECT_EQ(view_b().FreeAtEnd(RangeId{0}, /*at_front=*/true), 0u);
}

TEST_F(FreeViewTest, NobodySeesWhatIsHeld) {
  MapNewPages(1);
  Give(Take(PageId{0}, 0, 8), kFenceHeld);
  for (const auto& view : views_) {
    EXPECT_EQ(view->whole_page_count(), 0u);
    EXPECT_EQ(BestFit(*view, Granules(1)), std::nullopt);
  }
  OpenFence(kFenceHeld);
  for (const auto& view : views_) EXPECT_EQ(view->whole_page_count(), 1u);
}

// A neighbour that another view cannot see is taken: what that view does see stays indexed once.
TEST_F(FreeViewTest, TakingBesideAnotherViewsChainKeepsIt) {
  MapNewPages(1);
  const NodeId middle = Take(PageId{0}, 3, 2);
  Give(middle, kFenceA);
  Take(PageId{0}, 3, 2);
  Check();
  EXPECT_EQ(view_b().Head(PageId{0}), Granules(3));
  Take(PageId{0}, 0, 3);
  Take(PageId{0}, 5, 3);
  EXPECT_EQ(BestFit(view_b(), Granules(1)), std::nullopt);
}

TEST_F(FreeViewTest, APageMappedAgainIsAsFreeThereAsItIs) {
  MapNewPages(3);
  Take(PageId{1}, 0, 1);
  Give(Take(PageId{2}, 0, 1), kFenceA);
  Map({.range = {}, .handles = {PageId{2}, PageId{1}, PageId{0}}});
  EXPECT_EQ(view_a().FreeAtEnd(RangeId{1}, /*at_front=*/false), 1u);
  EXPECT_EQ(view_b().FreeAtEnd(RangeId{1}, /*at_front=*/false), 1u);
  EXPECT_EQ(view_b().FreeAtEnd(RangeId{1}, /*at_front=*/true), 0u);
  EXPECT_EQ(view_a().FreeAtEnd(RangeId{1}, /*at_front=*/true), 1u);
}

TEST_F(FreeViewTest, AViewIsHandedOn) {
  MapNewPages(1);
  view_a().SetPasses(kFenceA, false);
  view_a().Assign(StreamId{9}, FenceId::kOpen);
  EXPECT_EQ(view_a().stream(), StreamId{9});
  EXPECT_EQ(view_a().own_fence(), FenceId::kOpen);
  Give(Take(PageId{0}, 0, 8), kFenceA);
  EXPECT_EQ(view_a().whole_page_count(), 0u);
}

TEST_F(FreeViewTest, ANewViewSeesWhatIsThere) {
  MapNewPages(2);
  Give(Take(PageId{0}, 0, 3), kFenceA);
  Take(PageId{1}, 0, 5);
  AddView(kFenceA);
  EXPECT_EQ(views_.back()->whole_page_count(), 1u);
  EXPECT_EQ(BestFit(*views_.back(), Granules(2)), NodeAt(PageId{1}, 5));
}

TEST_F(FreeViewTest, PassesWhatIsOpenItsOwnAndWhatItIsGrantedTo) {
  constexpr FenceId kFar{1000};
  for (const auto& view : views_) {
    EXPECT_TRUE(view->Passes(FenceId::kOpen));
    EXPECT_TRUE(view->Passes(view->own_fence()));
    EXPECT_FALSE(view->Passes(kFenceHeld));
    EXPECT_FALSE(view->Passes(kFar));
  }
  EXPECT_FALSE(view_b().Passes(kFenceA));
  view_b().SetPasses(kFenceA, true);
  EXPECT_TRUE(view_b().Passes(kFenceA));
  view_b().SetPasses(kFar, true);
  EXPECT_TRUE(view_b().Passes(kFar));
  EXPECT_FALSE(view_b().Passes(FenceId{999}));
  view_b().SetPasses(kFenceA, false);
  view_b().SetPasses(FenceId{5000}, false);
  EXPECT_FALSE(view_b().Passes(kFenceA));
  EXPECT_TRUE(view_b().Passes(kFenceB));
  EXPECT_FALSE(view_b().Passes(FenceId{5000}));
}

// Neighbours behind its own fence, behind the one it is granted, and open ones are one chain.
TEST_F(FreeViewTest, AViewThatIsGrantedSeesOneChain) {
  MapNewPages(1);
  const NodeId middle = Take(PageId{0}, 3, 2);
  Give(Take(PageId{0}, 5, 1), kFenceB);
  Give(middle, kFenceHeld);
  EXPECT_EQ(view_b().Tail(PageId{0}), Granules(3));
  const NodeId first = space_.first(PageId{0});
  const NodeId last = space_.last(PageId{0});
  view_b().UnindexNodes(PageId{0}, first, last);
  view_b().SetPasses(kFenceHeld, true);
  view_b().IndexNodes(PageId{0}, first, last);
  Check();
  EXPECT_TRUE(view_b().IsWhole(PageId{0}));
  EXPECT_FALSE(view_a().IsWhole(PageId{0}));
  EXPECT_EQ(view_a().Head(PageId{0}), Granules(3));
  EXPECT_EQ(view_a().Tail(PageId{0}), Granules(2));
}

// As after going back to a checkpoint: the space was assigned, without a word to the view.
TEST_F(FreeViewTest, RebuildForgetsWhatIsNoLongerSo) {
  MapNewPages(2);
  const NodeId taken = space_.Take(space_.first(PageId{1}), PageId{1}, Granules(2), Granules(4));
  view_a().Rebuild();
  view_b().Rebuild();
  view_open().Rebuild();
  Check();
  space_.Give(taken, FenceId::kOpen);
  space_.Take(space_.first(PageId{0}), PageId{0}, Granules(0), Granules(8));
  view_a().Rebuild();
  view_b().Rebuild();
  view_open().Rebuild();
  EXPECT_EQ(view_a().NextWhole(PageId{0}), PageId{1});
}

TEST_F(FreeViewTest, CheckFindsAChangeThatWasNotLearned) {
  MapNewPages(1);
  const NodeId taken = space_.Take(space_.first(PageId{0}), PageId{0}, Granules(0), Granules(2));
  EXPECT_THROW(view_a().Check(), InternalError);
  space_.Give(taken, FenceId::kOpen);
}

TEST_F(FreeViewTest, AgainstBruteForce) {
  std::mt19937 random(6);
  const auto below = [&](std::size_t limit) { return static_cast<uint32_t>(random() % limit); };
  std::vector<NodeId> used;
  MapNewPages(2);
  for (int step = 0; step < 6000; ++step) {
    const uint32_t choice = below(100);
    if (choice < 1 && space_.page_count() < 20) {
      MapNewPages(1 + below(3));
    } else if (choice < 2 && ranges_.range_count() < 40) {
      const uint32_t page = below(space_.page_count());
      Map({.range = {}, .handles = {PageId{page}, kNew, PageId{(page + 1) % space_.page_count()}}});
    } else if (choice < 7) {
      const PageId page{below(space_.page_count())};
      MarkLarge(page, !space_.holds_large(page));
    } else if (choice < 9) {
      OpenFence(FenceId{1 + below(3)});
    } else if (choice < 55) {
      // All that one of the views sees of a page from some granule on, or less.
      FreeView& view = *views_[below(views_.size())];
      const PageId page{below(space_.page_count())};
      const std::vector<Chain> chains = Chains(view, page);
      if (chains.empty()) continue;
      const Chain chain = chains[below(chains.size())];
      const uint32_t skip = below(2) * below(chain.length);
      const uint32_t length = 1 + below(chain.length - skip);
      used.push_back(Take(page, chain.offset + skip, length));
    } else if (!used.empty()) {
      std::swap(used[below(used.size())], used.back());
      Give(used.back(), FenceId{below(4)});
      used.pop_back();
    }
    Check();
    ExpectAsBruteForce(*views_[below(views_.size())]);
    if (HasFatalFailure()) FAIL() << "at step " << step;
  }
}

}  // namespace
}  // namespace cgp
