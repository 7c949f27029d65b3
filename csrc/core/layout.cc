#include "core/layout.h"

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

// The orders to try first: by where the like lay before, if that is known, by size, and by size
// times lifetime. What stays for good goes to the bottom, so that it does not part what comes later,
// and so does what is better there. Such an item whose like lay at the bottom before keeps its turn:
// where all sizes grow by one factor, each item then finds a gap no higher than that factor times
// where its like lay.
std::vector<std::vector<uint32_t>> FirstOrders(const std::vector<LayoutItem>& items) {
  const auto stays = [&](uint32_t i) { return items[i].end == LayoutItem::kForever; };
  const auto goes_first = [&](uint32_t i) { return items[i].low || stays(i); };
  const auto sort = [&](std::vector<uint32_t> order, auto&& before) {
    std::stable_sort(order.begin(), order.end(), before);
    std::stable_partition(order.begin(), order.end(), goes_first);
    return order;
  };
  const auto larger = [&](uint32_t a, uint32_t b) { return items[a].length > items[b].length; };
  const auto lower = [&](uint32_t a, uint32_t b) { return items[a].position < items[b].position; };
  const auto area = [&](uint32_t i) {
    return static_cast<double>(items[i].length) * (items[i].end - items[i].begin);
  };

  std::vector<uint32_t> as_given(items.size());
  std::iota(as_given.begin(), as_given.end(), 0);
  const std::vector<uint32_t> by_size = sort(as_given, larger);
  std::vector<uint32_t> as_before = by_size;
  std::stable_sort(as_before.begin(), as_before.end(), lower);
  uint64_t bottom = 0;
  for (const uint32_t i : as_given) bottom += goes_first(i) ? items[i].length : 0;
  std::stable_partition(as_before.begin(), as_before.end(), [&](uint32_t i) {
    return stays(i) || (items[i].low && items[i].position >= bottom);
  });
  std::vector<std::vector<uint32_t>> orders{std::move(as_before)};
  if (orders.front() != by_size) orders.push_back(by_size);
  orders.push_back(sort(by_size, [&](uint32_t a, uint32_t b) { return area(a) > area(b); }));
  return orders;
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

bool Layout::Pack(std::vector<LayoutItem>& items, uint64_t limit) {
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
    const uint64_t left = Attempt(order, conflicts, items, limit);
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
                         const std::optional<Conflicts>& conflicts, std::vector<LayoutItem>& items,
                         uint64_t limit) {
  if (conflicts) NumberAll(items);
  const auto fixed = static_cast<uint32_t>(placed_.size());
  uint64_t left = 0;
  for (const uint32_t i : order) {
    LayoutItem& item = items[i];
    item.position = 0;
    item.position = conflicts ? GapBesideConflicts(item, fixed + i, *conflicts) : FindGap(item);
    if (item.position + item.length <= limit) {
      if (conflicts) {
        numbered_[fixed + i] = Of(item);
      } else {
        Insert(item);
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

// As FindGap() from the bottom on, by going through nothing but what the item meets.
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
      if (item.alignment > 1)
        position = (position + item.alignment - 1) / item.alignment * item.alignment;
      moved = true;
    }
  }
  return position;
}

uint64_t Layout::FindGap(const LayoutItem& item) const { return LowestGap(placed_, item); }

uint64_t Layout::LowestGap(std::span<const Placed> placed, const LayoutItem& item) {
  const auto [begin, end, length, from, alignment, low] = item;
  uint64_t position = (from + alignment - 1) / alignment * alignment;
  for (const Placed& other : placed) {
    if (other.low >= position + length) break;
    // Without a branch, since whether two items meet is as good as random.
    const auto meets =
        static_cast<uint64_t>(other.begin < end) & static_cast<uint64_t>(begin < other.end);
    position = std::max(position, other.high & (uint64_t{0} - meets));
    if (alignment > 1) position = (position + alignment - 1) / alignment * alignment;
  }
  return position;
}

void Layout::Insert(const LayoutItem& item) { placed_.insert(Behind(item.position), Of(item)); }

void Layout::Erase(uint32_t begin, uint64_t position) {
  for (auto it = Behind(position); it != placed_.begin() && (--it)->low == position;) {
    if (it->begin != begin) continue;
    placed_.erase(it);
    return;
  }
}

// The first that lies higher than `position`.
std::vector<Layout::Placed>::iterator Layout::Behind(uint64_t position) {
  return std::upper_bound(placed_.begin(), placed_.end(), position,
                          [](uint64_t p, const Placed& other) { return p < other.low; });
}

uint64_t Layout::Peak(std::span<const LayoutItem> items, std::span<const LayoutItem> fixed) {
  // By step: by how much what lives then exceeds what did before. What ends with a step is gone
  // before the next block comes.
  std::vector<int64_t> changes;
  const auto change = [&](uint32_t step, int64_t length) {
    if (step >= changes.size()) changes.resize(std::size_t{step} + 1);
    changes[step] += length;
  };
  for (const std::span<const LayoutItem> part : {items, fixed}) {
    for (const LayoutItem& item : part) {
      const auto length = static_cast<int64_t>(item.length);
      change(item.begin, length);
      if (item.end != LayoutItem::kForever) change(item.end, -length);
    }
  }
  int64_t live = 0;
  int64_t peak = 0;
  for (const int64_t by : changes) peak = std::max(peak, live += by);
  return static_cast<uint64_t>(peak);
}

}  // namespace cgp
