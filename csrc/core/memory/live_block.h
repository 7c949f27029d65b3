// A block that lives in a pool, as the pool knows it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/address_map.h"
#include "core/base/block.h"
#include "core/base/units.h"
#include "core/driver.h"
#include "core/memory/shared_space.h"

namespace cgp {

// Who but its stream works on a block.
struct Others {
  std::vector<StreamId> uses;   // recorded
  std::vector<FenceId> behind;  // its bytes, when a restore brought it back; those not open yet

  bool empty() const { return uses.empty() && behind.empty(); }
  void AddBehind(FenceId fence) {
    if (std::ranges::find(behind, fence) == behind.end()) behind.push_back(fence);
  }
};

// A cache line, since a free of one among many blocks has to fetch it.
struct alignas(64) LiveBlock {
  Block block;
  Site site;
  // Names the stream that allocated it, in the scope in which it did (StreamMemory); 0: none.
  uint32_t tenure = 0;
  uint32_t capture = 0;  // how many had begun when it was allocated
  // Some work on it was not captured: it was allocated in an eager scope, or another stream used it
  // outside of captures.
  bool eager = false;
  bool pinned = true;              // its range is
  std::unique_ptr<Others> others;  // mostly none

  Granules length() const { return Granules::FromBytesRoundedUp(block.bytes); }
  // Whether no stream but its own works on it.
  bool is_alone() const { return !others || others->empty(); }
  bool is_behind() const { return others && !others->behind.empty(); }
  Others& GetOthers() {
    if (!others) others = std::make_unique<Others>();
    return *others;
  }
  // pre: not the block's own stream.
  void AddUse(StreamId stream) {
    std::vector<StreamId>& uses = GetOthers().uses;
    if (std::ranges::find(uses, stream) == uses.end()) uses.push_back(stream);
  }
  // What a checkpoint knows of it.
  void AddWork(bool some_was_eager, const std::vector<StreamId>& recorded_uses) {
    eager |= some_was_eager;
    for (const StreamId use : recorded_uses) AddUse(use);
  }
};
static_assert(sizeof(LiveBlock) == 64);

using LiveBlocks = AddressMap<LiveBlock>;  // by their addresses

}  // namespace cgp
