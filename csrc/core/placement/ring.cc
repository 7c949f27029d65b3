#include "core/placement/ring.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "core/placement/placement.h"

namespace cgp {
namespace {

// How many spans are looked at for a block: a bound on the time.
constexpr int kLookedAt = 4096;

// The part by which a ring grows that was too small before, so that it rarely does.
constexpr uint64_t kPartMore = 64;

}  // namespace

Placement Ring::Place(FreeList& list, Granules length, bool is_first) {
  const uint64_t granules = length.count();
  uint64_t start = Fit(next_, granules);
  const uint64_t tail = std::min(granules, End() - start);
  const uint64_t head = granules - tail;
  const bool is_free = tail > 0 && Begin() + head <= start && Fit(Begin(), head) == Begin();
  if (is_free && lacks_seam_ && !is_first) MapSeam(tail, head);
  if (is_free && head > 0 && SeamHas(tail, head)) {
    NotePlaced(Begin() + head, granules);
    return Placement::OfGranule(seam_ - tail, space().page_size());
  }
  if (head > 0) start = Fit(Begin(), granules);
  uint64_t missing = granules - std::min(granules, End() - start);
  if (missing > 0 && !is_first) missing = std::max(missing, MissingForCapture(granules));
  if (uint64_t pages = PagesFor(Granules(missing), space().page_size()); pages > 0) {
    if (range_ && ranges_.range(*range_).room_back < pages) {
      memory_.DissolveRing();
      Clear();
    }
    const bool is_new = !range_;
    if (is_new) pages = std::max(pages, PagesFor(length, space().page_size()));
    Grow(list, pages);
    if (is_new) start = Begin();
    lacks_seam_ |= !is_first;
  }
  NotePlaced(start + granules, granules);
  return Placement::OfGranule(start, space().page_size());
}

void Ring::NotePlaced(uint64_t end, uint64_t granules) {
  next_ = end;
  placed_ += granules;
  most_placed_ = std::max(most_placed_, placed_);
  largest_ = std::max(largest_, granules);
}

// What the ring lacks for all that a capture places from this block on.
uint64_t Ring::MissingForCapture(uint64_t granules) const {
  uint64_t free = 0;
  space().ForEachBehind(FenceId::kRing, [&](NodeId id) { free += space().node(id).length; });
  const uint64_t wanted = std::max(granules, most_placed_ - std::min(most_placed_, placed_));
  const uint64_t missing = wanted - std::min(wanted, free);
  // Where that was not enough before, blocks are not freed in order.
  return seams_.empty() ? missing : missing + std::max(largest_, (End() - Begin()) / kPartMore);
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

// Whether the seam shows the ring's last `tail` granules before its first `head`.
bool Ring::SeamHas(uint64_t tail, uint64_t head) const {
  if (seam_ == 0) return false;
  const RangeTable::Range& seam = ranges_.range(seams_.back());
  return tail <= seam_ - Index(seam.begin()) * page() && head <= Index(seam.end()) * page() - seam_;
}

// The seam gets as much as the largest block takes at both sides, at most the ring's halves. None
// is made while a lease has pages, nor one that lacks the last `tail` granules or the first `head`.
void Ring::MapSeam(uint64_t tail, uint64_t head) {
  const RangeTable::Range& range = ranges_.range(*range_);
  std::vector<PageId> handles;
  for (VirtualPage vpage = range.begin(); vpage < range.end();) {
    handles.push_back(ranges_.page_at(vpage));
    if (!ranges_.is_present(handles.back())) return;
    vpage = vpage + ranges_.handle_pages(handles.back());
  }
  const Granules most(std::max(largest_, tail + head));
  const uint64_t pages =
      std::min<uint64_t>(PagesFor(most, space().page_size()), range.mapped() / 2);
  uint32_t before = 0;
  auto last = handles.end();
  while (last != handles.begin() && before < pages) before += ranges_.handle_pages(*--last);
  uint32_t behind = 0;
  auto first = handles.begin();
  while (first != last && behind < pages) behind += ranges_.handle_pages(*first++);
  if (behind == 0 || before * page() < tail || behind * page() < head) return;
  MappingPlan plan{.range = {}, .handles = {last, handles.end()}};
  plan.handles.insert(plan.handles.end(), handles.begin(), first);
  seams_.reserve(seams_.size() + 1);
  const VirtualPage begin = memory_.bytes().Map(plan);
  seams_.push_back(ranges_.range_of(begin));
  seam_ = (Index(begin) + before) * page();
  lacks_seam_ = false;
}

void Ring::Grow(FreeList& list, uint64_t pages) {
  MappingPlan plan{
      .range = range_, .room = RangeTable::kRoomOfFirst + 2 * ranges_.page_count(), .handles = {}};
  uint64_t missing = pages;
  // Newer pages first: older ones are where earlier captures will look for theirs.
  std::vector<WholeHandle> wholes(list.Handles().wholes.begin(), list.Handles().wholes.end());
  std::ranges::sort(wholes, std::greater(), &WholeHandle::handle);
  for (const auto& [count, handle] : wholes) {
    if (missing == 0) break;
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
  seam_ = 0;
  Claim(Index(first) * page(), (Index(first) + pages) * page());
}

}  // namespace cgp
