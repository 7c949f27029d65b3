#include "driver/metered_driver.h"

#include <string>

namespace cgp {
namespace {

thread_local bool refused_by_limit = false;

}  // namespace

bool MeteredDriver::LimitRefused() { return refused_by_limit; }

void MeteredDriver::ClearRefusals() { refused_by_limit = false; }

Handle MeteredDriver::Create(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const uint64_t limit = limit_.load(std::memory_order_relaxed);
  const uint64_t held = created_.load(std::memory_order_relaxed);
  refused_by_limit = held > limit || bytes > limit - held;
  if (refused_by_limit) {
    throw DriverError(DriverStatus::kOutOfMemory, "Create", 2, "memory fraction", bytes, device(),
                      "torch.cuda.set_per_process_memory_fraction() leaves graph pools " +
                          std::to_string(limit >> 20) + " MiB, of which " +
                          std::to_string(held >> 20) + " MiB are in use");
  }
  const Handle handle = inner().Create(bytes);
  try {
    sizes_.emplace(handle, bytes);
  } catch (...) {
    inner().Release(handle);
    throw;
  }
  created_.fetch_add(bytes, std::memory_order_release);
  changes_.fetch_add(1, std::memory_order_release);
  return handle;
}

void MeteredDriver::Release(Handle handle) {
  const std::lock_guard lock(mutex_);  // first: a released handle's value may come back
  inner().Release(handle);
  const auto size = sizes_.find(handle);
  created_.fetch_sub(size->second, std::memory_order_release);
  changes_.fetch_add(1, std::memory_order_release);
  sizes_.erase(size);
}

void MeteredDriver::Map(Address address, uint64_t bytes, Handle handle) {
  inner().Map(address, bytes, handle);
  if (listener_ != nullptr) listener_(device(), true, address, bytes);
}

void MeteredDriver::Unmap(Address address, uint64_t bytes) {
  inner().Unmap(address, bytes);
  if (listener_ != nullptr) listener_(device(), false, address, bytes);
}

}  // namespace cgp
