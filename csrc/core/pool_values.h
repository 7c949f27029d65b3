// What a pool is told, and what it tells of itself: plain values.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/block.h"
#include "core/base/units.h"
#include "core/driver.h"

namespace cgp {

struct PoolOptions {
  // Size of a page: a power-of-two multiple of the driver's granularity; 0 means the granularity
  // itself.
  uint64_t page_bytes = 0;
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
  // Mappings that the driver was asked for: handles behind addresses now, each counted as often as
  // it is mapped. A handle is one page or, in a large pool, several.
  uint64_t page_mappings = 0;
  uint64_t allocations = 0;  // since the pool was made
  uint64_t frees = 0;        // since the pool was made
};

// What one capture scope took.
struct CaptureStats {
  uint64_t added_bytes = 0;        // physical memory that the pool got meanwhile
  uint64_t live_before_bytes = 0;  // allocated_bytes when it began
  uint64_t peak_bytes = 0;         // the most of allocated_bytes, with what lived before
  uint64_t first_allocation = 0;   // how many were made in the pool before
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
};

// What lived in a pool at one moment, so that it can live there again.
//
// torch.compile's graph trees go back to the end of an earlier graph and record another one from
// there: the blocks that lived then must live again, at their addresses, and nothing else.
//
// A checkpoint holds the blocks, not the free bytes: these follow from the blocks, and the fences
// they stand behind belong to what has been submitted by the time of the restore, not of the
// checkpoint. What is mapped does not come into it: while a checkpoint may be restored, what it
// comes back to stays mapped (Pool::GiveBack() ends that).
struct PoolCheckpoint {
  struct Entry {
    Block block;
    bool eager = false;          // some work on it was not captured
    std::vector<StreamId> uses;  // recorded by then
  };
  std::vector<Entry> blocks;        // in the order of addresses
  std::weak_ptr<const void> owner;  // the pool's identity: ids and addresses are used again
};

// What a restore did. A block that lived before and lives again stands in both.
struct RestoreDelta {
  std::vector<Block> freed;      // all that lived
  std::vector<Block> allocated;  // all that live
};

}  // namespace cgp
