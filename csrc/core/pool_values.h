// What pools are told, and what they report: plain values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/units.h"
#include "core/driver.h"

namespace cgp {

struct PoolOptions {
  // The size of a page: a power-of-two multiple of the driver's granularity; 0: the granularity
  // itself.
  uint64_t page_bytes = 0;
  // Its handles are those of another pool, which lends them (Pool::Adopt()).
  bool borrows = false;
};

struct PoolStats {
  uint64_t page_bytes = 0;
  uint64_t pages = 0;
  // Physical memory held: pages * page_bytes, however often a page is mapped.
  uint64_t reserved_bytes = 0;
  uint64_t allocated_bytes = 0;  // sum of live blocks
  uint64_t requested_bytes = 0;  // what was asked for in live blocks
  uint64_t live_blocks = 0;
  uint64_t peak_reserved_bytes = 0;
  uint64_t peak_allocated_bytes = 0;
  uint64_t scope_peak_bytes = 0;  // of allocated_bytes, since the last scope began
  uint64_t ranges = 0;
  // Handles that are mapped, each counted once for each mapping. A handle is one page or, in a
  // large pool, several.
  uint64_t page_mappings = 0;
  uint64_t allocations = 0;  // since the pool was made
  uint64_t frees = 0;        // since the pool was made
  bool asleep = false;
  uint64_t away_bytes = 0;        // given to the device by leases; reserved_bytes is without them
  uint64_t lent_bytes = 0;        // in live blocks that borrow
  uint64_t unnamed_captures = 0;  // whose graphs nobody names, so their pages stay
};

// What a lease took or brought back.
struct Leased {
  uint64_t bytes = 0;
  uint64_t handles = 0;
  uint64_t mappings = 0;
};

// How much of something there is, the most there was, and how much came and went.
struct Gauge {
  uint64_t current = 0;
  uint64_t peak = 0;     // of `current`, since ResetPeak()
  uint64_t most = 0;     // of `current`, ever
  uint64_t added = 0;    // since ResetTraffic()
  uint64_t removed = 0;  // since ResetTraffic()

  // Returns whether this is a new peak.
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
  // Adds or removes, so that there is this much. Returns as Add().
  bool Set(uint64_t amount) {
    if (amount >= current) return Add(amount - current);
    Remove(current - amount);
    return false;
  }
  void ResetPeak() { peak = current; }
  void ResetTraffic() { added = removed = 0; }
};

// Blocks up to this size count as small, as in PyTorch's statistics.
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

// What all pools of a set hold together, those that are gone included. These peaks are what was
// there at one moment, unlike the sum of the pools' own peaks.
//
// invariant, of the current values: all == small + large, for each of the three gauges
struct SetUsage {
  BlockUsage all;
  BlockUsage small;
  BlockUsage large;
  Gauge handles;         // of physical memory
  Gauge reserved_bytes;  // their bytes
  Gauge free_bytes;      // in no block: reserved_bytes - all.bytes, or 0 while blocks are away
  Gauge free_extents;    // in how many spans these are

  // These two return whether anything but free_bytes and free_extents has a new peak.
  bool Allocated(const Block& block) {
    bool raised = all.Add(block);
    raised |= OfSize(block).Add(block);
    SetFree();
    return raised;
  }
  bool SetReserved(uint64_t handle_count, uint64_t bytes) {
    bool raised = handles.Set(handle_count);
    raised |= reserved_bytes.Set(bytes);
    SetFree();
    return raised;
  }
  void Freed(const Block& block) {
    all.Remove(block);
    OfSize(block).Remove(block);
    SetFree();
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

 private:
  void SetFree() {
    const uint64_t live = std::min(all.bytes.current, reserved_bytes.current);
    free_bytes.Set(reserved_bytes.current - live);
  }
  BlockUsage& OfSize(const Block& block) {
    return block.bytes <= kLargestSmallBlock ? small : large;
  }
};

// What one capture scope used.
struct CaptureStats {
  uint64_t added_bytes = 0;        // physical memory by which the pool grew
  uint64_t live_before_bytes = 0;  // allocated_bytes when it began
  uint64_t peak_bytes = 0;         // the most of allocated_bytes, with what lived before
  uint64_t first_allocation = 0;   // the number of allocations before it
  uint64_t allocations = 0;
};

struct PoolSnapshot {
  struct LiveBlock {
    Block block;
    std::vector<PhysicalPiece> pieces;  // in the order of the block's addresses
  };
  struct Range {
    Address address = 0;        // of the first mapped page
    std::vector<PageId> pages;  // in the order of addresses
  };
  PoolStats stats;
  std::vector<LiveBlock> blocks;  // in the order of addresses
  std::vector<Range> ranges;
  // Pages that stats.reserved_bytes is without: lent to another pool, or the device's.
  std::vector<PageId> gone;
  // Free only for blocks that alternate (ring.h), at the latest when the capture ends. A piece may
  // go on through the pages that follow.
  std::vector<PhysicalPiece> ring;
};

// The blocks that lived in a pool at one moment, so that they can live there again.
//
// torch.compile's graph trees go back to the end of an earlier graph and record another one from
// there. The blocks that lived then must live again, at their addresses, and nothing else.
//
// A checkpoint holds the blocks and not the free bytes, which follow from the blocks. Their fences
// are not part of it either: they stand for work that is submitted by the time of the restore.
// While a checkpoint may be restored, all that it needs stays mapped (Pool::GiveBack() ends that).
struct PoolCheckpoint {
  struct Entry {
    Block block;
    bool eager = false;          // some work on it was not captured
    std::vector<StreamId> uses;  // recorded by then
  };
  std::vector<Entry> blocks;        // in the order of addresses
  std::weak_ptr<const void> owner;  // the pool's identity, since ids and addresses are reused
};

// What a restore did. A block that lived before and lives again is in both.
struct RestoreDelta {
  std::vector<Block> freed;      // all that lived
  std::vector<Block> allocated;  // all that live
};

}  // namespace cgp
