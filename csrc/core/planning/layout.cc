#include "core/planning/layout.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace cgp {
namespace {

// Attempts are cheap for few items and seldom needed for many. Where blocks that stay part the
// place they seldom help.
std::size_t AttemptsFor(uint64_t items, bool some_stay) {
  const uint64_t comparisons = some_stay ? 500'000 : 3'000'000;
  return std::clamp<uint64_t>(comparisons / (items * items + 1), 4, 32);
}

// The orders to try first: by where the like lay before, if that is known, and by size. What stays
// for good goes to the bottom, so that it does not part what comes later. Where all sizes grow by one
// factor, each item then finds a gap no higher than that factor times where its like lay.
std::vector<std::vector<uint32_t>> FirstOrders(const std::vector<LayoutItem>& items) {
  std::vector<uint32_t> by_size(items.size());
  std::iota(by_size.begin(), by_size.end(), 0);
  std::ranges::stable_sort(by_size, std::ranges::greater{},
                           [&](uint32_t i) { return items[i].length; });
  std::vector<uint32_t> as_before = by_size;
  std::ranges::stable_sort(as_before, {}, [&](uint32_t i) { return items[i].position; });
  for (std::vector<uint32_t>* order : {&by_size, &as_before}) {
    std::stable_partition(order->begin(), order->end(),
                          [&](uint32_t i) { return items[i].end == LayoutItem::kForever; });
  }
  if (as_before == by_size) return {by_size};
  return {as_before, by_size};
}

// How many may live in the mean when an item begins for it to pay to go through what it meets alone.
constexpr std::size_t kFewLive = 16;

}  // namespace

Layout::Layout(std::span<const LayoutItem> fixed) {
  for (const LayoutItem& item : fixed) placed_.push_back(Of(item));
  std::stable_sort(placed_.begin(), placed_.end(), LiesLower{});
}

Layout::Placed Layout::Of(const LayoutItem& item) {
  return {item.begin, item.end, item.position, item.position + item.length};
}

bool Layout::Pack(std::vector<LayoutItem>& items) {
  const std::vector<Placed> fixed = placed_;
  const std::optional<Conflicts> conflicts = FindConflicts(items);
  std::vector<LayoutItem> best = items;
  std::vector<Placed> best_placed;
  uint64_t least_left = LayoutItem::kNowhere;
  const bool some_stay = std::any_of(items.begin(), items.end(), [](const LayoutItem& item) {
    return item.end == LayoutItem::kForever;
  });
  const std::vector<std::vector<uint32_t>> first_orders = FirstOrders(items);
  const auto attempts = std::max(AttemptsFor(items.size(), some_stay), first_orders.size());
  std::vector<uint32_t> order;
  for (std::size_t attempt = 0; attempt < attempts && least_left > 0; ++attempt) {
    if (attempt < first_orders.size()) {
      order = first_orders[attempt];
    } else {
      const std::vector<uint32_t> last = order;
      std::stable_partition(order.begin(), order.end(),
                            [&](uint32_t i) { return items[i].position == LayoutItem::kNowhere; });
      if (order == last) break;
    }
    placed_ = fixed;
    const uint64_t left = Attempt(order, conflicts, items);
    if (left < least_left) {
      least_left = left;
      best = items;
      best_placed = placed_;
    }
  }
  items = std::move(best);
  placed_ = std::move(best_placed);
  return least_left == 0;
}

// Numbered: what is placed, by where it lies, then the items. nullopt if many meet.
std::optional<Conflicts> Layout::FindConflicts(std::span<const LayoutItem> items) const {
  std::vector<Lifetime> lifetimes;
  lifetimes.reserve(placed_.size() + items.size());
  for (const Placed& placed : placed_) lifetimes.push_back({placed.begin, placed.end});
  for (const LayoutItem& item : items) lifetimes.push_back({item.begin, item.end});
  return Conflicts::Find(lifetimes, static_cast<uint32_t>(placed_.size()),
                         placed_.size() + items.size() * kFewLive);
}

// Returns the granules of the items that found no place. pre: what is placed is what is fixed.
uint64_t Layout::Attempt(const std::vector<uint32_t>& order,
                         const std::optional<Conflicts>& conflicts,
                         std::vector<LayoutItem>& items) {
  if (conflicts) NumberAll(items);
  const auto fixed = static_cast<uint32_t>(placed_.size());
  uint64_t left = 0;
  for (const uint32_t i : order) {
    LayoutItem& item = items[i];
    item.position = conflicts ? GapBesideConflicts(item, fixed + i, *conflicts) : LowestGap(item);
    if (item.position + item.length <= item.limit) {
      if (conflicts) {
        numbered_[fixed + i] = Of(item);
      } else {
        placed_.insert(std::ranges::upper_bound(placed_, Of(item), LiesLower{}), Of(item));
      }
    } else {
      item.position = LayoutItem::kNowhere;
      left += item.length;
    }
  }
  if (!conflicts) return left;
  std::erase_if(numbered_, [](const Placed& placed) { return placed.low == LayoutItem::kNowhere; });
  placed_ = numbered_;
  std::sort(placed_.begin(), placed_.end(), LiesLower{});
  return left;
}

// What is placed, by where it lies, then the items, none of them placed yet.
void Layout::NumberAll(std::span<const LayoutItem> items) {
  numbered_ = placed_;
  for (const LayoutItem& item : items)
    numbered_.push_back({item.begin, item.end, LayoutItem::kNowhere, 0});
  near_.resize(numbered_.size());
}

// As LowestGap(), by going through nothing but what the item meets.
uint64_t Layout::GapBesideConflicts(const LayoutItem& item, uint32_t number,
                                    const Conflicts& conflicts) {
  std::size_t count = 0;
  conflicts.ForEach(number, [&](uint32_t other) {
    const Placed& placed = numbered_[other];
    near_[count] = placed;
    const bool meets = item.begin < placed.end && placed.begin < item.end;
    count += static_cast<std::size_t>(meets) &
             static_cast<std::size_t>(placed.low != LayoutItem::kNowhere);
  });
  // Few are near, so that to sort them would cost more than to go through them again whenever one
  // was in the way.
  const std::span<const Placed> near(near_.data(), count);
  uint64_t position = 0;
  for (bool moved = true; moved;) {
    moved = false;
    for (const Placed& other : near) {
      if (other.low >= position + item.length || other.high <= position) continue;
      position = other.high;
      moved = true;
    }
  }
  return position;
}

// The lowest position at which the item meets nothing.
uint64_t Layout::LowestGap(const LayoutItem& item) const {
  uint64_t position = 0;
  for (const Placed& other : placed_) {
    if (other.low >= position + item.length) break;
    // Without a branch, since whether two items meet is as good as random.
    const auto meets = static_cast<uint64_t>(other.begin < item.end) &
                       static_cast<uint64_t>(item.begin < other.end);
    position = std::max(position, other.high & (uint64_t{0} - meets));
  }
  return position;
}

std::vector<uint64_t> Layout::Peaks(std::span<const LayoutItem> items,
                                    std::span<const LayoutItem> fixed) {
  std::size_t steps = 1;
  for (const LayoutItem& item : items) steps = std::max(steps, std::size_t{item.begin} + 1);
  // By step: by how much what lives then exceeds what did before. What ends with a step is gone
  // before the next block comes.
  std::vector<int64_t> changes(steps);
  for (const std::span<const LayoutItem> part : {items, fixed}) {
    for (const LayoutItem& item : part) {
      const auto length = static_cast<int64_t>(item.length);
      if (item.begin < steps) changes[item.begin] += length;
      if (item.end < steps) changes[item.end] -= length;
    }
  }
  std::vector<uint64_t> peaks(steps);
  int64_t live = 0;
  int64_t peak = 0;
  for (std::size_t step = 0; step < steps; ++step) {
    peak = std::max(peak, live += changes[step]);
    peaks[step] = static_cast<uint64_t>(peak);
  }
  return peaks;
}

}  // namespace cgp
