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
// for good goes to the bottom, so that it does not part what comes later. Where all sizes grow by
// one factor, each item then finds a gap no higher than that factor times where its like lay.
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

// What lies somewhere; small, because what takes the time is to go through them.
struct Placed {
  explicit Placed(const LayoutItem& item)
      : begin(item.begin), end(item.end), low(item.position), high(item.position + item.length) {}

  uint32_t begin;
  uint32_t end;
  uint64_t low;
  uint64_t high;
};

// The lowest position at which the item meets nothing. `placed` is in the order of `low`.
uint64_t LowestGap(const LayoutItem& item, const std::vector<Placed>& placed) {
  uint64_t position = 0;
  for (const Placed& other : placed) {
    if (other.low >= position + item.length) break;
    // Without a branch, since whether two items meet is as good as random.
    const auto meets = static_cast<uint64_t>(other.begin < item.end) &
                       static_cast<uint64_t>(item.begin < other.end);
    position = std::max(position, other.high & (uint64_t{0} - meets));
  }
  return position;
}

// Returns the granules of the items that found no place.
uint64_t Attempt(const std::vector<uint32_t>& order, std::vector<Placed> placed,
                 std::vector<LayoutItem>& items) {
  uint64_t left = 0;
  for (const uint32_t i : order) {
    LayoutItem& item = items[i];
    item.position = LowestGap(item, placed);
    if (item.position + item.length <= item.limit) {
      placed.insert(std::ranges::upper_bound(placed, item.position, {}, &Placed::low),
                    Placed(item));
    } else {
      item.position = LayoutItem::kNowhere;
      left += item.length;
    }
  }
  return left;
}

}  // namespace

bool PackItems(std::vector<LayoutItem>& items, std::span<const LayoutItem> fixed) {
  std::vector<Placed> placed(fixed.begin(), fixed.end());
  std::ranges::sort(placed, {}, &Placed::low);
  std::vector<LayoutItem> best = items;
  uint64_t least_left = LayoutItem::kNowhere;
  const bool some_stay =
      std::ranges::find(items, LayoutItem::kForever, &LayoutItem::end) != items.end();
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
    const uint64_t left = Attempt(order, placed, items);
    if (left < least_left) {
      least_left = left;
      best = items;
    }
  }
  items = std::move(best);
  return least_left == 0;
}

std::vector<uint64_t> PeaksOf(std::span<const LayoutItem> items,
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
