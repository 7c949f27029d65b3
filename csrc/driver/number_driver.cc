#include "driver/number_driver.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "core/base/error.h"

namespace cgp {
namespace {

constexpr uint64_t kSmallestGranularity = 512;

// Not 0, and beyond what looks like a small number.
constexpr Address kFirstAddress = Address{1} << 40;

}  // namespace

NumberDriver::NumberDriver(const NumberDriverOptions& options)
    : options_(options), next_address_(std::max(kFirstAddress, options.granularity)) {
  if (!std::has_single_bit(options.granularity) || options.granularity < kSmallestGranularity) {
    throw UsageError("a driver's granularity of " + std::to_string(options.granularity) +
                     " bytes cannot be: take a power of two from " +
                     std::to_string(kSmallestGranularity) + " up");
  }
}

void NumberDriver::Require(uint64_t bytes, uint64_t room, DriverStatus status,
                           const char* call) const {
  if (bytes <= room) return;
  throw DriverError(status, call, 2, "CUDA_ERROR_OUT_OF_MEMORY", bytes, device(),
                    std::to_string(room) + " bytes are left");
}

Address NumberDriver::Reserve(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const uint64_t room = std::min(options_.address_limit_bytes - reserved_bytes_, ~next_address_);
  Require(bytes, room, DriverStatus::kOutOfAddresses, "NumberDriver::Reserve");
  reserved_bytes_ += bytes;
  return std::exchange(next_address_, next_address_ + bytes);
}

void NumberDriver::FreeAddresses(Address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  reserved_bytes_ -= bytes;
}

Handle NumberDriver::Create(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const uint64_t room = options_.physical_limit_bytes - physical_bytes_;
  Require(bytes, room, DriverStatus::kOutOfMemory, "NumberDriver::Create");
  const Handle handle{++last_number_};
  handles_[handle] = {.bytes = bytes, .users = 1};
  physical_bytes_ += bytes;
  return handle;
}

void NumberDriver::Release(Handle handle) {
  const std::lock_guard lock(mutex_);
  Drop(handle);
}

void NumberDriver::Map(Address address, uint64_t, Handle handle) {
  const std::lock_guard lock(mutex_);
  mappings_[address] = handle;
  ++handles_.at(handle).users;
}

void NumberDriver::Unmap(Address address, uint64_t) {
  const std::lock_guard lock(mutex_);
  Drop(mappings_.extract(address).mapped());
}

void NumberDriver::Drop(Handle handle) {
  const auto found = handles_.find(handle);
  if (--found->second.users != 0) return;
  physical_bytes_ -= found->second.bytes;
  handles_.erase(found);
}

Event NumberDriver::RecordDeviceEvent() {
  const std::lock_guard lock(mutex_);
  return Event{++last_number_};
}

MemoryInfo NumberDriver::Info() {
  const std::lock_guard lock(mutex_);
  return {.free_bytes = options_.physical_limit_bytes - physical_bytes_,
          .total_bytes = options_.physical_limit_bytes};
}

}  // namespace cgp
