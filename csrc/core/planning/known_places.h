// Where blocks of the capture under way lay, by their size.
//
// A program repeats itself within a capture too: layer after layer asks for blocks of the same
// sizes. The oldest free place that a block of that size had is a choice that depends on what is
// free, and not on what came in between. So a layer that begins like an earlier one is laid out
// like it and maps nothing. Otherwise its large blocks would be stitched together anew from what
// the small ones happen to leave.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/base/units.h"
#include "core/placement/placement.h"

namespace cgp {

class KnownPlaces {
 public:
  // Of one size, the last ones: more blocks of it seldom live at once.
  static constexpr std::size_t kMost = 32;

  void Clear() { by_length_.clear(); }

  // The oldest place of a block so long for which fits(place) is true.
  template <typename Fits>
  std::optional<Placement> Find(Granules length, Fits&& fits) const {
    const auto known = by_length_.find(length.count());
    if (known == by_length_.end()) return std::nullopt;
    const Places& places = known->second;
    const auto found = std::find_if(places.begin(), places.end(), fits);
    return found == places.end() ? std::nullopt : std::optional(*found);
  }

  // So that Add() of that length cannot throw.
  void Reserve(Granules length) { by_length_[length.count()].reserve(kMost); }

  // A block so long lies there. pre: Reserve(length).
  void Add(Granules length, Placement place) {
    Places& places = by_length_.find(length.count())->second;
    if (std::find(places.begin(), places.end(), place) != places.end()) return;
    if (places.size() == kMost) places.erase(places.begin());
    places.push_back(place);
  }

 private:
  using Places = std::vector<Placement>;  // oldest first

  std::unordered_map<uint64_t, Places> by_length_;  // in granules
};

}  // namespace cgp
