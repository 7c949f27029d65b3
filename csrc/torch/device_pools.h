// The graph pools of each device: driver, pool set and what torch's statistics need, made when
// first asked for.
//
// They live as long as the process. Tensors in a pool may outlive the interpreter and the CUDA
// context, and a DataPtr's deleter is a bare function: it must find its pool whenever it is called.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "core/pool_set.h"

namespace cgp {

using c10::CachingDeviceAllocator::DeviceStats;

class DevicePools {
 public:
  // The pools of `device`, made now if need be. Throws DriverError where the device cannot map
  // memory.
  static DevicePools& For(c10::DeviceIndex device);
  // The same, but nullptr if nobody asked For() them yet. Never throws, takes no lock.
  static DevicePools* Find(c10::DeviceIndex device) noexcept;
  // All that were made, in the order of devices. Takes no lock.
  static std::vector<DevicePools*> All();
  // The pools of the live block that starts at `address`, or nullptr if it is none of ours.
  static DevicePools* Owner(const void* address, Block* block);
  // The live block that holds `address`, not only at its start. Slow: for diagnostics.
  static std::optional<Block> Around(const void* address);

  DevicePools(const DevicePools&) = delete;
  DevicePools& operator=(const DevicePools&) = delete;

  c10::DeviceIndex device() const { return device_; }
  PoolSet& set() { return set_; }
  Driver& driver() { return *driver_; }

  // PoolSet's members of the same names, with the books kept. Free() takes the block as Owner()
  // gave it.
  Block Allocate(PoolId id, uint64_t bytes, StreamId stream);
  void Free(const Block& block);
  uint64_t Trim();

  // What torch.cuda.memory_stats() counts, for these pools alone.
  DeviceStats Stats();
  void ResetAccumulatedStats();
  void ResetPeakStats();

 private:
  explicit DevicePools(c10::DeviceIndex device);

  // Reserved memory grows only in Allocate() and shrinks only in Trim(): it is enough to look
  // before and after Trim() and when somebody asks. pre: stats_mutex_ is held.
  void NoteReserved();

  const c10::DeviceIndex device_;
  const std::unique_ptr<Driver> driver_;
  PoolSet set_;
  std::mutex stats_mutex_;
  DeviceStats stats_;
};

// Adds `from` to `into`. Peaks are added too: the sum is an upper bound of the common peak, which
// neither side knows.
void AddStats(const DeviceStats& from, DeviceStats& into);

}  // namespace cgp
