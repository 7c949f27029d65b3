// The word that every allocation reads: whether there is more to do than to allocate.
//
// Most allocations have nobody to tell and nothing to count. Whatever changes that is noted here: a
// scope is open, the base has allocated, a history is recorded, or a fraction of the device's
// memory is set. So eager work costs one load.
#pragma once

#include <atomic>
#include <cstdint>

namespace cgp {

class Gate {
 public:
  using Word = uint64_t;
  // No moment: whoever saw this one has to look.
  static constexpr Word kNever = ~Word{0};

  static Word Read() { return word_.load(std::memory_order_acquire); }

  // No scope is open, and the base's growth is noted already.
  static bool IsEager(Word word) { return (word & (kScopes | kBaseGrew)) == kBaseGrew; }
  static bool HasScopes(Word word) { return (word & kScopes) != 0; }
  static void CountScopes(int change) {
    word_.fetch_add(static_cast<Word>(int64_t{change}) * kOneScope, std::memory_order_acq_rel);
  }

  // The base has allocated, on whichever device.
  static void NoteBaseGrowth() {
    if ((Read() & kBaseGrew) == 0) word_.fetch_or(kBaseGrew, std::memory_order_acq_rel);
  }
  // Returns a new moment if the base has grown since the last one, else the last one.
  static Word TakeBaseGrowth() {
    Word word = Read();
    while ((word & kBaseGrew) != 0) {
      const Word next = (word & ~kBaseGrew & ~kMoment) | ((word + kOneMoment) & kMoment);
      if (word_.compare_exchange_weak(word, next, std::memory_order_acq_rel)) word = next;
    }
    return word & kMoment;
  }
  static bool BaseGrewSince(Word moment) { return (Read() & (kMoment | kBaseGrew)) != moment; }
  // The same, or a history is recorded, or a fraction set.
  static bool IsWatchedSince(Word moment) { return (Read() & ~kScopes) != moment; }

  static constexpr Word kHistory = 2;    // somebody wants to know what is done
  static constexpr Word kFractions = 4;  // a device's memory is shared as set
  static void Set(Word bit, bool on) {
    on ? word_.fetch_or(bit, std::memory_order_acq_rel)
       : word_.fetch_and(~bit, std::memory_order_acq_rel);
  }

 private:
  static constexpr Word kBaseGrew = 1;
  static constexpr Word kOneMoment = 8;
  static constexpr Word kOneScope = Word{1} << 44;
  static constexpr Word kScopes = ~(kOneScope - 1);
  static constexpr Word kMoment = ~kScopes & ~(kOneMoment - 1);

  static inline constinit std::atomic<Word> word_{0};
};

}  // namespace cgp
