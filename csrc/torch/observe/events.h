// Tells others of what happens in our pools: the statistics, the history and its trackers, torch's
// profiler, the tracer of its sanitizer, and observers of memory that has run out. Native
// allocators tell them the same. Their errors become warnings, since it has happened.
#pragma once

#include "torch/device_pools.h"
#include "torch/errors.h"
#include "torch/observe/history.h"

namespace cgp {

// Counts a new block and tells everybody.
void Announce(Base& base, const DevicePools::Owned& made, History::Context context) noexcept;

// Frees the block that starts at `pointer`; returns false if there is none of ours.
bool FreeAnnounced(Base& base, void* pointer);

// Tells the history what going back to a checkpoint has freed and allocated.
void NoteRestored(Base& base, DevicePools& pools, PoolId id, const RestoreDelta& delta) noexcept;

// An allocation requested in one of our pools.
struct Request {
  PoolId id;
  size_t bytes = 0;
  StreamId stream{};
  CaptureId capture = kNoCapture;
  bool whole_pages = false;  // the block shares no page
};

// Adds what the device's graph pools hold to an out-of-memory error of the base.
void AddPools(c10::OutOfMemoryError& error, DeviceIndex device) noexcept;

// Tells all out-of-memory observers, and throws c10::OutOfMemoryError.
[[noreturn]] void ThrowOutOfMemory(Base& base, DevicePools& pools, const Request& request);

}  // namespace cgp
