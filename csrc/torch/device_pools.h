// The graph pools of each device: driver, pool set and what is told of them, made at first use.
//
// They live as long as the process. Tensors in a pool may outlive the interpreter and the CUDA
// context, and a DataPtr's deleter is a bare function: it must find its pool whenever it is called.
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

// Who hands out the blocks of some pools. Each has pools of its own on each device: what the C
// functions hand out as a segment of a MemPool is the base's memory, counted by the base, and a
// block that the base makes at the segment's start is not GraphAllocator's to free.
enum class PoolsOwner { kGraphAllocator, kPluggableAllocator };
using enum PoolsOwner;
inline constexpr std::array kPoolsOwners{kGraphAllocator, kPluggableAllocator};

class DevicePools {
 public:
  // The pools of the device, made now if need be. Throws DriverError where the device cannot map
  // memory. Of pools that the C functions hand out no peer is ever named: torch asks a
  // CUDAPluggableAllocator, which tells nobody. So all their devices are let in.
  static DevicePools& For(DeviceIndex index, PoolsOwner owner = kGraphAllocator);
  // The same, but nullptr if nobody asked For() them yet. Never throws, takes no lock.
  static DevicePools* Find(DeviceIndex index, PoolsOwner owner = kGraphAllocator) noexcept;
  // All that were made, in the order of devices. Takes no lock.
  static std::vector<DevicePools*> All(PoolsOwner owner = kGraphAllocator);

  // What `ask` says of the first pools of which it says anything. Takes no lock.
  template <typename Ask>
  static auto FindFirst(PoolsOwner owner, const Ask& ask)
      -> decltype(ask(std::declval<DevicePools&>())) {
    const auto& newest = newest_[static_cast<size_t>(owner)];
    for (auto* pools = newest.load(std::memory_order_acquire); pools; pools = pools->before_) {
      if (auto answer = ask(*pools)) return answer;
    }
    return {};
  }

  // PoolSet's TryFree() and TryRecordUse() for a block of whichever device. The former returns that
  // device's pools, or nullptr, and what the block was. The latter takes any device's stream that
  // StreamOn() names.
  static DevicePools* TryFree(const void* address, Block* block,
                              PoolsOwner owner = kGraphAllocator);
  static bool TryRecordUse(const void* address, StreamId stream,
                           PoolsOwner owner = kGraphAllocator);
  // A live block of GraphAllocator's, and whose it is.
  struct Owned {
    DevicePools* pools;
    PoolId id;
    Block block;
  };
  // The one that starts at `address`, if one does.
  static std::optional<Owned> At(const void* address);
  // CUDAAllocator::getBaseAllocation(), or nullptr if no live block holds `address`. Slow.
  static void* BaseAllocation(const void* address, size_t* bytes,
                              PoolsOwner owner = kGraphAllocator);

  // PoolSet::EndScope(), also where the device cannot be marked, or for lack of the host's memory:
  // torch ends a scope once.
  void EndScope(PoolId id);

  // PoolSet::Trim(), without disturbing a capture that another thread may have under way and torch
  // does not know of; then it may give nothing back. It runs between what `base` has to be asked
  // and told, if there is one. pre: torch knows of no capture.
  uint64_t Trim(Base* base, std::optional<PoolId> only = std::nullopt);

  // Appends the pool `only`, or all pools, with what `history` knows of their blocks, as
  // torch.cuda.memory_snapshot() shows memory.
  //
  // A byte may stand behind several addresses, but must be shown once: one of a live block at the
  // block's address, a free one at the first address that its page was mapped at. Bytes shown side
  // by side form a segment, up to the first live block of another stream. So live blocks stand
  // where they are, whole; the segments sum up to what is reserved and their blocks to what is
  // allocated; and a segment is of one stream and any number of bytes long. But what history tells
  // of pages that are mapped is not what segments look like: PyTorch's viewer cannot always go back
  // in time.
  void AppendSegments(std::optional<PoolId> only, const History& history,
                      std::vector<c10::CachingDeviceAllocator::SegmentInfo>& segments);

  const DeviceIndex device;
  MeteredDriver driver;
  PoolSet set;
  const uint64_t total_bytes;  // of the device's memory
  MergedStats stats;

 private:
  explicit DevicePools(DeviceIndex of);

  // Those that each owner made last, which lead to those before.
  static inline constinit std::array<std::atomic<DevicePools*>, kPoolsOwners.size()> newest_{};
  DevicePools* before_ = nullptr;  // of the same owner
};

}  // namespace cgp
