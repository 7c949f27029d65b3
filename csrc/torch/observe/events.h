// Who hears of what happens in our pools, beside the statistics: the history and its trackers,
// torch's profiler, the tracer of its sanitizer, and observers of memory that has run out. Native
// allocators tell them the same. What they throw becomes a warning: what happened has.
#pragma once

#include "torch/device_pools.h"
#include "torch/errors.h"
#include "torch/observe/history.h"

namespace cgp {

// Counts a new block and tells everybody of it.
void Announce(Base& base, const DevicePools::Owned& made, History::Context context) noexcept;

// Frees the block that starts at `pointer`; returns false if none of ours does.
bool FreeAnnounced(Base& base, void* pointer);

// Tells the history what going back to a checkpoint has freed and allocated.
void NoteRestored(Base& base, DevicePools& pools, PoolId id, const RestoreDelta& delta) noexcept;

// An allocation that was asked for in one of our pools.
struct Request {
  PoolId id;
  size_t bytes = 0;
  StreamId stream{};
  CaptureId capture = kNoCapture;
  bool whole_pages = false;  // of which the block shares none
};

// Adds what graph pools of the device hold to an error of the base, which has no memory left there.
void AddPools(c10::OutOfMemoryError& error, DeviceIndex device) noexcept;

// Tells everybody who asked to hear of memory that has run out, and throws c10::OutOfMemoryError.
[[noreturn]] void ThrowOutOfMemory(Base& base, DevicePools& pools, const Request& request);

}  // namespace cgp
