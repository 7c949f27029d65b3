// What all pools of a set hold together, those that are gone included. Unlike the sum of the pools'
// own peaks, these peaks are what was there at one moment.
//
// invariant, of the current values: all == small + large, for each of the three gauges
#pragma once

#include <array>
#include <cstdint>

#include "core/base/block.h"

namespace cgp {

// How much of something there is, the most there was, and how much came and went.
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

// Blocks up to this size count as small ones: the border that PyTorch's statistics draw.
inline constexpr uint64_t kLargestSmallBlock = uint64_t{1} << 20;

struct BlockUsage {
  Gauge count;
  Gauge bytes;
  Gauge requested_bytes;  // what was asked for

  // Returns whether one of the gauges has a new peak.
  bool Add(const Block& block);
  void Remove(const Block& block);
};

struct SetUsage {
  BlockUsage all;
  BlockUsage small;
  BlockUsage large;
  Gauge handles;         // of physical memory
  Gauge reserved_bytes;  // their bytes
  Gauge free_bytes;      // of which no block has: reserved_bytes - all.bytes
  Gauge free_extents;    // in how many stretches these are

  // These two return whether anything but what is free has a new peak.
  bool Allocated(const Block& block);
  bool Grew(uint64_t handle_count, uint64_t bytes);
  void Freed(const Block& block);
  void SetFreeExtents(uint64_t count);
  void Shrank(uint64_t handle_count, uint64_t bytes);

  void ResetPeaks();
  void ResetTraffic();

 private:
  template <typename Function>
  void ForEachGauge(Function function);
};

}  // namespace cgp
