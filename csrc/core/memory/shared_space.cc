#include "core/memory/shared_space.h"

#include <array>

#include "core/base/error.h"

namespace cgp {

FreeList& SharedSpace::AddFreeList(StreamId stream, FenceId own) {
  if (stream_count_ == free_lists_.size()) {
    free_lists_.push_back(std::make_unique<FreeList>(space_, ranges_, stream, own));
  } else {
    FreeList& list = *free_lists_[stream_count_];
    list.MakeRoomForFence(own);
    ReserveWoken();
    list.Assign(stream, own);
    SetPasses(list, std::span(&own, 1), true);
  }
  return *free_lists_[stream_count_++];
}

void SharedSpace::RemoveStreams() {
  for (; stream_count_ > 0; --stream_count_) {
    FreeList& list = *free_lists_[stream_count_ - 1];
    const FenceId own = list.own_fence();
    SetPasses(list, std::span(&own, 1), false);
  }
}

void SharedSpace::ReserveTake(std::size_t blocks) {
  space_.ReservePages(0, blocks);
  for (const auto& list : free_lists_) list->MakeRoomForNodes();
}

bool SharedSpace::HasUntouchedPages(const Site& site, Granules length) const {
  bool untouched = false;
  ForEachNode(site, length, [&](NodeId id) {
    untouched |= space_.IsOfWholePages(id) && space_.node(id).fence == FenceId::kOpen;
  });
  return untouched;
}

void SharedSpace::Take(Site& site, Granules length) {
  if (site.node != NodeId::kNone) {
    const PageId page = space_.node(site.node).page;
    site.node = TakePiece(site.node, page, Granules(site.offset), length, /*large=*/false);
    return;
  }
  int extents = 0;
  const bool large = length >= page_size();
  ForEachExtent(site, length, [&](PageId page, Granules offset, Granules extent) {
    site.node = extent < page_size()
                    ? TakePiece(space_.NodeAt(page, offset), page, offset, extent, large)
                    : TakePages(page, extent);
    ++extents;
  });
  if (extents > 1) site.node = NodeId::kNone;
}

void SharedSpace::Give(const Site& site, Granules length, FenceId fence) {
  const bool large = length >= page_size();
  std::array<uint64_t, 2> pages{};  // without and with a lease
  const auto count = [&](PageId page, Granules, Granules) {
    ++pages[leased_.Contains(Index(page)) ? 1 : 0];
  };
  if (has_leased_) ForEachPiece(site, length, count);
  const auto [present, leased] = pages;
  // What waits for other work on these bytes may end: while they were away there was none.
  if (leased > 0 && present == 0) fence = FenceId::kLeased;
  ForEachNode(site, length, [&](NodeId id) { GivePiece(id, fence, large); });
  if (leased > 0 && present > 0) Hold(leased_, FenceId::kLeased);
}

// Takes a piece below a page. pre: `within` holds the granule at `offset` of the page, and all
// bytes are free to the free list that chose them. `large`: the block is of a page or more.
NodeId SharedSpace::TakePiece(NodeId within, PageId page, Granules offset, Granules length,
                              bool large) {
  NodeId last = within;
  while (Granules(space_.node(last).offset + space_.node(last).length) < offset + length) {
    last = space_.node(last).next;
  }
  // The unchanged nodes beside it are unindexed and indexed too: a free list may have them without
  // having what is taken. All nodes of the page are, if the page comes to hold a large block.
  const bool all = large && !space_.holds_large(page);
  const NodeId before = all ? NodeId::kNone : space_.node(within).prev;
  const NodeId behind = all ? NodeId::kNone : space_.node(last).next;
  const auto from = [&] { return before == NodeId::kNone ? space_.first(page) : before; };
  const auto to = [&] { return behind == NodeId::kNone ? space_.last(page) : behind; };
  for (const auto& list : free_lists_) list->UnindexNodes(page, from(), to());
  const NodeId taken = space_.Take(within, page, offset, length);
  if (large) space_.AddLargePiece(page);
  for (const auto& list : free_lists_) list->IndexNodes(page, from(), to());
  return taken;
}

// Takes consecutive whole pages.
NodeId SharedSpace::TakePages(PageId page, Granules length) {
  const PageId end = page + static_cast<uint32_t>(length / page_size());
  for (const auto& list : free_lists_) list->UnindexPages(page, end);
  return space_.Take(space_.first(page), page, Granules(0), length);
}

void SharedSpace::GivePiece(NodeId id, FenceId fence, bool large) {
  const PageSpace::Node node = space_.node(id);
  const PageId page = node.page;
  if (space_.IsOfWholePages(id)) {
    const PageId end = space_.end(id);
    space_.Give(id, fence);
    for (const auto& list : free_lists_) {
      if (list->Passes(fence)) list->IndexPages(page, end);
    }
    return;
  }
  if (large && space_.large_pieces(page) == 1) {
    for (const auto& list : free_lists_)
      list->UnindexNodes(page, space_.first(page), space_.last(page));
    space_.Give(id, fence);
    space_.DropLargePiece(page);
    for (const auto& list : free_lists_)
      list->IndexNodes(page, space_.first(page), space_.last(page));
    return;
  }
  for (const auto& list : free_lists_) {
    if (!list->Passes(fence)) continue;
    for (const NodeId beside : {node.prev, node.next}) {
      if (beside != NodeId::kNone && !space_.node(beside).used())
        list->UnindexNodes(page, beside, beside);
    }
  }
  if (large) space_.DropLargePiece(page);
  const NodeId given = space_.Give(id, fence);
  for (const auto& list : free_lists_) {
    if (list->Passes(fence)) list->IndexNodes(page, given, given);
  }
}

VirtualPage SharedSpace::Map(const MappingPlan& plan) {
  const uint32_t count = ranges_.PagesOf(plan);
  const uint32_t new_pages = plan.new_pages();
  space_.ReservePages(new_pages);
  leased_.Resize(space_.page_count() + new_pages);
  for (const auto& list : free_lists_) {
    list->MakeRoomForMapping(new_pages, ranges_.MostVpagesAfter(plan), ranges_.range_count() + 1);
  }
  const uint32_t old_page_count = space_.page_count();
  const VirtualPage first = ranges_.Map(plan);
  for (uint32_t i = 0; i < new_pages; ++i) space_.AddPage();
  for (const auto& list : free_lists_) list->IndexMapping(first, count, old_page_count);
  return first;
}

std::shared_ptr<RangeTable::Shrinking> SharedSpace::PrepareShrink(std::vector<bool> keep) {
  for (const auto& list : free_lists_) {
    list->MakeRoomForMapping(0, ranges_.MostVpagesAfterShrink(), ranges_.MostRangesAfterShrink());
  }
  return ranges_.PrepareShrink(std::move(keep));
}

RangeTable::Renumbering SharedSpace::Shrink(RangeTable::Shrinking& prepared) noexcept {
  RangeTable::Renumbering renumbering = ranges_.Shrink(prepared);
  space_.Renumber(renumbering.pages);
  leased_.Clear();
  for (uint32_t page = 0; page < space_.page_count(); ++page) {
    if (ranges_.lease_of(PageId{page}) != kNoLease) leased_.Insert(page);
  }
  has_leased_ = leased_.Next(0).has_value();
  for (const auto& list : free_lists_) list->Rebuild();
  return renumbering;
}

void SharedSpace::ReserveWoken() {
  woken_.clear();
  ReserveMore(woken_, space_.free_extents() + 1);
}

void SharedSpace::ReserveHold() {
  ReserveTake();
  woken_.clear();
  ReserveMore(woken_, space_.free_extents() + space_.page_count());
}

void SharedSpace::ReserveOpening(std::size_t fence_limit) {
  ReserveWoken();
  for (const auto& list : free_lists_) {
    list->MakeRoomForFence(FenceId{static_cast<uint32_t>(fence_limit - 1)});
  }
}

void SharedSpace::SetPasses(FreeList& list, std::span<const FenceId> fences, bool passes) {
  woken_.clear();
  for (const FenceId fence : fences) {
    if (list.Passes(fence) == passes) continue;
    space_.ForEachBehind(fence, [this](NodeId id) { woken_.push_back(id); });
  }
  std::ranges::sort(woken_, {}, [this](NodeId id) {
    return std::pair(space_.node(id).page, space_.node(id).offset);
  });
  // Of each page from the first of its nodes to the last, with the nodes beside them.
  const auto update = [&](bool index) {
    for (auto first = woken_.begin(); first != woken_.end();) {
      const PageId page = space_.node(*first).page;
      const auto behind = std::find_if(first, woken_.end(),
                                       [&](NodeId id) { return space_.node(id).page != page; });
      const NodeId last = *(behind - 1);
      const auto [prev, next] = std::pair(space_.node(*first).prev, space_.node(last).next);
      const NodeId from = prev == NodeId::kNone ? *first : prev;
      const NodeId to = next == NodeId::kNone ? last : next;
      if (!space_.IsOfWholePages(from)) {
        index ? list.IndexNodes(page, from, to) : list.UnindexNodes(page, from, to);
      } else if (index == passes) {
        index ? list.IndexPages(page, space_.end(from)) : list.UnindexPages(page, space_.end(from));
      }
      first = behind;
    }
  };
  update(false);
  for (const FenceId fence : fences) list.SetPasses(fence, passes);
  update(true);
}

void SharedSpace::Open(std::span<const FenceId> opened, FenceId now) {
  for (const auto& list : free_lists_) {
    if (list->Passes(now)) SetPasses(*list, opened, true);
  }
  for (const FenceId fence : opened) space_.OpenFence(fence, now);
  for (const auto& list : free_lists_) {
    for (const FenceId fence : opened) list->SetPasses(fence, false);
  }
}

void SharedSpace::Hold(const IndexSet& pages, FenceId fence) {
  space_.Hold(pages, fence);
  if (has_leased_) space_.Hold(leased_, FenceId::kLeased);
  for (const auto& list : free_lists_) list->Rebuild();
}

void SharedSpace::SetLeased(const IndexSet& pages, bool leased) {
  for (auto page = pages.Next(0); page; page = pages.Next(*page + 1)) {
    leased_.SetRange(*page, *page + 1, leased);
  }
  has_leased_ = leased_.Next(0).has_value();
  Hold(pages, leased ? FenceId::kLeased : FenceId::kOpen);
}

void SharedSpace::Check() const {
  space_.Check();
  CGP_CHECK(space_.page_count() == ranges_.page_count());
  space_.ForEachNode([&](NodeId id) {
    for (PageId page = space_.node(id).page; page < space_.end(id); ++page) {
      const bool leased = ranges_.lease_of(page) != kNoLease;
      CGP_CHECK(leased == leased_.Contains(Index(page)));
      const PageSpace::Node& node = space_.node(id);
      CGP_CHECK(node.used() || (node.fence == FenceId::kLeased) == leased);
    }
  });
  for (const auto& list : free_lists_) list->Check();
  for (std::size_t i = stream_count_; i < free_lists_.size(); ++i) {
    space_.ForEachNode([&](NodeId id) {
      const FenceId fence = space_.node(id).fence;
      CGP_CHECK(fence == FenceId::kOpen || !free_lists_[i]->Passes(fence));
    });
  }
}

}  // namespace cgp
