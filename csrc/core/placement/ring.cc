#include "core/placement/ring.h"

#include <algorithm>

#include "core/placement/growth.h"

namespace cgp {
namespace {

// How many extents are looked at for a block: a bound on the time.
constexpr int kLookedAt = 4096;

}  // namespace

Placement Ring::Place(FreeView& view, Granules length, bool is_first, bool takes_whole) {
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
      Forget();
    }
    const bool is_new = !range_;
    if (is_new) pages = std::max(pages, PagesFor(length, space().page_size()));
    Grow(view, pages, takes_whole);
    if (is_new) start = Begin();
  }
  next_ = start + granules;
  placed_ += granules;
  most_placed_ = std::max(most_placed_, placed_);
  largest_ = std::max(largest_, granules);
  return {SlotAt(start), Granules(start % page())};
}

// The first place, from one on, where so many granules are the ring's that follow one another; else
// the one that goes on up to the end.
uint64_t Ring::Fit(uint64_t from, uint64_t length) const {
  uint64_t start = from;
  int left = kLookedAt;
  for (uint64_t at = from; at < End() && at - start < length; --left) {
    if (left == 0) return End();
    const PageId page_id = ranges_.page_at(SlotAt(at));
    const NodeId id = space().NodeAt(page_id, Granules(at % page()));
    const PageSpace::Node& node = space().node(id);
    const PageId end = std::min(space().end(id), ranges_.RowEnd(page_id));
    const bool whole = space().IsOfWholePages(id);
    at -= at % page();
    at += whole ? (Index(end) - Index(page_id)) * page() : node.offset + node.length;
    if (node.fence != FenceId::kRing) start = at;
  }
  return start;
}

void Ring::Grow(FreeView& view, uint64_t pages, bool takes_whole) {
  MappingPlan plan{
      .range = range_, .room = RangeTable::kRoomOfFirst + 2 * ranges_.page_count(), .handles = {}};
  uint64_t missing = pages;
  for (const auto& [count, handle] : view.Handles().wholes) {
    if (!takes_whole || missing == 0) break;
    const NodeId id = space().first(handle);
    const bool open =
        space().node(id).fence == FenceId::kOpen && space().end(id) >= ranges_.handle_end(handle);
    if (count > missing || !open || (range_ && ranges_.Shows(*range_, handle))) continue;
    plan.handles.push_back(handle);
    missing -= count;
  }
  AppendNewHandles(missing, MostHandlePages(ranges_.page_count() + missing, missing), plan.handles);
  Site site{.slot = memory_.bytes().Map(plan)};
  const Granules length = space().page_size() * pages;
  memory_.bytes().Take(site, length);
  memory_.bytes().Give(site, length, FenceId::kRing);
  range_ = ranges_.range_of(site.slot);
}

}  // namespace cgp
