// What all pools of a set hold together, those that are gone included. Unlike the sum of the pools'
// own peaks, these peaks are what was there at one moment.
//
// invariant, of the current values: all == small + large, for each of the three gauges
#pragma once

#include <cstdint>

#include "core/base/block.h"

namespace cgp {

// How much of something there is, the most there was, and how much came and went.
struct Gauge {
  uint64_t current = 0;
  uint64_t peak = 0;     // of `current`, since ResetPeak()
  uint64_t most = 0;     // of `current`, ever
  uint64_t added = 0;    // since ResetTraffic()
  uint64_t removed = 0;  // since ResetTraffic()

  // Returns whether there never was as much.
  bool Add(uint64_t amount) {
    current += amount;
    added += amount;
    if (current > most) most = current;
    if (current <= peak) return false;
    peak = current;
    return true;
  }
  // pre: amount <= current.
  void Remove(uint64_t amount) {
    current -= amount;
    removed += amount;
  }
  // Either of these, so that there is so much. Returns as Add().
  bool Set(uint64_t amount) {
    if (amount >= current) return Add(amount - current);
    Remove(current - amount);
    return false;
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
  bool Add(const Block& block) {
    bool raised = count.Add(1);
    raised |= bytes.Add(block.bytes);
    raised |= requested_bytes.Add(block.requested_bytes);
    return raised;
  }
  void Remove(const Block& block) {
    count.Remove(1);
    bytes.Remove(block.bytes);
    requested_bytes.Remove(block.requested_bytes);
  }
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
  bool Allocated(const Block& block) {
    free_bytes.Remove(block.bytes);
    bool raised = all.Add(block);
    raised |= OfSize(block).Add(block);
    return raised;
  }
  bool SetReserved(uint64_t handle_count, uint64_t bytes) {
    free_bytes.Set(free_bytes.current + bytes - reserved_bytes.current);
    bool raised = handles.Set(handle_count);
    raised |= reserved_bytes.Set(bytes);
    return raised;
  }
  void Freed(const Block& block) {
    all.Remove(block);
    OfSize(block).Remove(block);
    free_bytes.Add(block.bytes);
  }

  // function(gauge, the other's)
  template <typename Function>
  void ForEachPair(SetUsage& other, Function function) {
    for (const auto blocks : {&SetUsage::all, &SetUsage::small, &SetUsage::large}) {
      for (const auto gauge :
           {&BlockUsage::count, &BlockUsage::bytes, &BlockUsage::requested_bytes}) {
        function(this->*blocks.*gauge, other.*blocks.*gauge);
      }
    }
    for (const auto gauge : {&SetUsage::handles, &SetUsage::reserved_bytes, &SetUsage::free_bytes,
                             &SetUsage::free_extents}) {
      function(this->*gauge, other.*gauge);
    }
  }
  template <typename Function>
  void ForEachGauge(Function function) {
    ForEachPair(*this, [&](Gauge& gauge, const Gauge&) { function(gauge); });
  }

 private:
  BlockUsage& OfSize(const Block& block) {
    return block.bytes <= kLargestSmallBlock ? small : large;
  }
};

}  // namespace cgp
