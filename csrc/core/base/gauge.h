// How much of something there is, the most there was, and how much came and went.
#pragma once

#include <cstdint>

namespace cgp {

struct Gauge {
  uint64_t current = 0;
  uint64_t peak = 0;     // of `current`, since ResetPeak()
  uint64_t added = 0;    // since ResetTraffic()
  uint64_t removed = 0;  // since ResetTraffic()

  // Returns whether there never was as much.
  bool Add(uint64_t amount) {
    current += amount;
    added += amount;
    if (current <= peak) return false;
    peak = current;
    return true;
  }
  // pre: amount <= current.
  void Remove(uint64_t amount) {
    current -= amount;
    removed += amount;
  }
  void ResetPeak() { peak = current; }
  void ResetTraffic() { added = removed = 0; }
};

}  // namespace cgp
