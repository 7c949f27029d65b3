#include "core/capture_plan.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace cgp {
namespace {

// The most blocks that a plan is made for, the largest: its cost grows with their square.
constexpr std::size_t kMostItems = 1024;
// Small blocks of so many first steps go to the bottom: they come before much is known of the
// capture, when no pages may be made for them.
constexpr uint32_t kEarly = 16;
// A pool whose blocks part it into so many pieces is not planned for.
constexpr std::size_t kMostFixed = 4096;
// How many blocks that were not foretold a plan finds gaps for.
constexpr uint32_t kMostUnexpected = 256;
// How long an unexpected block is taken to live if there is no place for it for good: a workspace.
constexpr uint32_t kShort = 8;
// How many gaps are tried for a block whose place is taken.
constexpr int kGaps = 8;
// A new home gets room to grow to so many times what the plan needs.
constexpr uint64_t kRoom = 8;
constexpr uint64_t kMostRoom = uint64_t{1} << 20;
constexpr uint32_t kNotShown = ~uint32_t{0};

// At least `pages` new pages and at most `most`, in the largest handles that suit the pool.
std::vector<PageId> NewHandles(uint64_t pages, uint64_t most, uint64_t pool_pages) {
  std::vector<PageId> handles;
  for (uint64_t made = 0; made < pages;) {
    const uint64_t size = std::min(most - made, MostHandlePages(pool_pages + made));
    handles.push_back(MappingPlan::NewHandle(static_cast<uint32_t>(size)));
    made += size;
  }
  return handles;
}

}  // namespace

CapturePlan::CapturePlan(const CaptureGuide& guide, const CaptureGuide::Match& match,
                         const FreeView& view, const RangeTable& ranges, Granules page_size,
                         std::span<const LivePiece> live)
    : scale_(match.scale),
      page_(page_size.count()),
      first_step_(match.step.value_or(match.next)),
      pages_before_(ranges.page_count()),
      layout_({}) {
  ChooseHome(ranges);
  if (Pack(guide, ranges, live) && HasRoom(ranges)) return;
  StartHome(view, ranges);
  Pack(guide, ranges, live);
}

bool CapturePlan::HasRoom(const RangeTable& ranges) const {
  if (!home_) return true;
  const RangeTable::Range& range = ranges.range(*home_);
  return end_ / page_ + base_ <= Index(range.end()) + range.room_back;
}

// The range that shows most pages already, if it has room for more than the others.
void CapturePlan::ChooseHome(const RangeTable& ranges) {
  for (uint32_t r = 0; r < ranges.range_count(); ++r) {
    const RangeTable::Range& range = ranges.range(RangeId{r});
    if (ranges.page_count() - range.mapped() > range.room_back / 2) continue;
    if (!home_ || range.mapped() > ranges.range(*home_).mapped()) home_ = RangeId{r};
  }
  if (home_) base_ = Index(ranges.range(*home_).begin());
  for (PageId handle{0}; Index(handle) < ranges.page_count(); handle = ranges.handle_end(handle)) {
    if (!home_ || !ranges.Shows(*home_, handle)) missing_.push_back(handle);
  }
}

// A new range: the handle with the longest free tail, which the first block can start in, and all
// that are wholly free.
void CapturePlan::StartHome(const FreeView& view, const RangeTable& ranges) {
  home_.reset();
  missing_.clear();
  std::optional<PageId> with_tail;
  Granules longest;
  for (PageId handle{0}; Index(handle) < ranges.page_count(); handle = ranges.handle_end(handle)) {
    if (IsWholeHandle(view, ranges, handle)) {
      missing_.push_back(handle);
      continue;
    }
    const Granules tail = view.Tail(PageId{Index(ranges.handle_end(handle)) - 1});
    if (tail > longest) {
      longest = tail;
      with_tail = handle;
    }
  }
  if (with_tail) missing_.insert(missing_.begin(), *with_tail);
}

bool CapturePlan::Pack(const CaptureGuide& guide, const RangeTable& ranges,
                       std::span<const LivePiece> live) {
  std::vector<LayoutItem> items = Foretell(guide, ranges);
  const std::vector<LayoutItem> fixed = Fix(live, ranges);
  if (pages_after_ == 0) {
    // A capture that is no larger than its guide needs no new page.
    const uint64_t peak = scale_ > 1 ? Layout::Peak(items, fixed) : 0;
    pages_after_ = std::max(pages_before_, (peak + page_ - 1) / page_);
  }
  uint64_t shown = home_ ? ranges.range(*home_).mapped() : 0;
  for (const PageId handle : missing_) shown += ranges.handle_pages(handle);
  end_ = (shown + pages_after_ - pages_before_) * page_;

  layout_ = Layout(fixed);
  complete_ = fixed.size() <= kMostFixed && layout_.Pack(items, end_);
  items_.assign(guide.steps().size() - first_step_, LayoutItem{});
  for (const LayoutItem& item : items) items_[item.begin - first_step_] = item;
  return complete_;
}

std::vector<LayoutItem> CapturePlan::Foretell(const CaptureGuide& guide,
                                              const RangeTable& ranges) const {
  std::vector<LayoutItem> items;
  items.reserve(guide.steps().size() - first_step_);
  for (uint32_t s = first_step_; s < guide.steps().size(); ++s) {
    const CaptureGuide::Step& step = guide.steps()[s];
    const uint64_t length = Granules::FromBytesRoundedUp(guide.Foretell(s, scale_)).count();
    const bool survives = step.freed_at == CaptureGuide::kNever;
    // Small survivors go beside others of their kind.
    if (!step.steady || (survives && length < page_)) continue;
    LayoutItem& item = items.emplace_back();
    item.begin = s;
    item.end = survives ? LayoutItem::kForever : step.freed_at;
    item.length = length;
    if (survives) item.alignment = page_;
    item.low = length < page_ && s < first_step_ + kEarly;
    const uint32_t slot = Index(step.start.slot);
    if (home_ && ranges.range_of(step.start.slot) == *home_ && slot >= base_)
      item.position = (slot - base_) * page_ + step.start.offset.count();
  }
  if (items.size() > kMostItems) {
    std::ranges::nth_element(items, items.begin() + kMostItems, std::ranges::greater{},
                             &LayoutItem::length);
    items.resize(kMostItems);
  }
  return items;
}

// Where what lives now lies in the home; what the home will not show is in nobody's way.
std::vector<LayoutItem> CapturePlan::Fix(std::span<const LivePiece> live,
                                         const RangeTable& ranges) const {
  std::vector<uint32_t> place_of(ranges.page_count(), kNotShown);
  uint32_t place = 0;
  if (home_) {
    for (uint32_t slot = base_; slot < Index(ranges.range(*home_).end()); ++slot) {
      place_of[Index(ranges.page_at(SlotId{slot}))] = place++;
    }
  }
  for (const PageId handle : missing_) {
    for (uint32_t p = Index(handle); p < Index(ranges.handle_end(handle)); ++p) {
      place_of[p] = place++;
    }
  }
  std::vector<LayoutItem> fixed;
  for (const LivePiece& piece : live) {
    const uint32_t at = place_of[Index(piece.page)];
    if (at == kNotShown) continue;
    fixed.push_back({.begin = 0,
                     .end = piece.end,
                     .length = piece.length.count(),
                     .position = at * page_ + piece.offset.count()});
  }
  // What lives side by side for as long is one item, however many blocks it is.
  std::ranges::sort(fixed, {}, [](const LayoutItem& f) { return std::pair(f.end, f.position); });
  std::vector<LayoutItem> joined;
  for (const LayoutItem& item : fixed) {
    if (!joined.empty() && joined.back().end == item.end &&
        joined.back().position + joined.back().length == item.position) {
      joined.back().length += item.length;
    } else {
      joined.push_back(item);
    }
  }
  return joined;
}

// What was foretold of a step; nullptr if nothing was.
const LayoutItem* CapturePlan::ItemOf(std::optional<uint32_t> step) const {
  if (!step || *step < first_step_) return nullptr;
  const LayoutItem& item = items_[*step - first_step_];
  return item.length > 0 && item.position != LayoutItem::kNowhere ? &item : nullptr;
}

std::optional<CapturePlan::Spot> CapturePlan::Find(const CaptureGuide::Match& match,
                                                   Granules length, const FreeView& view,
                                                   const RangeTable& ranges,
                                                   uint64_t most_pages) const {
  const LayoutItem* foretold = ItemOf(match.step);
  if (foretold != nullptr && length.count() <= foretold->length) {
    LayoutItem item = *foretold;
    item.length = length.count();
    if (auto spot = Reach(item, view, ranges, most_pages)) return spot;
  }
  if (foretold == nullptr && unexpected_ == kMostUnexpected) return std::nullopt;
  // What stands for a step lives as long, but leaves its place to the one that may still come.
  if (foretold == nullptr) foretold = ItemOf(match.stands_for);
  LayoutItem item{.begin = match.next, .end = LayoutItem::kForever, .length = length.count()};
  if (foretold != nullptr) {
    item.begin = foretold->begin;
    item.end = foretold->end;
  }
  for (const bool for_good : {true, false}) {
    if (!for_good) {
      if (foretold != nullptr) break;
      item.end = match.next + kShort;
    }
    item.position = 0;
    for (int gap = 0; gap < kGaps; ++gap) {
      item.position = layout_.FindGap(item);
      if (item.position + item.length > end_) break;
      if (auto spot = Reach(item, view, ranges, most_pages)) return spot;
      // What takes the gap lives longer than foretold: on from the next page.
      item.position = (item.position / page_ + 1) * page_;
    }
  }
  return std::nullopt;
}

void CapturePlan::Take(const CaptureGuide::Match& match, const Spot& spot, Placement start,
                       const RangeTable& ranges) {
  if (!home_) {
    home_ = ranges.range_of(start.slot);
    base_ = Index(ranges.range(*home_).begin());
  }
  if (const LayoutItem* const foretold = ItemOf(match.step)) {
    if (spot.item.position == foretold->position) return;
    layout_.Erase(foretold->begin, foretold->position);
  } else {
    ++unexpected_;
  }
  layout_.Insert(spot.item);
}

// The place of the item and what to map so that it is there, if all of it is free.
std::optional<CapturePlan::Spot> CapturePlan::Reach(const LayoutItem& item, const FreeView& view,
                                                    const RangeTable& ranges,
                                                    uint64_t most_pages) const {
  const uint64_t begin = item.position;
  const uint64_t end = begin + item.length;
  const uint64_t places = (end + page_ - 1) / page_;
  // Whether what the block would take of the page at this place of the home is free.
  const auto is_free = [&](uint64_t place, PageId id) {
    const uint64_t low = std::max(begin, place * page_);
    const uint64_t high = std::min(end, (place + 1) * page_);
    return low >= high || view.IsFree(id, Granules(low - place * page_), Granules(high - low));
  };
  const uint64_t mapped = home_ ? Index(ranges.range(*home_).end()) - base_ : 0;
  for (uint64_t place = begin / page_; place < std::min(places, mapped); ++place) {
    if (!is_free(place, ranges.page_at(SlotId(static_cast<uint32_t>(base_ + place)))))
      return std::nullopt;
  }
  Spot spot{.growth = {}, .place = {}, .item = item};
  if (places <= mapped) {
    spot.place = {SlotId(static_cast<uint32_t>(base_ + begin / page_)), Granules(begin % page_)};
    return spot;
  }

  GrowthPlan& growth = spot.growth.emplace();
  growth.mapping.range = home_;
  growth.start = static_cast<int64_t>(begin) - static_cast<int64_t>(mapped * page_);
  uint64_t reached = mapped;
  for (const PageId handle : missing_) {
    if (reached >= places) break;
    if (home_ && ranges.Shows(*home_, handle)) continue;
    for (uint32_t p = Index(handle); p < Index(ranges.handle_end(handle)); ++p, ++reached) {
      if (!is_free(reached, PageId{p})) return std::nullopt;
    }
    growth.mapping.handles.push_back(handle);
  }
  if (reached < places) {
    const uint64_t pages = ranges.page_count();
    if (pages + (places - reached) > most_pages) return std::nullopt;
    // As long as the plan is not trusted with all it wants, nothing is made ahead of need.
    const uint64_t needed = places - reached;
    const uint64_t most = most_pages < pages_after_ ? needed : most_pages - pages;
    for (const PageId handle : NewHandles(needed, most, pages)) {
      growth.mapping.handles.push_back(handle);
      growth.new_pages += MappingPlan::NewPages(handle);
    }
    reached += growth.new_pages;
  }
  if (home_ && reached - mapped > ranges.range(*home_).room_back) return std::nullopt;
  if (!home_)
    growth.mapping.room = static_cast<uint32_t>(std::min(kRoom * pages_after_, kMostRoom));
  return spot;
}

}  // namespace cgp
