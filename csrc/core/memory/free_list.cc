#include "core/memory/free_list.h"

#include <algorithm>
#include <cstddef>
#include <span>

#include "core/base/error.h"

namespace cgp {

FreeList::FreeList(const PageSpace& space, const RangeTable& ranges, StreamId stream, FenceId own)
    : space_(space), ranges_(ranges), stream_(stream), own_(own) {
  SetPasses(FenceId::kOpen, true);
  SetPasses(own, true);
  const auto bins = static_cast<uint32_t>(2 * space.page_size().count());
  bins_.assign(bins, NodeId::kNone);
  filled_bins_.Resize(bins);
  Rebuild();
}

void FreeList::SetPasses(FenceId fence, bool passes) {
  if (Passes(fence) == passes) return;
  if (passes_.size() <= Index(fence)) passes_.resize(Index(fence) + std::size_t{1});
  passes_[Index(fence)] = passes;
}

void FreeList::Rebuild() {
  for (IndexSet* const set :
       {&filled_bins_, &whole_pages_, &free_vpages_, &shown_, &stale_, &changed_}) {
    set->Clear();
  }
  bins_.assign(bins_.size(), NodeId::kNone);
  whole_page_count_ = 0;
  std::ranges::fill(run_bounds_, 0);
  std::ranges::fill(group_bounds_, 0);
  MakeRoomForMapping(0, ranges_.vpage_limit(), ranges_.range_count());
  handles_ = {};
  std::ranges::fill(offers_, Offer{});
  changed_.SetRange(0, space_.page_count(), true);
  for (PageId page{0}; Index(page) < space_.page_count();) {
    const NodeId first = space_.first(page);
    const PageId end = space_.end(first);
    if (!space_.IsOfWholePages(first)) {
      IndexNodes(page, first, space_.last(page));
    } else if (Available(first)) {
      IndexPages(page, end);
    }
    page = end;
  }
}

void FreeList::UnindexNodes(PageId page, NodeId first, NodeId last) {
  ForEachHole(first, last, [&](NodeId start, uint32_t length) { UnlinkHole(page, start, length); });
}

void FreeList::IndexNodes(PageId page, NodeId first, NodeId last) {
  // Not up to the space's capacity: a failed allocation may have made room there alone, and the
  // next free needs no more than the limit.
  if (links_.size() < space_.node_limit()) MakeRoomForNodes();
  ForEachHole(first, last, [&](NodeId start, uint32_t length) { LinkHole(page, start, length); });
}

void FreeList::UnindexPages(PageId begin, PageId end) {
  while (begin < end) {
    const NodeId first = space_.first(begin);
    const PageId stop = std::min(end, space_.end(first));
    if (space_.IsOfWholePages(first)) {
      SetWhole(begin, stop, false);
    } else {
      UnindexNodes(begin, first, space_.last(begin));
    }
    begin = stop;
  }
}

// Makes all of the pages whole, or none of them.
void FreeList::SetWhole(PageId begin, PageId end, bool whole) {
  const uint32_t changed = whole_pages_.SetRange(Index(begin), Index(end), whole);
  if (changed == 0) return;
  whole_page_count_ += whole ? changed : 0 - changed;
  changed_.SetRange(Index(begin), Index(end), true);
  stale_.SetRange(Index(begin), Index(end), true);
}

// Updates all stale pages. O(rows of these, and words of the virtual pages that show them).
void FreeList::RefreshVpages() {
  for (auto next = stale_.Next(0); next; next = stale_.Next(*next)) {
    const PageId begin{*next};
    const bool whole = IsWhole(begin);
    const bool shown = shown_.Contains(Index(begin));
    const PageId row_end = ranges_.RowEnd(begin);
    PageId end = begin + 1;
    while (end < row_end && stale_.Contains(Index(end)) && IsWhole(end) == whole &&
           shown_.Contains(Index(end)) == shown) {
      ++end;
    }
    stale_.SetRange(Index(begin), Index(end), false);
    if (whole == shown) continue;
    shown_.SetRange(Index(begin), Index(end), whole);
    for (const VirtualPage vpage : ranges_.vpages_of(begin)) {
      free_vpages_.SetRange(Index(vpage), Index(vpage) + (Index(end) - Index(begin)), whole);
      if (whole) RaiseBound(vpage);
    }
  }
}

bool FreeList::AllFree(VirtualPage begin, VirtualPage end) const {
  while (begin < end) {
    const PageId page = ranges_.page_at(begin);
    const PageId stop = std::min(ranges_.RowEnd(page), page + (Index(end) - Index(begin)));
    if (!AreWhole(page, stop)) return false;
    begin = begin + (Index(stop) - Index(page));
  }
  return true;
}

void FreeList::RaiseBound(VirtualPage vpage) {
  const RangeId range = ranges_.range_of(vpage);
  const uint32_t mapped = ranges_.range(range).mapped();
  run_bounds_[Index(range)] = mapped;
  uint32_t& of_group = group_bounds_[Index(range) / kRangeGroup];
  of_group = std::max(of_group, mapped);
}

void FreeList::IndexMapping(VirtualPage first, uint32_t count, uint32_t old_page_count) {
  MakeRoomForMapping(0, ranges_.vpage_limit(), ranges_.range_count());
  for (uint32_t i = 0; i < count; ++i) {
    const VirtualPage vpage = first + i;
    if (!shown_.Contains(Index(ranges_.page_at(vpage)))) continue;
    free_vpages_.Insert(Index(vpage));
    RaiseBound(vpage);
  }
  IndexPages(PageId{old_page_count}, PageId{space_.page_count()});
}

void FreeList::MakeRoomForMapping(uint32_t more_pages, uint32_t vpages, uint32_t ranges) {
  MakeRoomForNodes();
  const uint32_t pages = space_.page_count() + more_pages;
  for (IndexSet* const set : {&whole_pages_, &changed_, &shown_, &stale_}) set->Resize(pages);
  if (offers_.size() < pages) offers_.resize(pages);
  free_vpages_.Resize(vpages);
  const uint32_t groups = ranges / kRangeGroup + 1;
  if (group_bounds_.size() >= groups) return;
  run_bounds_.resize(std::size_t{groups} * kRangeGroup);
  group_bounds_.resize(groups);  // last: it says whether there is room
}

std::optional<RangeId> FreeList::OldestMayHold(uint32_t pages, RangeId from) {
  RefreshVpages();
  for (uint32_t range = Index(from); range < ranges_.range_count();) {
    const uint32_t group = range / kRangeGroup;
    const uint32_t behind = (group + 1) * kRangeGroup;
    if (group_bounds_[group] >= pages) {
      for (; range < behind; ++range) {
        if (run_bounds_[range] >= pages) return RangeId{range};
      }
      group_bounds_[group] =
          std::ranges::max(std::span(run_bounds_).subspan(behind - kRangeGroup, kRangeGroup));
    }
    range = behind;
  }
  return std::nullopt;
}

const std::vector<FreeRun>& FreeList::Runs(RangeId id) {
  RefreshVpages();
  const RangeTable::Range& range = ranges_.range(id);
  const uint32_t limit = Index(range.end());
  runs_.clear();
  uint32_t longest = 0;
  for (auto vpage = free_vpages_.Next(Index(range.begin())); vpage && *vpage < limit;) {
    const uint32_t end = free_vpages_.NextMissing(*vpage, limit);
    runs_.push_back({VirtualPage{*vpage}, end - *vpage});
    longest = std::max(longest, end - *vpage);
    vpage = free_vpages_.Next(end);
  }
  run_bounds_[Index(id)] = longest;
  return runs_;
}

uint32_t FreeList::FreeAtEnd(RangeId id, bool at_front) {
  RefreshVpages();
  const uint32_t begin = Index(ranges_.range(id).begin());
  const uint32_t end = Index(ranges_.range(id).end());
  return at_front ? free_vpages_.NextMissing(begin, end) - begin
                  : end - free_vpages_.LastRun(begin, end);
}

std::optional<PageId> FreeList::NextWhole(PageId from) const {
  const std::optional<uint32_t> page = whole_pages_.Next(Index(from));
  return page ? std::optional(PageId{*page}) : std::nullopt;
}

Granules FreeList::Head(PageId page) const {
  if (IsWhole(page)) return space_.page_size();
  const NodeId first = space_.first(page);
  return Available(first) ? HoleLength(first) : Granules(0);
}

Granules FreeList::Tail(PageId page) const {
  if (IsWhole(page)) return space_.page_size();
  const NodeId last = space_.last(page);
  return Available(last) ? HoleLength(HoleStart(last)) : Granules(0);
}

Granules FreeList::HoleLength(NodeId start) const {
  const NodeId end = HoleEnd(start);
  const uint64_t limit =
      end == NodeId::kNone ? space_.page_size().count() : space_.node(end).offset;
  return Granules(limit - space_.node(start).offset);
}

bool FreeList::IsFree(PageId page, Granules offset, Granules length) const {
  if (IsWhole(page)) return true;
  const Granules end = offset + length;
  if (end == space_.page_size()) return Tail(page) >= length;
  NodeId id = space_.NodeAt(page, offset, kMostNodes);
  for (; id != NodeId::kNone && Available(id); id = space_.node(id).next) {
    if (Granules(space_.node(id).offset + space_.node(id).length) >= end) return true;
  }
  return false;
}

NodeId FreeList::HoleStart(NodeId id) const {
  for (NodeId before = space_.node(id).prev; before != NodeId::kNone && Available(before);
       before = space_.node(id).prev) {
    id = before;
  }
  return id;
}

NodeId FreeList::HoleEnd(NodeId start) const {
  while (start != NodeId::kNone && Available(start)) start = space_.node(start).next;
  return start;
}

// Calls function(start, length) for the holes that touch [first, last]; of a node of whole pages
// for one page.
template <typename Function>
void FreeList::ForEachHole(NodeId first, NodeId last, Function&& function) const {
  if (space_.IsOfWholePages(first)) {
    if (Available(first)) function(first, static_cast<uint32_t>(page_size().count()));
    return;
  }
  const uint32_t last_offset = space_.node(last).offset;
  NodeId id = Available(first) ? HoleStart(first) : first;
  while (id != NodeId::kNone && space_.node(id).offset <= last_offset) {
    NodeId next = space_.node(id).next;
    if (Available(id)) {
      uint32_t length = space_.node(id).length;
      for (; next != NodeId::kNone && Available(next); next = space_.node(next).next) {
        length += space_.node(next).length;
      }
      function(id, length);
    }
    id = next;
  }
}

// By length in granules: first the bins of pages of small blocks, then the others.
uint32_t FreeList::BinOf(PageId page, uint32_t length) const {
  return length +
         (space_.holds_large(page) ? static_cast<uint32_t>(space_.page_size().count()) : 0);
}

void FreeList::LinkHole(PageId page, NodeId start, uint32_t length) {
  if (Granules(length) == space_.page_size()) {
    IndexPages(page, page + 1);
    return;
  }
  changed_.Insert(Index(page));
  const uint32_t bin = BinOf(page, length);
  NodeId& head = bins_[bin];
  links_[Index(start)] = {NodeId::kNone, head};
  if (head != NodeId::kNone) {
    links_[Index(head)].prev = start;
  } else {
    filled_bins_.Insert(bin);
  }
  head = start;
}

void FreeList::UnlinkHole(PageId page, NodeId start, uint32_t length) {
  if (Granules(length) == space_.page_size()) {
    SetWhole(page, page + 1, false);
    return;
  }
  changed_.Insert(Index(page));
  const Link link = links_[Index(start)];
  if (link.next != NodeId::kNone) links_[Index(link.next)].prev = link.prev;
  if (link.prev != NodeId::kNone) {
    links_[Index(link.prev)].next = link.next;
    return;
  }
  const uint32_t bin = BinOf(page, length);
  NodeId& head = bins_[bin];
  CGP_CHECK(head == start);
  head = link.next;
  if (head == NodeId::kNone) filled_bins_.Erase(bin);
}

// By bin, in order.
std::vector<std::vector<NodeId>> FreeList::Holes() const {
  std::vector<std::vector<NodeId>> holes(bins_.size());
  for (uint32_t bin = 0; bin < bins_.size(); ++bin) {
    NodeId before = NodeId::kNone;
    for (NodeId id = bins_[bin]; id != NodeId::kNone; id = links_[Index(id)].next) {
      CGP_CHECK(links_[Index(id)].prev == before);
      holes[bin].push_back(id);
      before = id;
    }
    std::ranges::sort(holes[bin]);
  }
  return holes;
}

// Both copies are brought up to date, since what no search has looked at may be stale.
void FreeList::Check() const {
  FreeList now = *this;
  now.RefreshVpages();
  now.Handles();
  FreeList anew = *this;
  anew.Rebuild();
  anew.RefreshVpages();
  anew.Handles();
  CGP_CHECK(now.Holes() == anew.Holes() && now.filled_bins_ == anew.filled_bins_);
  CGP_CHECK(now.whole_pages_ == anew.whole_pages_ && now.shown_ == anew.shown_);
  CGP_CHECK(now.whole_page_count_ == anew.whole_page_count_);
  CGP_CHECK(now.free_vpages_ == anew.free_vpages_);
  CGP_CHECK(now.offers_ == anew.offers_ && now.handles_ == anew.handles_);
  for (RangeId id{0}; Index(id) < ranges_.range_count(); ++id) {
    anew.Runs(id);
    CGP_CHECK(now.run_bounds_[Index(id)] >= anew.run_bounds_[Index(id)]);
    CGP_CHECK(run_bounds_[Index(id)] <= group_bounds_[Index(id) / kRangeGroup]);
  }
}

const FreeHandles& FreeList::Handles() {
  // The handle's entry in the set becomes `now`, or goes if that is 0. Throws with `known` true.
  const auto replace = [](auto& set, PageId handle, uint32_t& known, uint32_t now) {
    if (known == now) return;
    if (known > 0) set.erase({known, handle});
    known = 0;
    if (now > 0) set.insert({now, handle});
    known = now;
  };
  for (auto page = changed_.Next(0); page; page = changed_.Next(*page)) {
    const PageId handle = ranges_.handle_begin(PageId{*page});
    const Offer now = OfferOf(handle);
    Offer& known = offers_[Index(handle)];
    replace(handles_.heads, handle, known.head, now.head);
    replace(handles_.tails, handle, known.tail, now.tail);
    replace(handles_.wholes, handle, known.whole, now.whole);
    changed_.SetRange(Index(handle), Index(ranges_.handle_end(handle)), false);
  }
  return handles_;
}

FreeList::Offer FreeList::OfferOf(PageId handle) const {
  const PageId end = ranges_.handle_end(handle);
  PageId page = handle;
  Granules head;
  for (; page != end && IsWhole(page); ++page) head += page_size();
  if (page == end) return {.whole = ranges_.handle_pages(handle)};
  head += Head(page);
  page = end - 1;
  Granules tail;
  for (; IsWhole(page); page = page - 1) tail += page_size();
  tail += Tail(page);
  return {static_cast<uint32_t>(head.count()), static_cast<uint32_t>(tail.count()), 0};
}

}  // namespace cgp
