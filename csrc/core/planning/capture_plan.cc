#include "core/planning/capture_plan.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace cgp {
namespace {

// The most blocks that a plan is made for, the largest: its cost grows with their square.
constexpr std::size_t kMostItems = 1024;

static_assert(CaptureProfile::kNever == LayoutItem::kForever);

// The range that shows most pages, of those with room for as many more as the pool has besides.
std::optional<RangeId> ChooseHome(const RangeTable& ranges) {
  std::optional<RangeId> home;
  for (uint32_t r = 0; r < ranges.range_count(); ++r) {
    const RangeTable::Range& range = ranges.range(RangeId{r});
    if (ranges.page_count() - range.mapped() > range.room_back / 2) continue;
    if (!home || range.mapped() > ranges.range(*home).mapped()) home = RangeId{r};
  }
  return home;
}

}  // namespace

CapturePlan::CapturePlan(const CaptureProfile& profile, const CaptureProfile::Match& match,
                         const RangeTable& ranges, Granules page_size,
                         std::span<const LivePiece> live)
    : page_(page_size.count()), first_step_(match.step.value_or(match.next)) {
  const std::optional<RangeId> home = ChooseHome(ranges);
  if (!home) return;
  home_ = *home;
  base_ = Index(ranges.range(home_).begin());
  for (PageId handle{0}; Index(handle) < ranges.page_count(); handle = ranges.handle_end(handle)) {
    if (!ranges.Shows(home_, handle)) missing_.push_back(handle);
  }
  std::vector<LayoutItem> items = Predict(profile, match.scale, ranges);
  const std::vector<LayoutItem> fixed = Fix(live, ranges);
  Limit(items, fixed, ranges);
  complete_ = PackItems(items, fixed);
  items_.assign(profile.steps().size() - first_step_, LayoutItem{});
  for (const LayoutItem& item : items) items_[item.begin - first_step_] = item;
}

std::vector<LayoutItem> CapturePlan::Predict(const CaptureProfile& profile, double scale,
                                             const RangeTable& ranges) const {
  std::vector<LayoutItem> items;
  items.reserve(profile.steps().size() - first_step_);
  for (uint32_t s = first_step_; s < profile.steps().size(); ++s) {
    const CaptureProfile::Step& step = profile.steps()[s];
    const uint64_t length = Granules::FromBytesRoundedUp(profile.Predict(s, scale)).count();
    // Small survivors gather where others of their kind are.
    if (step.freed_at == CaptureProfile::kNever && length < page_) continue;
    items.push_back({.begin = s, .end = step.freed_at, .length = length});
    const uint32_t slot = Index(step.start.slot);
    if (step.has_place() && ranges.range_of(step.start.slot) == home_ && slot >= base_)
      items.back().position = (slot - base_) * page_ + step.start.offset.count();
  }
  if (items.size() > kMostItems) {
    std::ranges::nth_element(items, items.begin() + kMostItems, std::ranges::greater{},
                             &LayoutItem::length);
    items.resize(kMostItems);
  }
  return items;
}

// Where what lives now lies in the home.
std::vector<LayoutItem> CapturePlan::Fix(std::span<const LivePiece> live,
                                         const RangeTable& ranges) const {
  std::vector<uint32_t> place_of(ranges.page_count());
  uint32_t place = 0;
  for (uint32_t slot = base_; slot < Index(ranges.range(home_).end()); ++slot) {
    place_of[Index(ranges.page_at(SlotId{slot}))] = place++;
  }
  for (const PageId handle : missing_) {
    for (PageId page = handle; page < ranges.handle_end(handle); ++page) {
      place_of[Index(page)] = place++;
    }
  }
  std::vector<LayoutItem> fixed;
  for (const LivePiece& piece : live) {
    const uint64_t position = place_of[Index(piece.page)] * page_ + piece.offset.count();
    fixed.push_back({.end = piece.end, .length = piece.length.count(), .position = position});
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

void CapturePlan::Limit(std::vector<LayoutItem>& items, std::span<const LayoutItem> fixed,
                        const RangeTable& ranges) const {
  const std::vector<uint64_t> peaks = PeaksOf(items, fixed);
  const RangeTable::Range& range = ranges.range(home_);
  const uint64_t most = Index(range.end()) + range.room_back - base_;
  for (LayoutItem& item : items) {
    const uint64_t needed = (peaks[item.begin] + page_ - 1) / page_;
    item.limit = std::min(most, std::max<uint64_t>(ranges.page_count(), needed)) * page_;
  }
}

std::optional<CapturePlan::Spot> CapturePlan::Find(uint32_t step, Granules length,
                                                   const FreeView& view,
                                                   uint64_t most_pages) const {
  const RangeTable& ranges = view.ranges();
  if (step < first_step_) return std::nullopt;
  const LayoutItem& item = items_[step - first_step_];
  if (length.count() > item.length) return std::nullopt;
  const uint64_t begin = item.position;
  const uint64_t end = begin + length.count();
  const uint64_t places = (end + page_ - 1) / page_;
  const uint64_t mapped = Index(ranges.range(home_).end()) - base_;
  const Placement start{SlotId(static_cast<uint32_t>(base_ + begin / page_)),
                        Granules(begin % page_)};
  const uint64_t shown = std::min(end, mapped * page_);
  if (begin < shown && !WholePagesAt(view, start, Granules(shown - begin))) return std::nullopt;
  if (places <= mapped) return Spot{.growth = {}, .place = start};

  Spot spot;
  GrowthPlan& growth = spot.growth.emplace();
  growth.mapping.range = home_;
  growth.start = static_cast<int64_t>(begin) - static_cast<int64_t>(mapped * page_);
  // Whether what the block would take of the page that comes to this place of the home is free.
  const auto is_free = [&](uint64_t place, PageId id) {
    const uint64_t low = std::max(begin, place * page_);
    const uint64_t high = std::min(end, (place + 1) * page_);
    return low >= high || view.IsFree(id, Granules(low - place * page_), Granules(high - low));
  };
  uint64_t reached = mapped;
  for (const PageId handle : missing_) {
    if (reached >= places) break;
    if (ranges.Shows(home_, handle)) continue;
    for (PageId page = handle; page < ranges.handle_end(handle); ++page, ++reached) {
      if (!is_free(reached, page)) return std::nullopt;
    }
    growth.mapping.handles.push_back(handle);
  }
  if (reached < places) {
    const uint64_t new_pages = places - reached;
    if (ranges.page_count() + new_pages > most_pages) return std::nullopt;
    const uint64_t most = MostHandlePages(ranges.page_count() + new_pages, /*together=*/new_pages);
    AppendNewHandles(new_pages, most, growth.mapping.handles);
    reached = places;
  }
  if (reached - mapped > ranges.range(home_).room_back) return std::nullopt;
  return spot;
}

}  // namespace cgp
