#include "core/planning/conflicts.h"

#include <algorithm>

namespace cgp {

std::optional<Conflicts> Conflicts::Find(std::span<const Lifetime> lifetimes, uint32_t first,
                                         std::size_t most) {
  Conflicts conflicts;
  conflicts.first_ = first;
  std::vector<Entry>& order = conflicts.order_;
  order.reserve(lifetimes.size() - first);
  for (auto n = first; n < lifetimes.size(); ++n)
    order.push_back({n, lifetimes[n].begin, lifetimes[n].end});
  const auto begins_before = [](const Entry& a, const Entry& b) { return a.begin < b.begin; };
  if (!std::is_sorted(order.begin(), order.end(), begins_before))
    std::sort(order.begin(), order.end(), begins_before);

  // What lives when one begins is what lived when the one before it began, and that one, less what
  // has ended since. Before the first all those are taken to live that nothing is asked about.
  conflicts.places_.resize(order.size());
  std::vector<uint32_t>& live = conflicts.live_;
  for (uint32_t n = 0; n < first; ++n) live.push_back(n);
  uint32_t before = 0;
  for (uint32_t place = 0; place < order.size(); ++place) {
    conflicts.places_[order[place].number - first] = place;
    const auto begin = static_cast<uint32_t>(live.size());
    for (uint32_t i = before; i < begin; ++i) {
      if (lifetimes[live[i]].end > order[place].begin) live.push_back(live[i]);
    }
    if (place > 0 && order[place - 1].end > order[place].begin)
      live.push_back(order[place - 1].number);
    if (live.size() > most) return std::nullopt;
    conflicts.lists_.push_back(begin);
    before = begin;
  }
  conflicts.lists_.push_back(static_cast<uint32_t>(live.size()));
  return conflicts;
}

}  // namespace cgp
