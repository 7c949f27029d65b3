// From a failing program to a short one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

namespace cgp {

// The shortest failing sequence that taking out ever smaller pieces leads to ("delta debugging"),
// after at most `tries`. pre: fails(items).
template <typename Steps, typename Fails>
Steps Minimise(Steps items, const Fails& fails, size_t tries) {
  size_t piece = std::max<size_t>(items.size() / 2, 1);
  while (!items.empty()) {
    bool shorter = false;
    for (size_t start = 0; start < items.size() && tries > 0; --tries) {
      Steps rest = items;
      const auto first = rest.begin() + static_cast<std::ptrdiff_t>(start);
      const size_t end = std::min(start + piece, items.size());
      rest.erase(first, first + static_cast<std::ptrdiff_t>(end - start));
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

// What a complaint says before its first number: complaints of one defect agree in that.
inline std::string KindOf(const std::string& complaint) {
  return complaint.substr(0, complaint.find_first_of("0123456789"));
}

}  // namespace cgp
