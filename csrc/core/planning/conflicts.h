// Which of many lifetimes meet. In most programs a block meets few of the others, so whoever packs
// them need not go through all that lie there already.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace cgp {

// The steps [begin, end).
struct Lifetime {
  uint32_t begin = 0;
  uint32_t end = 0;
};

class Conflicts {
 public:
  // Of the lifetimes from number `first` on with all others; nothing is asked about those before it.
  // nullopt if more than `most` would have to be kept in mind: then it does not pay.
  static std::optional<Conflicts> Find(std::span<const Lifetime> lifetimes, uint32_t first,
                                       std::size_t most);

  // Calls function(other) for each that this one meets, and perhaps for some that it does not.
  // pre: first <= number.
  template <typename Function>
  void ForEach(uint32_t number, Function&& function) const {
    const uint32_t place = places_[number - first_];
    for (uint32_t i = lists_[place]; i < lists_[place + 1]; ++i) function(live_[i]);
    for (uint32_t p = place + 1; p < order_.size() && order_[p].begin < order_[place].end; ++p) {
      function(order_[p].number);
    }
  }

 private:
  struct Entry {
    uint32_t number = 0;
    uint32_t begin = 0;
    uint32_t end = 0;
  };

  uint32_t first_ = 0;
  std::vector<Entry> order_;      // all from number `first` on, by `begin`
  std::vector<uint32_t> places_;  // in order_, by number - first
  // By place in order_: where the list of those begins that live when this one begins; one more at
  // the end.
  std::vector<uint32_t> lists_;
  std::vector<uint32_t> live_;  // the lists, one behind the other
};

}  // namespace cgp
