// What lived in a pool at one moment, so that it can live there again.
//
// torch.compile's graph trees go back to the end of an earlier graph and record another one from
// there: the blocks that lived then must live again, at their addresses, and nothing else.
//
// A checkpoint holds the blocks, not the free bytes: these follow from the blocks, and the fences
// they stand behind belong to what has been submitted by the time of the restore, not of the
// checkpoint. What is mapped does not come into it: while a checkpoint may be restored, what it
// comes back to stays mapped (Pool::GiveBack() ends that).
#pragma once

#include <memory>
#include <vector>

#include "core/base/units.h"
#include "core/pool.h"

namespace cgp {

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
