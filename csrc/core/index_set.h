// A set of small numbers that finds the next member at or after a given one in O(log64 n): a tree
// of 64-bit words, each bit of a level telling whether the word below it has any bit set (a van
// Emde Boas tree's poor relation).
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
    if (levels_.empty()) levels_.emplace_back();
    uint32_t words = Words(limit);
    if (words <= levels_[0].size()) return;
    for (std::size_t level = 0;; ++level) {
      if (level == levels_.size()) {
        // A new top: what the level below it held so far must be summed up.
        levels_.emplace_back(words);
        const std::vector<uint64_t>& below = levels_[level - 1];
        for (uint32_t w = 0; w < below.size(); ++w) {
          if (below[w] != 0) levels_[level][w / 64] |= Bit(w);
        }
      } else {
        levels_[level].resize(words);
      }
      if (words == 1) break;
      words = Words(words);
    }
  }

  bool Contains(uint32_t i) const { return (levels_[0][i / 64] & Bit(i)) != 0; }

  void Insert(uint32_t i) {
    for (std::vector<uint64_t>& level : levels_) {
      uint64_t& word = level[i / 64];
      const bool was_empty = word == 0;
      word |= Bit(i);
      if (!was_empty) return;
      i /= 64;
    }
  }

  void Erase(uint32_t i) {
    for (std::vector<uint64_t>& level : levels_) {
      uint64_t& word = level[i / 64];
      word &= ~Bit(i);
      if (word != 0) return;
      i /= 64;
    }
  }

  // The smallest member that is at least `i`.
  std::optional<uint32_t> Next(uint32_t i) const {
    std::size_t level = 0;
    for (; level < levels_.size(); ++level) {
      if (i / 64 >= levels_[level].size()) return std::nullopt;
      const uint64_t rest = levels_[level][i / 64] >> (i % 64);
      if (rest != 0) {
        i += static_cast<uint32_t>(std::countr_zero(rest));
        break;
      }
      i = i / 64 + 1;
    }
    if (level == levels_.size()) return std::nullopt;
    for (; level > 0; --level) {
      i = i * 64 + static_cast<uint32_t>(std::countr_zero(levels_[level - 1][i]));
    }
    return i;
  }

  void Clear() {
    for (std::vector<uint64_t>& level : levels_) level.assign(level.size(), 0);
  }

 private:
  static constexpr uint64_t Bit(uint32_t i) { return uint64_t{1} << (i % 64); }
  static constexpr uint32_t Words(uint32_t limit) { return limit / 64 + (limit % 64 != 0 ? 1 : 0); }

  // invariant: bit i of levels_[k + 1] is set  <=>  word i of levels_[k] is not zero.
  std::vector<std::vector<uint64_t>> levels_;
};

}  // namespace cgp
