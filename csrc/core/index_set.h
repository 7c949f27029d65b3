// A set of small numbers that finds the next member at or after a given one: a bit for each number,
// and a bit for each word of those that tells whether any is set. A search looks at two words, and
// at one more for each 4,096 numbers it skips, which is less than more levels would cost for the
// pages of any device.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <vector>

namespace cgp {

class IndexSet {
 public:
  // Makes room for members below `limit`; keeps what is there.
  void Resize(uint32_t limit) {
    if (Words(limit) <= words_.size()) return;
    filled_.resize(Words(Words(limit)));
    words_.resize(Words(limit));  // last: it says whether there is room
  }

  bool Contains(uint32_t i) const { return (words_[i / 64] & Bit(i)) != 0; }

  void Insert(uint32_t i) {
    words_[i / 64] |= Bit(i);
    filled_[i / 64 / 64] |= Bit(i / 64);
  }

  void Erase(uint32_t i) {
    uint64_t& word = words_[i / 64];
    word &= ~Bit(i);
    if (word != 0) return;
    filled_[i / 64 / 64] &= ~Bit(i / 64);
  }

  // The smallest member that is at least `i`.
  std::optional<uint32_t> Next(uint32_t i) const {
    if (i / 64 >= words_.size()) return std::nullopt;
    const uint64_t rest = words_[i / 64] >> (i % 64);
    if (rest != 0) return i + static_cast<uint32_t>(std::countr_zero(rest));
    const uint32_t behind = i / 64 + 1;
    uint32_t f = behind / 64;
    if (f >= filled_.size()) return std::nullopt;
    uint64_t filled = filled_[f] & ~(Bit(behind) - 1);
    while (filled == 0) {
      if (++f == filled_.size()) return std::nullopt;
      filled = filled_[f];
    }
    const uint32_t w = f * 64 + static_cast<uint32_t>(std::countr_zero(filled));
    return w * 64 + static_cast<uint32_t>(std::countr_zero(words_[w]));
  }

  void Clear() {
    words_.assign(words_.size(), 0);
    filled_.assign(filled_.size(), 0);
  }

 private:
  static constexpr uint64_t Bit(uint32_t i) { return uint64_t{1} << (i % 64); }
  static constexpr uint32_t Words(uint32_t limit) { return limit / 64 + (limit % 64 != 0 ? 1 : 0); }

  // invariant: bit w of filled_ is set  <=>  words_[w] != 0.
  std::vector<uint64_t> words_;
  std::vector<uint64_t> filled_;
};

}  // namespace cgp
