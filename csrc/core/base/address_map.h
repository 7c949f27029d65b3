// A hash table from addresses to small values: open addressing, linear probing, backward-shift
// deletion (Knuth, TAOCP vol. 3, 6.4, algorithm R), because it stands on the path of every
// allocation and std::unordered_map allocates a node for each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "driver/driver.h"

namespace cgp {

template <typename Value>
class AddressMap {
 public:
  // Address 0 is never mapped, so it marks an empty place.
  static constexpr Address kEmpty = 0;

  std::size_t size() const { return size_; }

  // nullptr where there is none. Valid until the next ReserveOne(), Insert() or Erase().
  Value* Find(Address address) { return const_cast<Value*>(std::as_const(*this).Find(address)); }
  const Value* Find(Address address) const {
    if (places_.empty()) return nullptr;
    for (std::size_t i = Home(address);; i = Next(i)) {
      if (places_[i].key == kEmpty) return nullptr;
      if (places_[i].key == address) return &places_[i].value;
    }
  }

  // Makes room for one more, so that the next Insert() cannot throw.
  void ReserveOne() { Reserve(size_ + 1); }
  // The same for so many in all.
  void Reserve(std::size_t size) {
    // At most 3/4 full: probes stay short, and an empty place always ends them.
    while (size * 4 > places_.size() * 3) Grow();
  }

  // pre: `address` is not in the map and not kEmpty; there is room for it.
  void Insert(Address address, Value value) noexcept {
    std::size_t i = Home(address);
    while (places_[i].key != kEmpty) i = Next(i);
    places_[i] = {address, std::move(value)};
    ++size_;
  }

  // Returns what was there. pre: `address` is in the map.
  Value Erase(Address address) {
    CGP_CHECK(size_ > 0 && address != kEmpty);
    std::size_t hole = Home(address);
    while (places_[hole].key != address) {
      CGP_CHECK(places_[hole].key != kEmpty);
      hole = Next(hole);
    }
    Value erased = std::move(places_[hole].value);
    for (std::size_t i = Next(hole); places_[i].key != kEmpty; i = Next(i)) {
      // An entry may fill the hole unless its home lies cyclically in (hole, i]: then it could not
      // be found there.
      const std::size_t home = Home(places_[i].key);
      const bool must_stay = hole <= i ? (hole < home && home <= i) : (hole < home || home <= i);
      if (must_stay) continue;
      places_[hole] = std::move(places_[i]);
      hole = i;
    }
    places_[hole] = {};
    --size_;
    return erased;
  }

  template <typename Function>
  void ForEach(Function&& function) const {
    for (const Place& place : places_) {
      if (place.key != kEmpty) function(place.key, place.value);
    }
  }

 private:
  struct Place {
    Address key = kEmpty;
    Value value{};
  };

  std::size_t Home(Address address) const {
    // Blocks start at multiples of 512, so the low bits say nothing; Fibonacci hashing spreads the
    // others.
    return static_cast<std::size_t>(((address >> 9) * 0x9E3779B97F4A7C15ull) >> shift_);
  }
  std::size_t Next(std::size_t i) const { return (i + 1) & (places_.size() - 1); }

  void Grow() {
    std::vector<Place> old(places_.empty() ? 64 : places_.size() * 2);
    old.swap(places_);
    shift_ = 64;
    for (std::size_t n = places_.size(); n > 1; n /= 2) --shift_;
    size_ = 0;
    for (Place& place : old) {
      if (place.key != kEmpty) Insert(place.key, std::move(place.value));
    }
  }

  // invariant: size_ == |{ i : places_[i].key != kEmpty }|, places_.size() == 2^(64 - shift_) or 0.
  std::vector<Place> places_;
  std::size_t size_ = 0;
  unsigned shift_ = 64;
};

}  // namespace cgp
