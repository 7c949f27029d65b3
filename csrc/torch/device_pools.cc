#include "torch/device_pools.h"

#include <c10/cuda/CUDAMacros.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>

#include "core/base/error.h"
#include "torch/observe/history.h"
#include "torch/runtime.h"

namespace cgp {
namespace {

std::mutex registration_mutex;

Address ToAddress(const void* pointer) { return reinterpret_cast<Address>(pointer); }

}  // namespace

DevicePools::DevicePools(DeviceIndex of)
    : device(of),
      driver(MakeDriver(of), &History::Mapped),
      set(driver),
      total_bytes(driver.Info().total_bytes),
      stats(driver, set, total_bytes) {}

DevicePools& DevicePools::For(DeviceIndex index, PoolsOwner owner) {
  if (DevicePools* const pools = Find(index, owner)) return *pools;
  if (index < 0 || index >= C10_COMPILE_TIME_MAX_GPUS) {
    throw UsageError("device " + std::to_string(index) + " is not a CUDA device; expected 0 to " +
                     std::to_string(C10_COMPILE_TIME_MAX_GPUS - 1));
  }
  const std::lock_guard lock(registration_mutex);
  if (DevicePools* const pools = Find(index, owner)) return *pools;
  std::unique_ptr<DevicePools> made(new DevicePools(index));
  if (owner == kPluggableAllocator) {
    for (DevicePools* const other : All(owner)) {
      for (const auto& [pools, peer] :
           {std::pair(other, index), std::pair(made.get(), other->device)}) {
        try {
          pools->set.EnablePeer(peer);
        } catch (const DriverError& error) {  // that cannot reach this one
          if (error.code() != cudaErrorPeerAccessUnsupported) throw;
        }
      }
    }
  }
  std::atomic<DevicePools*>& newest = newest_[static_cast<size_t>(owner)];
  made->before_ = newest.load(std::memory_order_relaxed);
  newest.store(made.get(), std::memory_order_release);
  return *made.release();  // never deleted: see the header
}

DevicePools* DevicePools::Find(DeviceIndex index, PoolsOwner owner) noexcept {
  return FindFirst(owner,
                   [&](DevicePools& pools) { return pools.device == index ? &pools : nullptr; });
}

std::vector<DevicePools*> DevicePools::All(PoolsOwner owner) {
  std::vector<DevicePools*> result;
  FindFirst(owner, [&](DevicePools& pools) {
    result.push_back(&pools);
    return false;
  });
  std::ranges::sort(result, {}, &DevicePools::device);
  return result;
}

DevicePools* DevicePools::TryFree(const void* address, Block* block, PoolsOwner owner) {
  return FindFirst(owner, [&](DevicePools& pools) -> DevicePools* {
    const auto freed = pools.set.TryFree(ToAddress(address));
    if (!freed) return nullptr;
    *block = *freed;
    return &pools;
  });
}

bool DevicePools::TryRecordUse(const void* address, StreamId stream, PoolsOwner owner) {
  return FindFirst(owner, [&](DevicePools& pools) {
    const bool own = DeviceOf(stream) == pools.device;
    return pools.set.TryRecordUse(ToAddress(address), own ? WithoutDevice(stream) : stream);
  });
}

void DevicePools::EndScope(PoolId id) {
  try {
    set.EndScope(id);
  } catch (const std::exception&) {
    set.EndScope(id, /*may_ask_device=*/false);
  }
}

uint64_t DevicePools::Trim(Base* base, std::optional<PoolId> only) {
  if (base != nullptr) stats.BeforeChange(*base);
  uint64_t bytes = 0;
  try {
    const RelaxedCaptureMode relaxed;
    bytes = set.Trim(only);
  } catch (const DriverError& error) {
    // Somebody captures without torch, or another thread is just ending a capture, so the device
    // cannot be waited for. A later Trim() gives the memory back.
    if (error.code() != cudaErrorStreamCaptureUnsupported) throw;
  }
  if (base != nullptr) stats.AfterChange(*base);
  return bytes;
}

std::optional<DevicePools::Owned> DevicePools::At(const void* address) {
  return FindFirst(kGraphAllocator, [&](DevicePools& pools) -> std::optional<Owned> {
    const auto found = pools.set.At(ToAddress(address));
    if (!found) return std::nullopt;
    return Owned{.pools = &pools, .id = found->id, .block = found->block};
  });
}

void* DevicePools::BaseAllocation(const void* address, size_t* bytes, PoolsOwner owner) {
  const std::optional<Block> block =
      FindFirst(owner, [&](DevicePools& pools) { return pools.set.Find(ToAddress(address)); });
  if (!block) return nullptr;
  if (bytes != nullptr) *bytes = block->bytes;
  return reinterpret_cast<void*>(block->address);
}

}  // namespace cgp
