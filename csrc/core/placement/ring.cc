#include "core/placement/ring.h"

#include <algorithm>

#include "core/placement/placement.h"

namespace cgp {
namespace {

// How many spans are looked at for a block: a bound on the time.
constexpr int kLookedAt = 4096;

}  // namespace

Placement Ring::Place(FreeList& list, Granules length, bool is_first, bool takes_whole) {
  const uint64_t granules = length.count();
  uint64_t start = Fit(next_, granules);
  if (End() - start < granules) start = Fit(Begin(), granules);
  uint64_t missing = granules - std::min(granules, End() - start);
  if (is_first) {
    uint64_t free = 0;
    space().ForEachBehind(FenceId::kRing, [&](NodeId id) { free += space().node(id).length; });
    const uint64_t wanted =
        granules + std::max(most_placed_, placed_ + granules) + std::max(largest_, granules);
    missing = std::max(missing, wanted - std::min(wanted, free));
  }
  if (uint64_t pages = PagesFor(Granules(missing), space().page_size()); pages > 0) {
    if (range_ && ranges_.range(*range_).room_back < pages) {
      memory_.DissolveRing();
      Clear();
    }
    const bool is_new = !range_;
    if (is_new) pages = std::max(pages, PagesFor(length, space().page_size()));
    Grow(list, pages, takes_whole);
    if (is_new) start = Begin();
  }
  next_ = start + granules;
  placed_ += granules;
  most_placed_ = std::max(most_placed_, placed_);
  largest_ = std::max(largest_, granules);
  return Placement::OfGranule(start, space().page_size());
}

void Ring::Reclaim() {
  if (has_reclaimed_) return;
  for (uint64_t at = Begin(); at < End();) {
    const auto [fence, end] = SpanAt(at);
    if (fence == FenceId::kOpen) {
      memory_.bytes().ReserveTake();
      Claim(at, end);
    }
    at = end;
  }
  has_reclaimed_ = true;
}

Ring::Span Ring::SpanAt(uint64_t place) const {
  const PageId page_id = ranges_.page_at(VpageAt(place));
  const uint64_t page_begin = place - place % page();
  const NodeId id = space().NodeAt(page_id, Granules(place - page_begin));
  const PageSpace::Node& node = space().node(id);
  if (!space().IsOfWholePages(id)) return {node.fence, page_begin + node.offset + node.length};
  const PageId end = std::min(space().end(id), ranges_.RowEnd(page_id));
  return {node.fence, std::min(End(), page_begin + (Index(end) - Index(page_id)) * page())};
}

void Ring::Claim(uint64_t begin, uint64_t end) {
  Site site{Placement::OfGranule(begin, space().page_size())};
  memory_.bytes().Take(site, Granules(end - begin));
  memory_.bytes().Give(site, Granules(end - begin), FenceId::kRing);
}

// The first place from `from` on where `length` granules of the ring follow one another; else the
// start of those that reach the ring's end.
uint64_t Ring::Fit(uint64_t from, uint64_t length) const {
  uint64_t start = from;
  int left = kLookedAt;
  for (uint64_t at = from; at < End() && at - start < length; --left) {
    if (left == 0) return End();
    const auto [fence, end] = SpanAt(at);
    at = end;
    if (fence != FenceId::kRing) start = at;
  }
  return start;
}

void Ring::Grow(FreeList& list, uint64_t pages, bool takes_whole) {
  MappingPlan plan{
      .range = range_, .room = RangeTable::kRoomOfFirst + 2 * ranges_.page_count(), .handles = {}};
  uint64_t missing = pages;
  for (const auto& [count, handle] : list.Handles().wholes) {
    if (!takes_whole || missing == 0) break;
    const NodeId id = space().first(handle);
    const bool open =
        space().node(id).fence == FenceId::kOpen && space().end(id) >= ranges_.handle_end(handle);
    if (count > missing || !open || (range_ && ranges_.Shows(*range_, handle))) continue;
    plan.handles.push_back(handle);
    missing -= count;
  }
  AppendNewHandles(missing, MostHandlePages(ranges_.page_count() + missing, missing), plan.handles);
  const VirtualPage first = memory_.bytes().Map(plan);
  range_ = ranges_.range_of(first);
  Claim(Index(first) * page(), (Index(first) + pages) * page());
}

}  // namespace cgp
