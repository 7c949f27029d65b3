// A driver that makes nothing real: addresses, handles and events are only numbers.
//
// The core decides on it as on a GPU, on any machine, but nothing can be read or written. It counts
// what is taken, and runs out of it. It trusts its caller to follow the rules of driver.h, which
// testing/host_driver.h enforces.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/driver.h"

namespace cgp {

struct NumberDriverOptions {
  int device = 0;
  uint64_t granularity = uint64_t{2} << 20;  // a power of two from 512 up
  // The most bytes of all handles, and of all reservations.
  uint64_t physical_limit_bytes = uint64_t{80} << 30;
  uint64_t address_limit_bytes = uint64_t{1} << 47;
};

class NumberDriver final : public Driver {
 public:
  // Throws UsageError for an impossible granularity.
  explicit NumberDriver(const NumberDriverOptions& options = {})
      : options_(options), next_address_(std::max(kFirstAddress, options.granularity)) {
    if (std::has_single_bit(options.granularity) && options.granularity >= 512) return;
    throw UsageError("a driver's granularity of " + std::to_string(options.granularity) +
                     " bytes cannot be: take a power of two from 512 up");
  }

  int device() const noexcept override { return options_.device; }
  uint64_t granularity() const noexcept override { return options_.granularity; }

  Address Reserve(uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    const uint64_t room = std::min(options_.address_limit_bytes - reserved_bytes_, ~next_address_);
    Require(bytes, room, DriverStatus::kOutOfAddresses, "NumberDriver::Reserve");
    reserved_bytes_ += bytes;
    return std::exchange(next_address_, next_address_ + bytes);
  }
  void FreeAddresses(Address, uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    reserved_bytes_ -= bytes;
  }

  Handle Create(uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    const uint64_t room = options_.physical_limit_bytes - physical_bytes_;
    Require(bytes, room, DriverStatus::kOutOfMemory, "NumberDriver::Create");
    const Handle handle{++last_number_};
    handles_[handle] = {.bytes = bytes, .users = 1};
    physical_bytes_ += bytes;
    return handle;
  }
  void Release(Handle handle) override {
    const std::lock_guard lock(mutex_);
    Drop(handle);
  }
  void Map(Address address, uint64_t, Handle handle) override {
    const std::lock_guard lock(mutex_);
    mappings_[address] = handle;
    ++handles_.at(handle).users;
  }
  void Unmap(Address address, uint64_t) override {
    const std::lock_guard lock(mutex_);
    Drop(mappings_.extract(address).mapped());
  }
  void SetAccess(Address, uint64_t) override {}
  void AddPeer(int) override {}
  MemoryInfo Info() override {
    const std::lock_guard lock(mutex_);
    return {.free_bytes = options_.physical_limit_bytes - physical_bytes_,
            .total_bytes = options_.physical_limit_bytes};
  }

  // Nothing is captured, and all submitted work is done.
  void Quiesce() override {}
  bool MayQuiesce() noexcept override { return true; }
  void Capture(StreamId, Frontier* frontier) override { *frontier = {}; }
  bool Dependencies(GraphNode, std::vector<GraphNode>*) override {
    throw UsageError("there is no node");
  }
  Event RecordEvent(StreamId) override { return RecordDeviceEvent(); }
  Event RecordDeviceEvent() override {
    const std::lock_guard lock(mutex_);
    return Event{++last_number_};
  }
  bool EventDone(Event) override { return true; }
  void WaitEvent(StreamId, Event) override {}
  void DestroyEvent(Event) noexcept override {}

 private:
  // Not 0, and beyond what looks like a small number.
  static constexpr Address kFirstAddress = Address{1} << 40;

  struct Physical {
    uint64_t bytes = 0;
    uint64_t users = 0;  // its mappings, and 1 until it is released
  };

  void Require(uint64_t bytes, uint64_t room, DriverStatus status, const char* call) const {
    if (bytes <= room) return;
    throw DriverError(status, call, 2, "CUDA_ERROR_OUT_OF_MEMORY", bytes, device(),
                      std::to_string(room) + " bytes are left");
  }
  void Drop(Handle handle) {
    const auto found = handles_.find(handle);
    if (--found->second.users != 0) return;
    physical_bytes_ -= found->second.bytes;
    handles_.erase(found);
  }

  const NumberDriverOptions options_;
  std::mutex mutex_;
  std::unordered_map<Handle, Physical> handles_;
  std::unordered_map<Address, Handle> mappings_;
  uint64_t physical_bytes_ = 0;
  uint64_t reserved_bytes_ = 0;
  uint64_t last_number_ = 0;  // of a handle or an event
  Address next_address_;
};

}  // namespace cgp
