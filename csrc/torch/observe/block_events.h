// Who hears of each block of ours, beside the statistics: the history and its trackers, torch's
// profiler, and the tracer of its sanitizer. Native allocators tell them the same.
#pragma once

#include "torch/device_pools.h"
#include "torch/observe/history.h"

namespace cgp {

// Counts a new block and tells everybody of it. If that fails the block is gone, and the error goes
// on.
void Announce(MergedStats::Base& base, const DevicePools::Owned& made, History::Context context);

// Frees the block that starts at `pointer`; returns false if none of ours does. An error of those
// who are told of it is thrown when the block is free, which `freed` says.
bool FreeAnnounced(MergedStats::Base& base, void* pointer, bool* freed);

// Tells the history what going back to a checkpoint has freed and allocated.
void NoteRestored(MergedStats::Base& base, DevicePools& pools, PoolId id,
                  const RestoreDelta& delta);

}  // namespace cgp
