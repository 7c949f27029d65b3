// Where blocks lay, by what was allocated before them.
//
// Programs repeat themselves. A layer asks for the sizes that the layer before it asked for. Its
// blocks go where blocks of as many pages lay in this scope, so both layers are laid out alike. And
// a scope asks for what an earlier one asked for: a warm-up, or the same capture made before. Its
// blocks go where blocks lay that came behind the same sizes, in whatever scope. So captures that
// are made again come to map nothing.
//
// Of the places of a key, the oldest is tried first: the choice depends on what is free now, and
// not on what came in between.
//
// invariant: at most 2 * kMostKeys keys outlast a scope, of at most kMostPlaces places each
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/memory/range_table.h"

namespace cgp {

class KnownPlaces {
 public:
  static constexpr std::size_t kMostPlaces = 32;
  static constexpr std::size_t kMostKeys = std::size_t{1} << 17;

  using Key = uint64_t;
  using Places = std::vector<Placement>;

  void BeginScope() {
    alike_.clear();
    behind_ = 0;
  }
  // Drops all places: virtual pages have new numbers.
  void Clear() {
    young_.clear();
    old_.clear();
    alike_.clear();
  }

  // The key of a block of so many bytes that comes next: its size and all sizes before it in the
  // scope.
  Key Again(uint64_t bytes) const { return Mix(behind_, bytes); }
  // The places of a key, oldest first, with room for one more; valid until the next call. Keys that
  // were not asked for in a long time are dropped.
  Places& At(Key key) {
    if (young_.size() >= kMostKeys) old_ = std::exchange(young_, {});
    if (auto known = old_.extract(key)) young_.insert(std::move(known));
    return WithRoom(young_[key]);
  }
  // The same, in this scope, for blocks that can take each other's places.
  Places& Alike(uint64_t size) { return WithRoom(alike_[size]); }
  static void Add(Places& places, Placement place) {
    if (std::find(places.begin(), places.end(), place) != places.end()) return;
    if (places.size() == kMostPlaces) places.erase(places.begin());
    places.push_back(place);
  }
  // The block of that key was placed.
  void Advance(Key again) { behind_ = again; }

 private:
  static Places& WithRoom(Places& places) {
    if (places.size() == places.capacity()) places.reserve(places.size() * 2 + 1);
    return places;
  }
  // Equal for two different pairs once in 2^64.
  static Key Mix(uint64_t a, uint64_t b) {
    uint64_t key = (a ^ (b * 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9;
    key = (key ^ (key >> 31)) * 0x94D049BB133111EB;
    return key ^ (key >> 29);
  }

  Key behind_ = 0;
  std::unordered_map<Key, Places> young_;
  std::unordered_map<Key, Places> old_;         // what young_ held when it was last full
  std::unordered_map<uint64_t, Places> alike_;  // by size
};

}  // namespace cgp
