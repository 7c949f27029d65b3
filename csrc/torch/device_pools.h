// The graph pools of each device, with their driver and statistics, made at first use.
//
// They live as long as the process. A tensor in a pool may outlive the interpreter and the CUDA
// context, and a DataPtr's deleter is a bare function: it must always find its pool.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "core/pool_set.h"
#include "driver/metered_driver.h"
#include "torch/observe/merged_stats.h"

namespace cgp {

using c10::DeviceIndex;
using c10::MempoolId_t;

class History;

// Who hands out the blocks of some pools. Each has pools of its own on each device. A segment that
// the C functions hand out for a MemPool is the base's memory, counted by the base. GraphAllocator
// must not free a block that the base makes at its start.
enum class PoolsOwner { kGraphAllocator, kPluggableAllocator };
using enum PoolsOwner;
inline constexpr std::array kPoolsOwners{kGraphAllocator, kPluggableAllocator};

class DevicePools {
 public:
  // The pools of the device, made now if need be. Throws DriverError if the device cannot map
  // memory. Pools of the C functions let in all devices: torch asks a CUDAPluggableAllocator for
  // peers, which tells nobody.
  static DevicePools& For(DeviceIndex index, PoolsOwner owner = kGraphAllocator);
  // The same, but nullptr if For() has not made them. Never throws, takes no lock.
  static DevicePools* Find(DeviceIndex index, PoolsOwner owner = kGraphAllocator) noexcept;
  // All that exist, in the order of devices. Takes no lock.
  static std::vector<DevicePools*> All(PoolsOwner owner = kGraphAllocator);

  // The first answer of `ask`, called for each device's pools, that is not empty. Takes no lock.
  template <typename Ask>
  static auto FindFirst(PoolsOwner owner, const Ask& ask)
      -> decltype(ask(std::declval<DevicePools&>())) {
    const auto& newest = newest_[static_cast<size_t>(owner)];
    for (auto* pools = newest.load(std::memory_order_acquire); pools; pools = pools->before_) {
      if (auto answer = ask(*pools)) return answer;
    }
    return {};
  }

  // PoolSet's TryFree() and TryRecordUse() for a block of any device. The former returns that
  // device's pools, or nullptr, and what the block was. The latter takes a stream of any device, as
  // StreamOn() names it.
  static DevicePools* TryFree(const void* address, Block* block,
                              PoolsOwner owner = kGraphAllocator);
  static bool TryRecordUse(const void* address, StreamId stream,
                           PoolsOwner owner = kGraphAllocator);
  // A live block of GraphAllocator's, with its pool.
  struct Owned {
    DevicePools* pools;
    PoolId id;
    Block block;
  };
  // The block that starts at `address`, if there is one.
  static std::optional<Owned> At(const void* address);
  // CUDAAllocator::getBaseAllocation(), or nullptr if no live block holds `address`. Slow.
  static void* BaseAllocation(const void* address, size_t* bytes,
                              PoolsOwner owner = kGraphAllocator);

  // PoolSet::EndScope(), even if the device cannot be marked, or the host lacks memory: torch ends
  // a scope once.
  void EndScope(PoolId id);

  // PoolSet::Trim(), without disturbing a capture of another thread that torch does not know of;
  // then it may give nothing back. It tells `base`, if given, before and after. pre: torch knows of
  // no capture.
  uint64_t Trim(Base* base, std::optional<PoolId> only = std::nullopt);

  // Appends the pool `only`, or all pools, with what `history` knows of their blocks, as
  // torch.cuda.memory_snapshot() shows memory.
  //
  // A byte may have several addresses, but must be shown once: a live block's at the block's
  // address, a free one at the first address of its page. Bytes side by side form a segment, up to
  // the first live block of another stream. So each live block is whole and at its address.
  // Segments sum up to reserved bytes, their blocks to allocated bytes, and a segment has one
  // stream and any length. But what history says of mapped pages does not match these segments:
  // PyTorch's viewer cannot always go back in time.
  void AppendSegments(std::optional<PoolId> only, const History& history,
                      std::vector<c10::CachingDeviceAllocator::SegmentInfo>& segments);

  const DeviceIndex device;
  MeteredDriver driver;
  PoolSet set;
  const uint64_t total_bytes;  // of the device's memory
  MergedStats stats;

 private:
  explicit DevicePools(DeviceIndex of);

  // The newest of each owner, which lead to the earlier ones.
  static inline constinit std::array<std::atomic<DevicePools*>, kPoolsOwners.size()> newest_{};
  DevicePools* before_ = nullptr;  // of the same owner
};

}  // namespace cgp
