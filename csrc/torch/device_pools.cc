#include "torch/device_pools.h"

#include <c10/cuda/CUDAMacros.h>

#include <array>
#include <atomic>
#include <string>

#include "core/error.h"
#include "torch/device_driver.h"

namespace cgp {
namespace {

constexpr size_t kMaxDevices = C10_COMPILE_TIME_MAX_GPUS;
constexpr auto kAggregate = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

std::array<std::atomic<DevicePools*>, kMaxDevices> all_pools{};
std::mutex creation_mutex;

size_t CheckedIndex(c10::DeviceIndex device) {
  if (device < 0 || static_cast<size_t>(device) >= kMaxDevices) {
    throw UsageError("device " + std::to_string(device) + " is not a CUDA device; expected 0 to " +
                     std::to_string(kMaxDevices - 1));
  }
  return static_cast<size_t>(device);
}

}  // namespace

DevicePools::DevicePools(c10::DeviceIndex device)
    : device_(device), driver_(MakeDriver(device)), set_(*driver_) {}

DevicePools& DevicePools::For(c10::DeviceIndex device) {
  const size_t index = CheckedIndex(device);
  if (DevicePools* pools = all_pools[index].load(std::memory_order_acquire)) return *pools;
  const std::lock_guard lock(creation_mutex);
  DevicePools* pools = all_pools[index].load(std::memory_order_acquire);
  if (pools == nullptr) {
    pools = new DevicePools(device);  // never deleted: see the header
    all_pools[index].store(pools, std::memory_order_release);
  }
  return *pools;
}

DevicePools* DevicePools::Find(c10::DeviceIndex device) noexcept {
  if (device < 0 || static_cast<size_t>(device) >= kMaxDevices) return nullptr;
  return all_pools[static_cast<size_t>(device)].load(std::memory_order_acquire);
}

std::vector<DevicePools*> DevicePools::All() {
  std::vector<DevicePools*> result;
  for (const auto& slot : all_pools) {
    if (DevicePools* pools = slot.load(std::memory_order_acquire)) result.push_back(pools);
  }
  return result;
}

DevicePools* DevicePools::Owner(const void* address, Block* block) {
  for (const auto& slot : all_pools) {
    DevicePools* pools = slot.load(std::memory_order_acquire);
    if (pools == nullptr) continue;
    if (const auto found = pools->set_.At(reinterpret_cast<Address>(address))) {
      *block = *found;
      return pools;
    }
  }
  return nullptr;
}

std::optional<Block> DevicePools::Around(const void* address) {
  for (DevicePools* pools : All()) {
    if (auto found = pools->set_.Find(reinterpret_cast<Address>(address))) return found;
  }
  return std::nullopt;
}

Block DevicePools::Allocate(PoolId id, uint64_t bytes, StreamId stream) {
  const Block block = set_.Allocate(id, bytes, stream);
  const std::lock_guard lock(stats_mutex_);
  stats_.allocation[kAggregate].increase(1);
  stats_.active[kAggregate].increase(1);
  stats_.allocated_bytes[kAggregate].increase(block.bytes);
  stats_.active_bytes[kAggregate].increase(block.bytes);
  stats_.requested_bytes[kAggregate].increase(block.requested_bytes);
  return block;
}

void DevicePools::Free(const Block& block) {
  set_.Free(block.address);
  const std::lock_guard lock(stats_mutex_);
  stats_.allocation[kAggregate].decrease(1);
  stats_.active[kAggregate].decrease(1);
  stats_.allocated_bytes[kAggregate].decrease(block.bytes);
  stats_.active_bytes[kAggregate].decrease(block.bytes);
  stats_.requested_bytes[kAggregate].decrease(block.requested_bytes);
}

uint64_t DevicePools::Trim() {
  const std::lock_guard lock(stats_mutex_);
  NoteReserved();
  const uint64_t bytes = set_.Trim();
  NoteReserved();
  return bytes;
}

void DevicePools::NoteReserved() {
  auto& reserved = stats_.reserved_bytes[kAggregate];
  const auto before = static_cast<uint64_t>(reserved.current);
  const uint64_t now = set_.TotalStats().reserved_bytes;
  if (now >= before) {
    reserved.increase(now - before);
  } else {
    reserved.decrease(before - now);
  }
}

DeviceStats DevicePools::Stats() {
  const std::lock_guard lock(stats_mutex_);
  NoteReserved();
  return stats_;
}

void DevicePools::ResetAccumulatedStats() {
  const std::lock_guard lock(stats_mutex_);
  NoteReserved();
  for (auto* stat : {&stats_.allocation, &stats_.active, &stats_.allocated_bytes,
                     &stats_.active_bytes, &stats_.requested_bytes, &stats_.reserved_bytes}) {
    (*stat)[kAggregate].reset_accumulated();
  }
}

void DevicePools::ResetPeakStats() {
  const std::lock_guard lock(stats_mutex_);
  NoteReserved();
  for (auto* stat : {&stats_.allocation, &stats_.active, &stats_.allocated_bytes,
                     &stats_.active_bytes, &stats_.requested_bytes, &stats_.reserved_bytes}) {
    (*stat)[kAggregate].reset_peak();
  }
}

void AddStats(const DeviceStats& from, DeviceStats& into) {
  const auto add = [&](auto member) {
    for (size_t i = 0; i < (into.*member).size(); ++i) {
      auto& sum = (into.*member)[i];
      const auto& part = (from.*member)[i];
      sum.current += part.current;
      sum.peak += part.peak;
      sum.allocated += part.allocated;
      sum.freed += part.freed;
    }
  };
  add(&DeviceStats::allocation);
  add(&DeviceStats::active);
  add(&DeviceStats::allocated_bytes);
  add(&DeviceStats::active_bytes);
  add(&DeviceStats::requested_bytes);
  add(&DeviceStats::reserved_bytes);
}

}  // namespace cgp
