// A map from addresses to values of a cache line or so. The values stand in a slab and stay where
// they are until they are erased; the hash table, which moves what it holds, holds their numbers
// only. With many values that halves the memory an allocation and a free go through, and the place
// freed last, which is likely to be in a cache, is taken first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/base/address_map.h"
#include "driver/driver.h"

namespace cgp {

template <typename Value>
class SlabMap {
 public:
  std::size_t size() const { return numbers_.size(); }

  // nullptr where there is none. Valid until the next ReserveOne() or until it is erased.
  Value* Find(Address address) { return const_cast<Value*>(std::as_const(*this).Find(address)); }
  const Value* Find(Address address) const {
    const uint32_t* const number = numbers_.Find(address);
    return number == nullptr ? nullptr : &slab_[*number];
  }

  // Makes room for one more, so that the next Insert() cannot throw.
  void ReserveOne() { Reserve(size() + 1); }
  // The same for so many in all.
  void Reserve(std::size_t wanted) {
    numbers_.Reserve(wanted);
    if (wanted > slab_.capacity()) slab_.reserve(std::max<std::size_t>({64, wanted, 2 * size()}));
    // Insert() may need the room of the one, Erase() that of all.
    if (spare_.capacity() < slab_.capacity()) spare_.reserve(slab_.capacity());
  }

  // pre: as for AddressMap::Insert().
  void Insert(Address address, Value value) noexcept {
    if (spare_.empty()) {
      slab_.push_back(std::move(value));
      numbers_.Insert(address, static_cast<uint32_t>(slab_.size() - 1));
    } else {
      slab_[spare_.back()] = std::move(value);
      numbers_.Insert(address, spare_.back());
      spare_.pop_back();
    }
  }

  // pre: `address` is in the map.
  void Erase(Address address) {
    const uint32_t number = numbers_.Erase(address);
    slab_[number] = Value{};
    spare_.push_back(number);
  }

  template <typename Function>
  void ForEach(Function&& function) const {
    numbers_.ForEach([&](Address address, uint32_t number) { function(address, slab_[number]); });
  }

  template <typename Function>
  void ForEach(Function&& function) {
    numbers_.ForEach([&](Address address, uint32_t number) { function(address, slab_[number]); });
  }

 private:
  AddressMap<uint32_t> numbers_;  // in slab_
  std::vector<Value> slab_;
  std::vector<uint32_t> spare_;  // numbers of erased values; its capacity is the slab's at least
};

}  // namespace cgp
