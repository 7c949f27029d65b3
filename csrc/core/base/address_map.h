// A hash table from addresses to values of about a cache line: open addressing, linear probing,
// backward-shift deletion (Knuth, TAOCP vol. 3, 6.4, algorithm R). It stands on the path of every
// allocation, and std::unordered_map allocates a node for each.
//
// A value stays at its place in a slab until it is erased. The table, whose entries move, holds
// only numbers of such places. With many values that halves the memory that an allocation and a
// free touch, and the place freed last, which is likely to be cached, is taken first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/driver.h"

namespace cgp {

template <typename Value>
class AddressMap {
 public:
  // Address 0 is never mapped, so it marks an empty place.
  static constexpr Address kEmpty = 0;

  std::size_t size() const { return slab_.size() - spare_.size(); }

  // nullptr where there is none. Valid until the next Reserve() or until it is erased.
  Value* Find(Address address) { return const_cast<Value*>(std::as_const(*this).Find(address)); }
  const Value* Find(Address address) const {
    if (places_.empty()) return nullptr;
    for (std::size_t i = Home(address);; i = Next(i)) {
      if (places_[i].key == kEmpty) return nullptr;
      if (places_[i].key == address) return &slab_[places_[i].number];
    }
  }

  // Makes room for `wanted` in all, so that Insert() cannot throw.
  void Reserve(std::size_t wanted) {
    // At most 3/4 full: probes stay short, and an empty place always ends them.
    while (wanted * 4 > places_.size() * 3) Grow();
    if (wanted > slab_.capacity()) slab_.reserve(std::max<std::size_t>({64, wanted, 2 * size()}));
    // Insert() may need the room of the one, Erase() that of all.
    if (spare_.capacity() < slab_.capacity()) spare_.reserve(slab_.capacity());
  }

  // pre: `address` is not in the map and not kEmpty; there is room for it.
  void Insert(Address address, Value value) noexcept {
    if (spare_.empty()) {
      Enter({address, static_cast<uint32_t>(slab_.size())});
      slab_.push_back(std::move(value));
    } else {
      Enter({address, spare_.back()});
      slab_[spare_.back()] = std::move(value);
      spare_.pop_back();
    }
  }

  // pre: `address` is in the map.
  void Erase(Address address) {
    CGP_CHECK(size() > 0 && address != kEmpty);
    std::size_t hole = Home(address);
    while (places_[hole].key != address) {
      CGP_CHECK(places_[hole].key != kEmpty);
      hole = Next(hole);
    }
    slab_[places_[hole].number] = Value{};
    spare_.push_back(places_[hole].number);
    for (std::size_t i = Next(hole); places_[i].key != kEmpty; i = Next(i)) {
      // An entry may fill the hole unless its home, where its probe begins, lies cyclically in
      // (hole, i]: a search would not find it there.
      const std::size_t home = Home(places_[i].key);
      const bool must_stay = hole <= i ? (hole < home && home <= i) : (hole < home || home <= i);
      if (must_stay) continue;
      places_[hole] = places_[i];
      hole = i;
    }
    places_[hole] = {};
  }

  template <typename Function>
  void ForEach(Function&& function) const {
    for (const auto& [key, number] : places_) {
      if (key != kEmpty) function(key, slab_[number]);
    }
  }
  template <typename Function>
  void ForEach(Function&& function) {
    for (const auto& [key, number] : places_) {
      if (key != kEmpty) function(key, slab_[number]);
    }
  }

 private:
  struct Place {
    Address key = kEmpty;
    uint32_t number = 0;  // in slab_
  };

  std::size_t Home(Address address) const {
    // Fibonacci hashing: the top bits of the product depend on all bits of the address.
    return static_cast<std::size_t>((address * 0x9E3779B97F4A7C15ull) >> shift_);
  }
  std::size_t Next(std::size_t i) const { return (i + 1) & (places_.size() - 1); }

  void Enter(Place place) {
    std::size_t i = Home(place.key);
    while (places_[i].key != kEmpty) i = Next(i);
    places_[i] = place;
  }

  void Grow() {
    std::vector<Place> old(places_.empty() ? 64 : places_.size() * 2);
    old.swap(places_);
    shift_ = 64;
    for (std::size_t n = places_.size(); n > 1; n /= 2) --shift_;
    for (const Place& place : old) {
      if (place.key != kEmpty) Enter(place);
    }
  }

  // invariant: size() == |{ i : places_[i].key != kEmpty }|, places_.size() == 2^(64 - shift_) or
  // 0.
  std::vector<Place> places_;
  unsigned shift_ = 64;
  std::vector<Value> slab_;
  std::vector<uint32_t> spare_;  // numbers of erased values; its capacity is the slab's at least
};

}  // namespace cgp
