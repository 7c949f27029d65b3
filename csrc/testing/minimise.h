// The shortest failing sequence that taking out pieces leads to ("delta debugging").
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace cgp {

// pre: fails(items). Takes out ever smaller pieces as long as `fails` stays true of the rest, at
// most `tries` times. The result fails, and, if the tries sufficed, fails no more with any one item
// taken out.
template <typename Item, typename Fails>
std::vector<Item> Minimise(std::vector<Item> items, const Fails& fails, size_t tries) {
  size_t piece = std::max<size_t>(items.size() / 2, 1);
  while (!items.empty()) {
    bool shorter = false;
    for (size_t start = 0; start < items.size() && tries > 0; --tries) {
      std::vector<Item> rest(items.begin(), items.begin() + static_cast<std::ptrdiff_t>(start));
      const size_t end = std::min(start + piece, items.size());
      rest.insert(rest.end(), items.begin() + static_cast<std::ptrdiff_t>(end), items.end());
      if (fails(rest)) {
        items = std::move(rest);
        shorter = true;
      } else {
        start = end;
      }
    }
    if (tries == 0 || (piece == 1 && !shorter)) break;
    if (!shorter) piece = std::max<size_t>(piece / 2, 1);
  }
  return items;
}

}  // namespace cgp
