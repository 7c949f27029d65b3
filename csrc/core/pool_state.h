// What a pool is inside, for the files that make it up:
//
//   pool.cc             the front: scopes, blocks that come and go, what is told of them
//   pool_checkpoint.cc  back to what lived earlier
//   pool_give_back.cc   what nobody needs any more is unmapped
//
// It joins what is mapped (RangeTable), who may take it (StreamMemory) and where blocks go (Placer).
//
// invariants:
//   stats.allocated_bytes   == sum of block.bytes over `blocks`, requested_bytes likewise
//   live.block.address      == ranges.AddressOf(live.site)
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "core/base/units.h"
#include "core/memory/live_block.h"
#include "core/memory/range_table.h"
#include "core/memory/stream_memory.h"
#include "core/placer.h"
#include "core/pool.h"
#include "core/pool_checkpoint.h"
#include "driver/driver.h"

namespace cgp {

struct Pool::State {
  static constexpr uint64_t kLeastMappingLimit = 512;

  State(Driver& driver, Granules page_size)
      : ranges(driver, page_size),
        memory(driver, page_size, ranges, blocks),
        placer(driver, ranges, memory, blocks) {}

  // pool.cc
  LiveBlock& Known(Address address);
  void List(LiveBlock&& live);
  void Unlist(const Block& block, Ticket ticket);

  // pool_checkpoint.cc
  LiveBlock BlockOf(const PoolCheckpoint::Entry& entry,
                    const RangeTable::AddressIndex& index) const;

  // pool_give_back.cc
  std::vector<bool> HandlesInUse() const;
  std::vector<bool> SlotsInUse() const;
  std::exception_ptr Shrink();

  LiveBlocks blocks;
  RangeTable ranges;
  StreamMemory memory;
  Placer placer;
  uint64_t mapping_limit = kLeastMappingLimit;       // beyond which mappings are looked through
  std::shared_ptr<RangeTable::Shrinking> shrinking;  // what is prepared
  PoolStats stats;                                   // what Stats() does not derive
  std::vector<CaptureStats> captures;                // in a capture scope, with room for one more
  uint64_t reserved_before = 0;                      // when the scope began
  CaptureStats capture;                              // of the scope, what is known so far
  // Its address is the pool's identity, of which checkpoints keep a weak reference.
  std::shared_ptr<const char> identity = std::make_shared<const char>();
  std::shared_ptr<const char> next_identity;  // what it is after the GiveBack() that is prepared
};

}  // namespace cgp
