// A set of small numbers that finds the next member at or after a number, or the last one before
// it. It has a bit for each number, and a bit for each word of those that says whether any is set.
// A search looks at two words, and one more for each 4,096 numbers that it skips: for the pages of
// any device, more levels would cost more. Changing a run of numbers costs a word for each 64 of
// them.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <vector>

namespace cgp {

class IndexSet {
 public:
  // Makes room for members below `limit`; all members stay.
  void Resize(uint32_t limit) {
    if (Words(limit) <= words_.size()) return;
    filled_.resize(Words(Words(limit)));
    words_.resize(Words(limit));  // last: it says whether there is room
  }

  bool Contains(uint32_t i) const { return (words_[i / 64] & Bit(i)) != 0; }

  void Insert(uint32_t i) { SetRange(i, i + 1, true); }
  void Erase(uint32_t i) { SetRange(i, i + 1, false); }

  // Makes all of [begin, end) members, or none. Returns how many changed.
  uint32_t SetRange(uint32_t begin, uint32_t end, bool members) {
    uint32_t changed = 0;
    while (begin < end) {
      const uint32_t w = begin / 64;
      const uint32_t stop = std::min(end, (w + 1) * 64);
      const uint64_t bits = ~uint64_t{0} >> (64 - (stop - begin)) << (begin % 64);
      const uint64_t before = words_[w];
      const uint64_t after = words_[w] = members ? before | bits : before & ~bits;
      changed += static_cast<uint32_t>(std::popcount(before ^ after));
      if (members) {
        filled_[w / 64] |= Bit(w);
      } else if (after == 0) {
        filled_[w / 64] &= ~Bit(w);
      }
      begin = stop;
    }
    return changed;
  }

  // The largest member that is at most `i`. pre: there is one.
  uint32_t Last(uint32_t i) const {
    uint32_t w = i / 64;
    const uint64_t rest = words_[w] << (63 - i % 64);
    if (rest != 0) return i - static_cast<uint32_t>(std::countl_zero(rest));
    uint32_t f = w / 64;
    uint64_t filled = filled_[f] & (Bit(w) - 1);
    while (filled == 0) filled = filled_[--f];
    w = f * 64 + 63 - static_cast<uint32_t>(std::countl_zero(filled));
    return w * 64 + 63 - static_cast<uint32_t>(std::countl_zero(words_[w]));
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

  // The first of [from, limit) that is not a member, or `limit`.
  uint32_t NextMissing(uint32_t from, uint32_t limit) const {
    while (from < limit) {
      const uint64_t rest = ~words_[from / 64] >> (from % 64);
      if (rest != 0) return std::min(limit, from + static_cast<uint32_t>(std::countr_zero(rest)));
      from = (from / 64 + 1) * 64;
    }
    return limit;
  }
  // The first of [from, limit) from which on all are members, or `limit`.
  uint32_t LastRun(uint32_t from, uint32_t limit) const {
    while (from < limit) {
      // The word's bits below `limit`, moved to the top.
      const uint32_t in_word = (limit - 1) % 64 + 1;
      const uint64_t word = words_[(limit - 1) / 64] << (64 - in_word);
      const auto ones = static_cast<uint32_t>(std::countl_one(word));
      limit -= std::min(ones, in_word);
      if (ones < in_word) break;
    }
    return std::max(from, limit);
  }

  bool operator==(const IndexSet&) const = default;

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
